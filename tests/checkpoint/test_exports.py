"""What is exported is what was saved, bit for bit; runs resume from what is imported; foreign files run no code."""

import json
import os
import pickle
import weakref
from pathlib import Path

import pytest
import saving_ranks
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from saving_ranks import digest
from torch_checkpoints import quiet_load, quiet_save

from shoestring.checkpoint.format.layout import Box
from shoestring.checkpoint.format.manifest import Record
from shoestring.checkpoint.format.tensor_file import DTYPES
from shoestring.checkpoint.interop import dcp, exports, pickles
from shoestring.checkpoint.interop.pickles import Call, inert, plain
from shoestring.checkpoint.tiers.disk import Disk
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.cli import main
from shoestring.core.errors import CheckpointError
from shoestring.testing.pool import Pool
from shoestring.verbs.archive import Archive
from shoestring.verbs.interchange import export, import_checkpoint
from shoestring.verbs.settings import CheckpointImport

KINDS = ("one", "ddp", "fsdp")


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """By kind: the run folder, and the digests of its state after its last step."""
    root = tmp_path_factory.mktemp("runs")
    found = {"one": (root / "one", saving_ranks.train(folder=str(root / "one"), steps=3, total=3))}
    for kind in KINDS[1:]:
        found[kind] = root / kind, pool.call(saving_ranks.train, folder=str(root / kind), steps=3, total=3)[0]
    return found


def exported(folder, to, way):
    return export(folder, to, format=way)


def imported(source, to, way, **names):
    return import_checkpoint(source, to, CheckpointImport(format=way, **names))


@pytest.mark.parametrize("kind", KINDS)
def test_safetensors_has_the_weights(runs, kind, tmp_path):
    folder, story = runs[kind]
    assert exported(folder, tmp_path / "out", "safetensors") == [tmp_path / "out" / "model.safetensors"]
    found = {f"model.{name}": digest(tensor) for name, tensor in load_file(tmp_path / "out/model.safetensors").items()}
    assert found == {name: value for name, value in story["last"].items() if name.startswith("model.")}


@pytest.mark.parametrize("kind", KINDS)
def test_torch_loads_what_is_exported_for_it(runs, kind, tmp_path):
    folder, story = runs[kind]
    exported(folder, tmp_path / "out", "dcp")
    content = Archive.of(folder).pick(None).content()

    def zeros(state):
        if isinstance(state, exports.Stored):
            return torch.zeros(state.shape, dtype=state.dtype)
        return {key: zeros(value) for key, value in state.items()} if isinstance(state, dict) else state

    state = {name: zeros(content.state(name)) for name in ("model", "optimizer", "progress")}
    state["progress"]["step"] = 0
    state["optimizer"]["param_groups"][0]["lr"] = 0.0
    quiet_load(state, tmp_path / "out")
    assert flat(state) == story["last"]
    assert (state["progress"]["step"], state["optimizer"]["param_groups"][0]["lr"]) == (3, 1e-2)


def flat(state):
    found = {f"model.{name}": digest(tensor) for name, tensor in state["model"].items()}
    for name, each in state["optimizer"]["state"].items():
        found |= {f"optimizer.state.{name}.{key}": digest(tensor) for key, tensor in each.items()}
    return found


@pytest.mark.parametrize("kind", [pytest.param("one", marks=pytest.mark.slow), "fsdp"])
def test_a_run_resumes_bitwise_from_what_went_out_and_in_again(runs, kind, pool, tmp_path):
    folder, story = runs[kind]
    exported(folder, tmp_path / "out", "dcp")
    for where in ("one", "fsdp"):
        imported(tmp_path / "out", tmp_path / where, "dcp")
    alone = saving_ranks.train(folder=str(tmp_path / "one"), steps=5, resume=True)
    assert (alone["began"], alone["first"]) == (3, story["last"])
    sharded = pool.call(saving_ranks.train, folder=str(tmp_path / "fsdp"), steps=3, resume=True)
    assert [(each["began"], each["first"]) for each in sharded] == [(3, story["last"])] * 2
    if kind == "one":
        straight = saving_ranks.train(folder=str(folder), steps=5, resume=True)
        assert alone["last"] == straight["last"] != alone["first"]


