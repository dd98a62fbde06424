"""Malicious checkpoints of torch.distributed.checkpoint are refused in one line, before they take time or memory."""

import pickle
import pickletools
import resource
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_hostile import soon
from torch_checkpoints import quiet_save

from shoestring.checkpoint.format import tree
from shoestring.checkpoint.interop import dcp, pickles
from shoestring.core.errors import CheckpointError

MIB = 1 << 20


def altered(folder, change):
    known = torch_dcp.FileSystemReader(folder).read_metadata()
    change(known)
    (folder / ".metadata").write_bytes(pickle.dumps(known))
    return folder


def refused(folder, said):
    """Refused, in a process that may take 1 GiB more than it has; `ulimit` holds for torch's memory, too."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), before[1]))
    try:
        with soon(), pytest.raises(CheckpointError, match=said):
            dcp.read(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_deeply_nested_key_is_refused(tmp_path):
    folder = quiet_save({"a": torch.ones(2)}, tmp_path / "x")

    def nest(known):
        known.planner_data["a"] = ("k",) * 100_000

    refused(altered(folder, nest), "nested 100000 deep")
    altered(folder, lambda known: known.planner_data.update(a=("k",) * 100))
    states = dcp.read(folder)
    assert len(tree.encode(states, "", {})["map"]) == 1


@pytest.mark.parametrize("at", [-1, True, 1 << 40, "x", None, 1.0])
def test_an_odd_place_in_a_list_is_refused(at, tmp_path):
    folder = quiet_save({"a": [torch.ones(2), torch.ones(3)]}, tmp_path / "x")
    altered(folder, lambda known: known.planner_data.update({"a.0": ("a", 0), "a.1": ("a", at)}))
    refused(folder, "damaged, or not what torch writes")


def test_many_lists_with_gaps_are_refused(tmp_path):
    folder = quiet_save({f"a{number}": torch.ones(1) for number in range(30)}, tmp_path / "x")

    def spread(known):
        for number, name in enumerate(known.planner_data):
            known.planner_data[name] = ("a", number, 99_999)

    refused(altered(folder, spread), "too large")


def rezipped(folder, compression, content):
    """The file of a checkpoint of one value, with another archive in it."""
    (path,) = folder.glob("*.distcp")
    with zipfile.ZipFile(path) as old:
        parts = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in parts.items():
            new.writestr(name, content(name, data))

    def longer(known):
        for info in known.storage_data.values():
            info.length = path.stat().st_size

    return altered(folder, longer)


@pytest.mark.slow
def test_a_compressed_bomb_is_refused_before_it_grows(tmp_path):
    for number, value in enumerate((torch.ones(2), "text")):
        folder = quiet_save({"a": value}, tmp_path / str(number))
        rezipped(folder, zipfile.ZIP_DEFLATED, lambda name, data: b"N" * (100 * MIB) if "data.pkl" in name else data)
        assert sum(path.stat().st_size for path in folder.iterdir()) < MIB
        refused(folder, "compressed, or longer than")


@pytest.mark.slow
def test_an_archive_that_is_all_contents_is_refused(tmp_path):
    folder = quiet_save({"a": torch.ones(2)}, tmp_path / "x")
    (path,) = folder.glob("*.distcp")
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(30_000):
            archive.writestr(f"archive/{number}", b"")

    def longer(known):
        for info in known.storage_data.values():
            info.length = path.stat().st_size

    refused(altered(folder, longer), "that are no tensor's")


def test_a_stride_of_0_is_refused(tmp_path):
    folder = quiet_save({"a": torch.ones(4)}, tmp_path / "x")
    many = 1 << 28

    def stretch(name, data):
        if "data.pkl" not in name:
            return data
        found = data.replace(b"K\x04\x85", b"J" + many.to_bytes(4, "little") + b"\x85")
        found = found.replace(b"K\x01\x85", b"K\x00\x85")
        assert found != data
        return found

    rezipped(folder, zipfile.ZIP_STORED, stretch)

    def grow(known):
        known.state_dict_metadata["a"].size = torch.Size([many])
        (chunk,) = known.state_dict_metadata["a"].chunks
        chunk.sizes = torch.Size([many])

    refused(altered(folder, grow), "a tensor that is larger than its bytes")


def test_two_tensors_in_the_same_bytes_are_refused(tmp_path):
    """A thousand of them would be a thousand times as large as the file."""
    folder = quiet_save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "x")

    def alias(known):
        one, other = known.storage_data
        known.storage_data[other].offset = known.storage_data[one].offset + 1

    refused(altered(folder, alias), "two tensors share bytes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [b"]" * (1 << 24), b"(" * (1 << 24), b"}" * (1 << 24)], ids=["lists", "marks", "dicts"]
)
def test_a_pickle_of_a_great_many_objects_is_refused(data, monkeypatch):
    monkeypatch.setattr(pickles, "INSTRUCTIONS", 100_000)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="more than 100,000 instructions"):
            pickles.inert(b"\x80\x02" + data, "it")
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


def test_the_limit_of_instructions_leaves_room_for_the_largest_checkpoints_and_no_more(tmp_path):
    """As many as 75,000 tensors take in torch's own description; each may take some 100 bytes of memory."""

    def instructions(count):
        folder = quiet_save({f"a{number}": torch.ones(1) for number in range(count)}, tmp_path / str(count))
        return sum(1 for _ in pickletools.genops((folder / ".metadata").read_bytes()))

    of_a_tensor = (instructions(60) - instructions(20)) / 40
    assert 75_000 * of_a_tensor <= pickles.INSTRUCTIONS <= 10_000_000


def test_the_values_of_a_checkpoint_share_one_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp, "NODES", 3_000)
    wide = (tuple(range(30)),) * 30
    dcp.read(quiet_save({f"a{number}": wide for number in range(2)}, tmp_path / "few"))
    refused(quiet_save({f"a{number}": wide for number in range(5)}, tmp_path / "many"), "too large")


def test_what_is_nested_within_a_value_is_refused(tmp_path):
    deep = ()
    for _ in range(200):
        deep = (deep,)
    refused(quiet_save({"a": deep}, tmp_path / "x"), "nested more than 100 deep")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    model = {"w": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16)}
    folder = quiet_save({"model": model, "list": [1, {"x": 2.5}]}, tmp_path_factory.mktemp("dcp") / "it")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_in_what_torch_wrote_are_read_or_refused(honest, tmp_path, data):
    changed = data.draw(st.sampled_from(sorted(honest)))
    for name, content in honest.items():
        found = bytearray(content)
        if name == changed:
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(0, len(found) - 1))
                found[at] = data.draw(st.sampled_from([0, 1, 0x28, 0x5D, 0x6A, 0x7D, 0x85, 0xFF]) | st.integers(0, 255))
            if data.draw(st.integers(0, 9)) == 0:
                del found[data.draw(st.integers(0, len(found) - 1)) :]
        (tmp_path / name).write_bytes(found)
    with soon(), suppress(CheckpointError):
        dcp.read(tmp_path)


CODES = b"])}(abNK\x01\x85\x86\x87\x80\x02c\nRq\x00h\x00sutle\x94\x93\x8cxJ\x8aQ"  # instructions, and arguments


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*CODES]), max_size=60))
def test_any_pickle_is_read_or_refused(data):
    with suppress(CheckpointError):
        pickles.plain(pickles.inert(bytes(data), "it"), "it")
