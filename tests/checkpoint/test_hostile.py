"""Malicious and odd files are refused in one line: nothing waits, nothing takes more memory than the files are long."""

import json
import os
import signal
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from shoestring.checkpoint.format import tree
from shoestring.checkpoint.format.checksum import crc32, sums
from shoestring.checkpoint.format.manifest import CheckpointId, Entry, Record
from shoestring.checkpoint.format.part import Part
from shoestring.checkpoint.format.state import pack, unpack
from shoestring.checkpoint.interop import dcp, exports
from shoestring.checkpoint.recovery import attempts
from shoestring.checkpoint.recovery.decide import ResumeFacts, decide
from shoestring.checkpoint.recovery.offers import DISK, Available, Offer, Wish
from shoestring.checkpoint.recovery.resume import load
from shoestring.checkpoint.tiers import disk, plain
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.slots import SEAL, sealed
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Kept
from shoestring.core.world import World
from shoestring.storage.guarded import open_regular, read_regular
from shoestring.verbs.archive import COMPLETE, Archive

MIB = 1 << 20


@contextmanager
def soon(seconds=20):
    """Fail, rather than wait for ever."""

    def ended(*_):
        raise AssertionError(f"it waited for {seconds} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def odd(path, kind):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    return path


# -- pipes and devices ------------------------------------------------------------------------------------------------

NAME = "private-0.safetensors"


def looks(path):
    """What reads a file of some name: what it does with that in `path`."""
    return {
        "a manifest": lambda: Record.read(path),
        "a part": lambda: Part.open(path, 8, (0,)),
        "a part in a slot": lambda: Part.open(path, 8, (0,), slot=True),
        "a checkpoint in one file": lambda: plain.read(path),
        "what torch wrote": lambda: dcp.read(path.parent),
        "weights": lambda: exports.read_safetensors(path.parent),
    }


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("what", looks(None))
def test_what_is_no_file_is_refused(what, kind, tmp_path):
    names = {"what torch wrote": ".metadata", "weights": "model.safetensors"}
    path = odd(tmp_path / "x" / names.get(what, "it"), kind)
    with soon(), pytest.raises(CheckpointError, match=r"regular file|not private|Too many levels"):
        looks(path)[what]()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_odd_things_in_the_places_of_records_are_as_if_they_were_not_there(kind, tmp_path):
    assert sealed(odd(tmp_path / f"own-0-0{SEAL}", kind)) is None
    odd(tmp_path / "step-00000001-0000-ab" / disk.MANIFEST, kind)
    with soon():
        assert disk.manifests(tmp_path) == []
        assert attempts.read_marks(odd(tmp_path / f"{disk.MARK}0", kind).parent) == ({}, [], False)
        odd(tmp_path / "plain/step-00000001.safetensors", kind)
        with pytest.raises(CheckpointError, match="can be read"):
            plain.Restorer({}, World(), tmp_path / "plain").restore("auto")
        assert all(save.state != COMPLETE for save in Archive.of(tmp_path).found())


def test_a_device_is_not_opened(tmp_path, monkeypatch):
    """Opening one may already do something."""
    opened, real = [], os.open

    def noted(path, *rest, **more):
        opened.append(path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", noted)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(odd(tmp_path / "x", "device"))
    assert not opened


def test_a_long_file_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="longer than 1 MB"):
        read_regular(tmp_path / "x", 1_000_000)


# -- our own files, made by somebody else: with the right checksums ---------------------------------------------------

FORMS = ["tensor", "array", "tuple", "map", "progress", "a"]
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 61) | st.floats() | st.sampled_from(["", "a", "tensor", "map"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FORMS), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(junk)
def test_any_tree_is_decoded_or_refused(value):
    with suppress(CheckpointError):
        tree.decode(value, {"a": torch.ones(2), "": torch.ones(1, dtype=torch.bfloat16)}.__getitem__)


@pytest.mark.slow
@settings(max_examples=200)
@given(junk)
def test_any_content_of_a_checkpoint_in_one_file_is_read_or_refused(tmp_path_factory, value):
    text = json.dumps(value)
    total = crc32(b"a torch.float32 (2,)", crc32(text.encode()))
    total = crc32(torch.ones(2).view(torch.uint8).numpy().data, total)
    data = save({"a": torch.ones(2)}, metadata={"tree": text, "sum": f"{total:08x}"})
    with suppress(CheckpointError):
        unpack(data)
    path = tmp_path_factory.mktemp("one") / "step-00000001.safetensors"
    path.write_bytes(pack({"format": plain.FORMAT, "shared": value, "own": [] if isinstance(value, dict) else value}))
    with suppress(CheckpointError):
        found = plain.read(path)
        exports.one_file(path)
        assert isinstance(found["shared"], dict)


def test_a_deeply_nested_tree_is_refused():
    deep = "[" * 5000 + "]" * 5000
    data = save({"a": torch.ones(1)}, metadata={"tree": deep, "sum": f"{crc32(deep.encode()):08x}"})
    with pytest.raises(CheckpointError, match="not a saved state, or damaged"):
        unpack(data)
    with pytest.raises(CheckpointError, match="RecursionError"):
        tree.decode(json.loads("[" * 900 + "]" * 900), {}.__getitem__)
    endless = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="cannot save `x`: it is nested too deeply, or contains itself"):
        tree.encode({"y": endless}, "x", {})