def test_weights_alone_are_a_start_at_step_0(runs, tmp_path):
    folder, story = runs["fsdp"]
    exported(folder, tmp_path / "out", "safetensors")
    imported(tmp_path / "out", tmp_path / "one", "safetensors")
    begun = saving_ranks.train(folder=str(tmp_path / "one"), steps=0, resume=True)
    assert begun["began"] == begun["step"] == 0
    weights = {name: value for name, value in story["last"].items() if name.startswith("model.")}
    assert weights.items() <= begun["first"].items()
    with pytest.raises(CheckpointError, match="already has a checkpoint of step 0"):
        imported(tmp_path / "out", tmp_path / "one", "safetensors")


# -- foreign files ----------------------------------------------------------------------------------------------------


def foreign():
    """Whatever torch can save: types, strides, nesting, lists, no elements, a view of something larger."""
    torch.manual_seed(3)
    several = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES.values()}
    odd = {
        "strided": torch.randn(4, 6).t(),
        "part": torch.randn(9)[2:7],
        "none": torch.empty(0, 3),
        "0": torch.tensor(7),
    }
    return {
        "model": {**several, **odd, "outer": {"inner": torch.ones(2)}},
        "list": [torch.zeros(2), {"a": torch.ones(1), "b": (1, 2.5, None, "x", True)}],
        "plain": {"numbers": [1, 2, 3], "large": 2**80, "text": "é"},
    }


def test_what_torch_wrote_is_read_without_unpickling(tmp_path, monkeypatch):
    quiet_save(foreign(), tmp_path / "out")

    def forbidden(*_, **__):
        raise AssertionError("something was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, forbidden)
    found = dcp.read(tmp_path / "out")
    assert same(found, foreign())


def same(one, other):
    if isinstance(other, torch.Tensor):
        return digest(one) == digest(other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_the_optimizer_of_a_foreign_loop_keeps_its_numbers(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    quiet_save({"net": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "out")
    states = dcp.renamed(dcp.read(tmp_path / "out"), "net", "optim")
    assert states["optimizer"]["state"].keys() == {0, 1}
    fresh = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    fresh.load_state_dict(states["optimizer"])
    with pytest.raises(CheckpointError, match=r"has no `model` \(hint: it has: net, optim"):
        dcp.renamed(dcp.read(tmp_path / "out"), "model", "optimizer")


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_pickle_that_would_run_a_command_runs_none(tmp_path):
    quiet_save(foreign(), tmp_path / "out")
    attack = pickle.dumps(Attack(tmp_path / "mark"))
    (tmp_path / "out/.metadata").write_bytes(attack)
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        dcp.read(tmp_path / "out")
    found = inert(attack, "it")
    assert isinstance(found, Call) and found.target == "posix.system"
    with pytest.raises(CheckpointError, match="it contains"):
        plain([found], "it")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        pickle.dumps({1: 2})[:-3],
        b"\x80\x02]q\x00h\x07.",
        b"\x80\x02\x82\x01.",
        b"K\x01a.",
    ],
)
def test_what_is_no_pickle_of_plain_data_is_refused(data):
    with pytest.raises(CheckpointError):
        inert(data, "it")


def test_a_list_that_holds_itself_or_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(pickles, "NODES", 10_000)
    endless = [1]
    endless.append(endless)
    with pytest.raises(CheckpointError, match="is not plain data"):
        plain(inert(pickle.dumps(endless), "it"), "it")
    wide = [0]
    for _ in range(40):
        wide = [wide] * 10
    with pytest.raises(CheckpointError, match="not plain data: it is too large"):
        plain(inert(pickle.dumps(wide), "it"), "it")


def test_a_part_of_a_larger_storage_is_read_where_it_lies(tmp_path):
    tensor = torch.arange(24.0).view(4, 6)[1:3, 2:5]
    torch.save(tensor, tmp_path / "file")
    length = (tmp_path / "file").stat().st_size
    found = dcp._chunk(tmp_path, ("file", 0, length), Box((0, 0), (2, 3)), torch.float32)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("damage", "said"),
    [("flip", "a checksum does not match"), ("cut", "not a zip file"),
     ("outside", "'../secret' is not the name of a file"), ("larger", "`model.a` is incomplete")],
)  # fmt: skip
def test_damage_to_what_torch_wrote_is_found(tmp_path, damage, said):
    folder = tmp_path / "out"
    quiet_save({"model": {"a": torch.arange(4000.0)}}, folder)
    file, metadata = folder / "__0_0.distcp", folder / ".metadata"
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-9000])
    else:
        known = torch_dcp.FileSystemReader(folder).read_metadata()
        (info,) = known.storage_data.values()
        if damage == "outside":
            info.relative_path = "../secret"
        else:
            known.state_dict_metadata["model.a"].size = torch.Size([5000])
        metadata.write_bytes(pickle.dumps(known))
    with pytest.raises(CheckpointError, match=said):
        dcp.read(folder)


