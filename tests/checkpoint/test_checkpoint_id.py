"""Records: written and read back, and refused where they are damaged or malicious."""

import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.checkpoint.format.checksum import CHUNK
from shoestring.checkpoint.format.manifest import FORMAT, LIMIT, CheckpointId, Entry, Record
from shoestring.checkpoint.tiers import disk
from shoestring.checkpoint.tiers.slots import SEAL, seals
from shoestring.core.errors import CheckpointError

counts = st.integers(0, (1 << 60) - 1)


@st.composite
def records(draw):
    local, hosts = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    uid = draw(st.text("0123456789abcdef", min_size=1, max_size=8))
    checkpoint = CheckpointId(draw(counts), draw(counts), uid, local * hosts, local)
    parts = {}
    for rank in range(draw(st.integers(0, 3))):
        nbytes = draw(st.integers(0, 3 * CHUNK))
        marks = draw(st.lists(st.integers(0, 2**32 - 1), min_size=-(-nbytes // CHUNK), max_size=-(-nbytes // CHUNK)))
        parts[f"private-{rank}"] = Entry(f"private-{rank}.safetensors", nbytes, tuple(marks))
    return Record(
        checkpoint,
        parts,
        draw(st.sampled_from([{}, {"last": True}, {"ranks": [0, 2], "lengths": [7, 8], "marks": [1, 2]}])),
    )


@pytest.mark.slow
@given(records())
def test_what_is_written_is_read(record):
    assert Record.loads(record.dumps(), "a record") == record


GOOD = {
    "format": FORMAT,
    "generation": {"step": 1, "start": 0, "uid": "ab12", "ranks": 4, "local": 2},
    "parts": {"private-0": {"file": "private-0.safetensors", "nbytes": 5, "sums": [7]}},
    "notes": {},
}


def sealed(body):
    """A record whose checksum is right, whatever is in it."""
    text = body if isinstance(body, str) else json.dumps(body)
    return json.dumps({"body": text, "sum": zlib.crc32(text.encode())}).encode()


def with_(path, value):
    """GOOD with another value at a path of keys."""
    body = json.loads(json.dumps(GOOD))
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return sealed(body)


DEEP = "[" * 100_000 + "]" * 100_000
PART = ("parts", "private-0")
NUMBERS = (-1, 1 << 60, 1.0, True, "1", None, [1], {})
MALICIOUS = {
    "nothing": b"",
    "no JSON": b"\x00\xff",
    "no object": b"[]",
    "no body": b'{"sum": 0}',
    "a body of a number": b'{"body": 1, "sum": 0}',
    "deeply nested": DEEP.encode(),
    "deeply nested within": sealed(DEEP),
    "a huge number": sealed("9" * 10_000),
    "a lone surrogate": b'{"body": "\\ud800", "sum": 0}',
    "a body that is no object": sealed([]),
    "another format": with_(("format",), FORMAT + 1),
    "parts that are a list": with_(("parts",), ["private-0"]),
    "a part that is a list": with_(PART, [1]),
    "notes that are none": with_(("notes",), None),
    "notes that are pairs": with_(("notes",), [["ranks", 1]]),
    "a checkpoint that is a list": with_(("generation",), [1]),
    "more ranks than there are": with_(("generation", "ranks"), 1 << 40),
    "no ranks": with_(("generation", "ranks"), 0),
    "no ranks of a host": with_(("generation", "local"), 0),
    "half a host": with_(("generation", "ranks"), 5),
    "a start of a path": with_(("generation", "uid"), "../../x"),
    "an empty start": with_(("generation", "uid"), ""),
    "too few checksums": with_((*PART, "sums"), []),
    "too many checksums": with_((*PART, "sums"), [1, 2]),
    "checksums of text": with_((*PART, "sums"), "1"),
    "parity of nobody else": with_(("notes",), {"ranks": [0], "lengths": [1]}),
    "parity without lengths": with_(("notes",), {"ranks": [0, 1]}),
    "parity of a number": with_(("notes",), {"ranks": 3, "lengths": 3}),
    "parity of a rank twice": with_(("notes",), {"ranks": [1, 1], "lengths": [1, 1]}),
    "parity of negative lengths": with_(("notes",), {"ranks": [0, 1], "lengths": [1, -1]}),
}
FILES = ("../x", "/etc/passwd", "a/b", "", ".", "..", "a\0b", "a/", "./a", 7, None, ["a"])
MALICIOUS |= {f"{file!r} for a file": with_((*PART, "file"), file) for file in FILES}
MALICIOUS |= {f"{n!r} for a step": with_(("generation", "step"), n) for n in NUMBERS}
MALICIOUS |= {f"{n!r} for bytes": with_((*PART, "nbytes"), n) for n in NUMBERS}
MALICIOUS |= {f"{n!r} for a checksum": with_((*PART, "sums"), [n]) for n in NUMBERS}


@pytest.mark.parametrize("data", MALICIOUS.values(), ids=MALICIOUS)
def test_a_malicious_record_is_refused_without_taking_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="`a record`"):
            Record.loads(data, "a record")
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data) + 100_000
    finally:
        tracemalloc.stop()


def test_the_record_that_the_others_are_made_of_is_good():
    assert Record.loads(sealed(GOOD), "a record").parts["private-0"] == Entry("private-0.safetensors", 5, (7,))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
PATHS = [(key,) for key in GOOD] + [("generation", key) for key in GOOD["generation"]] + [PART]
PATHS += [(*PART, key) for key in ("file", "nbytes", "sums")] + [("notes", "ranks"), ("notes", "lengths")]


@given(st.sampled_from(PATHS), values)
def test_any_value_is_read_or_refused(path, value):
    try:
        Record.loads(with_(path, value), "a record")
    except CheckpointError as error:
        assert "`a record`" in str(error)


@given(records(), st.data())
def test_no_other_bytes_are_read_as_a_record(record, data):
    text = bytearray(record.dumps())
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointError, match="`a record`"):
        Record.loads(bytes(text), "a record")
    with pytest.raises(CheckpointError, match="`a record`"):
        Record.loads(record.dumps()[: data.draw(st.integers(0, len(text) - 1))], "a record")


def test_a_huge_record_is_not_read(tmp_path):
    with (tmp_path / "record").open("wb") as file:
        file.truncate(LIMIT + 1)
    with pytest.raises(CheckpointError, match="longer than 100 MB"):
        Record.read(tmp_path / "record")


def test_damaged_records_are_passed_over(tmp_path):
    good = Record(CheckpointId(1, 0, "ab", 1, 1), {}, {})
    for name, data in (("step-1", good.dumps()), ("step-2", good.dumps()[:-1]), ("step-3", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / disk.MANIFEST).write_bytes(data)
    (tmp_path / "step-4" / disk.MANIFEST).mkdir(parents=True)
    assert disk.manifests(tmp_path) == [(tmp_path / "step-1", good)]


def test_a_seal_speaks_of_its_own_slot_only(tmp_path):
    record = Record(CheckpointId(1, 0, "ab", 1, 1), {"private-0": Entry("own-0-1.private", 0, ())}, {})
    for name in ("own-0-0", "own-0-1", "own-0-10"):
        (tmp_path / f"{name}{SEAL}").write_bytes(record.dumps())
    assert list(seals(tmp_path)) == [(tmp_path / f"own-0-1{SEAL}", record)]