def test_a_tensor_of_no_elements_and_a_huge_shape_is_refused():
    shape = [0, 1 << 59, 1 << 59]
    header = json.dumps({
        "__metadata__": {"about": "{}", "boxes": json.dumps({"a": ["a", shape, [0, 0, 0]]})},
        "a": {"dtype": "F32", "shape": [0, 1, 1], "data_offsets": [0, 0]},
    }).encode()  # fmt: skip
    data = torch.frombuffer(bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="of `a` is too large"):
        _ = Part("it", data, sums(data)).pieces


# -- many ranks -------------------------------------------------------------------------------------------------------


def offers(ranks, there, notes=()):
    of = CheckpointId(1, 0, "ab", ranks, 1)
    return [
        Offer(of, 0, DISK, f"/x/{part}", part, Entry(part, 0, ()), tuple(notes))
        for part in (f"private-{r}" for r in there)
    ]


@pytest.mark.slow
def test_a_record_of_65536_ranks_takes_no_time():
    ranks, wish = 1 << 16, Wish(Path("/x"))
    began = time.process_time()

    def action(*there):
        return decide(Available(tuple(offers(*there))), None, wish, ResumeFacts()).action

    assert action(ranks, range(ranks)) == "load"
    assert action(ranks, range(ranks - 1)) == "refuse"
    assert action(1 << 20, range(9)) == "refuse"
    everyone = [("ranks", list(range(ranks))), ("lengths", [1] * ranks), ("marks", [1] * ranks)]
    assert action(ranks, range(2), everyone) == "refuse"
    assert time.process_time() - began < 20  # it was 81


# -- states that cannot be saved, or do not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "a nested tensor"),
        (lambda: torch.empty(3, device="meta"), "a tensor on the meta device"),
    ],
    ids=["coo", "csr", "nested", "jagged", "meta"],
)
def test_tensors_without_a_place_for_each_number_are_refused(tensor, said):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = tensor()
    for work in (lambda: pack({"outer": {"x": value}}), lambda: tree.encode({"x": value}, "outer", {})):
        with pytest.raises(CheckpointError, match=f"cannot save `outer/x`: {said}"):
            work()


def test_conjugated_and_negated_tensors_are_saved_by_value():
    value = torch.tensor([1 + 2j, 3 - 4j])
    found = unpack(pack({"conj": value.conj(), "imag": value.conj().imag}))
    assert torch.equal(found["conj"], value.conj().resolve_conj()) and torch.equal(
        found["imag"], torch.tensor([-2.0, 4.0])
    )


class Unfit:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise TypeError("unhashable type: 'list'")


def test_whatever_a_state_raises_says_that_it_does_not_fit(tmp_path):
    kept = {"mine": Kept(Unfit(), "same", None)}
    wanted = SimpleNamespace(state=lambda name: {}, saved={"mine"})
    checkpointer = SimpleNamespace(kept=kept, world=World(), group=RankGroup.join(World()))
    with pytest.raises(CheckpointError, match="step 3 does not fit this run's mine: unhashable type"):
        load(checkpointer, wanted, "step 3")
    path = tmp_path / "step-00000003.safetensors"
    path.write_bytes(pack({"format": plain.FORMAT, "shared": {"mine": {}}, "own": []}))
    with pytest.raises(CheckpointError, match="does not fit this run's mine: unhashable type"):
        plain.Restorer(kept, World(), tmp_path).restore("auto")