# -- the pieces -------------------------------------------------------------------------------------------------------


def test_no_more_than_one_tensor_is_in_memory(tmp_path):
    alive = []

    def read(box):
        assert all(each() is None for each in alive)
        tensor = torch.full(box.shape, 3.0)
        alive.append(weakref.ref(tensor))
        return tensor

    whole = Box((0,), (1000,))
    tensors = {str(n): exports.Stored(str(n), torch.float32, (1000,), ((whole, read),)) for n in range(5)}
    exports.write_safetensors(tensors, tmp_path / "out.safetensors")
    assert len(alive) == 5
    assert all(bool((tensor == 3).all()) for tensor in load_file(tmp_path / "out.safetensors").values())


def test_every_type_is_written_and_read(tmp_path):
    given = {str(kind): torch.arange(5).to(kind) for kind in DTYPES.values() if kind is not torch.complex64}
    given |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 2)}
    exports.write_safetensors({name: exports.held(name, t) for name, t in given.items()}, tmp_path / "a.safetensors")
    assert same(load_file(tmp_path / "a.safetensors"), given)
    assert same(exports.read_safetensors(tmp_path), given)
    data = (tmp_path / "a.safetensors").read_bytes()
    header = json.loads(data[8 : (start := 8 + int.from_bytes(data[:8], "little"))])
    header.pop("__metadata__")
    assert all((start + each["data_offsets"][0]) % given[name].itemsize == 0 for name, each in header.items())


def test_a_damaged_piece_leaves_no_file(runs, tmp_path):
    folder = Archive.of(runs["fsdp"][0]).pick(None).path
    copy = tmp_path / "run" / folder.name
    copy.mkdir(parents=True)
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "private-1.safetensors":
            data[-30_000] ^= 1
        (copy / path.name).write_bytes(data)
    for way in ("safetensors", "dcp"):
        with pytest.raises(CheckpointError, match=r"private-1\.safetensors` is damaged: chunk 0"):
            exported(tmp_path / "run", tmp_path / way, way)
        assert not list(Path(tmp_path / way).glob("*.safetensors")) and not (tmp_path / way / ".metadata").exists()


def test_damage_far_behind_the_header_is_found_when_it_is_read(tmp_path):
    path = exports.commit({"model": {"a": torch.zeros(3 << 20)}}, 7, 0, Disk(tmp_path / "run", Files()))
    with (path / "private-0.safetensors").open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"\1")
    for way in ("safetensors", "dcp"):
        with pytest.raises(CheckpointError, match="is damaged: chunk 3"):
            exported(tmp_path / "run", tmp_path / way, way)
        left = {path.name for path in tmp_path.glob(f"{way}/*")}
        assert left <= (set() if way == "safetensors" else {"__0_0.distcp"})  # torch may leave the file that it was at


def test_resuming_from_an_import_is_no_failure(tmp_path):
    path = exports.commit({"model": {}}, 7, 0, Disk(tmp_path, Files()))
    assert Record.read(path / "manifest.json").notes["last"] is True


def test_one_file_is_imported_too_and_never_into_what_was_started(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    imported(tmp_path / "model.safetensors", tmp_path / "run", "safetensors")
    found = Archive.of(tmp_path / "run").pick(None).content().state("model")
    assert torch.equal(found["weight"].read(), torch.ones(2))
    saving_ranks.train(folder=str(tmp_path / "begun"), steps=1)
    with pytest.raises(CheckpointError, match="a run was already started in"):
        imported(tmp_path / "model.safetensors", tmp_path / "begun", "safetensors")


def test_a_step_below_zero_is_refused(tmp_path, capsys):
    assert main(["checkpoint", "import", str(tmp_path), "--to", str(tmp_path / "run"), "--step", "-5"]) == 2
    assert "--step must not be negative, got -5" in capsys.readouterr().err


def test_an_import_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}              damaged")
    with pytest.raises(CheckpointError, match="cannot read"):
        imported(tmp_path / "in", tmp_path / "run", "safetensors")
    quiet_save({"model": {"a": torch.ones(2)}}, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="add --as dcp"):
        imported(tmp_path / "dcp", tmp_path / "run", "safetensors")
    assert not list(tmp_path.glob("run/**/*"))
    (tmp_path / "dcp/.metadata").unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        dcp.read(tmp_path / "dcp")
