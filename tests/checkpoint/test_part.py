"""The file form of a part: what is written is read back, elsewhere too, and nothing malicious or damaged is."""

import json
import tracemalloc
from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load, save

from shoestring.checkpoint.format.checksum import CHUNK, sums
from shoestring.checkpoint.format.layout import Box, Leaf
from shoestring.checkpoint.format.part import HEADER_LIMIT, Draft, Part
from shoestring.checkpoint.format.tensor_file import DTYPES
from shoestring.core.errors import CheckpointError

ABOUT = {"step": 3, "trees": {"shared": {}, "own": {}}}


def leaf(name, data, *, of=None, offset=None):
    shape = tuple(of or data.shape)
    return Leaf(name, shape, Box(tuple(offset or (0,) * data.ndim), tuple(data.shape)), (0,), data)


def written(leaves, about=ABOUT):
    draft = Draft.of(leaves, about)
    room = torch.zeros(draft.nbytes, dtype=torch.uint8)
    draft.fill(room)
    return room


def part_of(data):
    """A part whose checksums are right, whatever is in it."""
    room = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return Part("a part", room, sums(room))


def everything(part):
    """All that can be read of a part."""
    return part.about, [(piece, part.read(piece)) for piece in part.pieces]


def packed(header, body=b""):
    """A safetensors file with this header: JSON, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def header_of(entries, boxes=None, about=ABOUT):
    if boxes is None:
        boxes = {name: [name, entry["shape"], [0] * len(entry["shape"])] for name, entry in entries.items()}
    return {"__metadata__": {"about": json.dumps(about), "boxes": json.dumps(boxes)}, **entries}


# -- written and read -------------------------------------------------------------------------------------------------


@st.composite
def leaves(draw):
    found = []
    for number in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(list(DTYPES.values())))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = prod(shape) * dtype.itemsize
        limit = 1 if dtype == torch.bool else 255
        values = draw(st.lists(st.integers(0, limit), min_size=count, max_size=count))
        data = torch.tensor(values, dtype=torch.uint8).view(dtype).view(shape)
        offset = [draw(st.integers(0, 3)) for _ in shape]
        of = [a + b + draw(st.integers(0, 3)) for a, b in zip(offset, shape, strict=True)]
        found.append(
            leaf(draw(st.sampled_from(["a", "a/b", "__metadata__", f"n{number}"])), data, of=of, offset=offset)
        )
    return found


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist()


@given(leaves())
def test_what_is_written_is_read_and_the_safetensors_package_reads_the_same(found):
    data = written(found)
    about, read = everything(part_of(data.numpy().tobytes()))
    assert about == ABOUT
    key = repr
    assert sorted(((p.tensor, p.shape, p.box, bits(t)) for p, t in read), key=key) == sorted(
        ((each.name, each.shape, each.box, bits(each.data)) for each in found), key=key
    )
    theirs = load(data.numpy().tobytes())
    assert sorted(map(repr, map(bits, theirs.values()))) == sorted(repr(bits(each.data)) for each in found)


@pytest.mark.slow
@given(leaves())
def test_what_the_safetensors_package_writes_is_read(found):
    tensors = {f"t{number}": each.data for number, each in enumerate(found)}
    boxes = {f"t{n}": [each.name, each.shape, each.box.offset] for n, each in enumerate(found)}
    data = save(tensors, {"about": json.dumps(ABOUT), "boxes": json.dumps(boxes)})
    _, read = everything(part_of(data))
    assert sorted(repr((p.tensor, p.box, bits(t))) for p, t in read) == sorted(
        repr((each.name, each.box, bits(each.data))) for each in found
    )


def test_a_type_that_safetensors_lacks_is_refused():
    with pytest.raises(CheckpointError, match="`odd`: safetensors does not support"):
        Draft.of([leaf("odd", torch.zeros(2, dtype=torch.complex32))], ABOUT)


def test_only_what_is_read_is_verified_and_every_flipped_bit_is_found():
    data = written([leaf("low", torch.arange(CHUNK // 4)), leaf("high", torch.arange(CHUNK // 4))])
    expected = sums(data)
    assert len(expected) == 5
    for chunk in range(5):
        data[chunk * CHUNK + 5] ^= 16
        part = Part("a part", data, expected)
        with pytest.raises(CheckpointError, match=f"chunk {chunk} has a wrong checksum"):
            part.verify()
        if chunk:  # the header is whole
            good = {piece.tensor for piece in part.pieces if not piece.start <= chunk * CHUNK + 5 < piece.stop}
            with pytest.raises(CheckpointError, match="damaged"):
                [part.read(piece) for piece in part.pieces if piece.tensor not in good]
        data[chunk * CHUNK + 5] ^= 16
    Part("a part", data, expected).verify()


def test_a_file_of_another_length_or_none_is_refused(tmp_path):
    data = written([leaf("a", torch.arange(9))])
    (tmp_path / "part").write_bytes(data.numpy().tobytes())
    assert Part.open(tmp_path / "part", len(data), sums(data)).about == ABOUT
    for nbytes, marks in ((len(data) - 1, sums(data)), (len(data), []), (len(data), [*sums(data), 0])):
        with pytest.raises(CheckpointError, match="part` is damaged"):
            Part.open(tmp_path / "part", nbytes, marks)
    with pytest.raises(CheckpointError, match="cannot read"):
        Part.open(tmp_path / "none", 8, [0])
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError):
        Part.open(tmp_path / "folder", (tmp_path / "folder").stat().st_size, [0])


# -- malicious --------------------------------------------------------------------------------------------------------

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DEEP = b"[" * 100_000 + b"]" * 100_000

MALICIOUS = {
    "nothing": b"",
    "a length alone": (2).to_bytes(8, "little"),
    "a huge header": (1 << 62).to_bytes(8, "little") + b"{}",
    "a header longer than the limit": (HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}",
    "a header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "an empty header": packed(b""),
    "no JSON": packed(b"\xff\xfe not json"),
    "no object": packed([]),
    "deeply nested": packed(DEEP),
    "a deep value": packed(b'{"a":' + DEEP + b"}"),
    "a huge number": packed(b'{"a":' + b"9" * 10_000 + b"}"),
    "no metadata": packed({"a": F32}, bytes(8)),
    "metadata of text": packed({"__metadata__": "x", "a": F32}, bytes(8)),
    "metadata that is no JSON": packed({"__metadata__": {"about": "{", "boxes": "{}"}}),
    "metadata that is deep": packed({"__metadata__": {"about": DEEP.decode(), "boxes": "{}"}}),
    "metadata that is no object": packed({"__metadata__": {"about": "[]", "boxes": "{}"}}),
    "a name twice": packed(b'{"__metadata__":{"about":"{}","boxes":"{}"},"a":1,"a":2}'),
    "a name twice in the boxes": packed(
        {"__metadata__": {"about": "{}", "boxes": '{"a":["a",[2],[0]],"a":["a",[2],[0]]}'}, "a": F32}, bytes(8)
    ),
    "overlapping": packed(header_of({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}), bytes(12)),
    "the same bytes twice": packed(header_of({"a": F32, "b": F32}), bytes(8)),
    "a gap": packed(header_of({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}), bytes(20)),
    "a gap at the start": packed(header_of({"a": F32 | {"data_offsets": [4, 12]}}), bytes(12)),
    "bytes at the end": packed(header_of({"a": F32}), bytes(9)),
    "bytes that are not there": packed(header_of({"a": F32}), bytes(7)),
    "no box": packed(header_of({"a": F32}, {}), bytes(8)),
    "a box outside of its tensor": packed(header_of({"a": F32}, {"a": ["a", [3], [2]]}), bytes(8)),
    "a box of other dimensions": packed(header_of({"a": F32}, {"a": ["a", [2, 1], [0, 0]]}), bytes(8)),
    "a box of a number": packed(header_of({"a": F32}, {"a": [7, [2], [0]]}), bytes(8)),
    "a box of text": packed(header_of({"a": F32}, {"a": "abc"}), bytes(8)),
    "boxes that are none": packed(header_of({"a": F32}, {"a": None}), bytes(8)),
    "no elements, of a shape that overflows": packed(
        header_of({"a": {"dtype": "F32", "shape": [0, 1 << 59, 1 << 59], "data_offsets": [0, 0]}})
    ),
    "a shape that overflows": packed(
        header_of({"a": {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}})
    ),
}
for wrong in (-1, 1 << 60, 1 << 100, 2.0, True, "2", None, [2], {}):
    MALICIOUS[f"{wrong!r} for an extent"] = packed(header_of({"a": F32 | {"shape": [wrong]}}), bytes(8))
    MALICIOUS[f"{wrong!r} for an end"] = packed(header_of({"a": F32 | {"data_offsets": [0, wrong]}}), bytes(8))
    MALICIOUS[f"{wrong!r} for a start"] = packed(header_of({"a": F32 | {"data_offsets": [wrong, 8]}}), bytes(8))
    MALICIOUS[f"{wrong!r} for a size"] = packed(header_of({"a": F32}, {"a": ["a", [wrong], [0]]}), bytes(8))
    MALICIOUS[f"{wrong!r} for an offset"] = packed(header_of({"a": F32}, {"a": ["a", [2], [wrong]]}), bytes(8))
    MALICIOUS[f"{wrong!r} for a type"] = packed(header_of({"a": F32 | {"dtype": wrong}}), bytes(8))
    MALICIOUS[f"{wrong!r} for offsets"] = packed(header_of({"a": F32 | {"data_offsets": wrong}}), bytes(8))
    if wrong not in ("2", {}, [2]):
        MALICIOUS[f"{wrong!r} for an entry"] = packed(header_of({}, {"a": ["a", [2], [0]]}) | {"a": wrong}, bytes(8))
for wrong in ("I32", "F16", "F8", "BF16", "U4", "", "f32"):
    if wrong != "I32":  # as wide as F32: nothing can tell but the checksum
        MALICIOUS[f"{wrong!r} for F32"] = packed(header_of({"a": F32 | {"dtype": wrong}}), bytes(8))


@pytest.mark.parametrize("data", MALICIOUS.values(), ids=MALICIOUS)
def test_a_malicious_file_is_refused_without_taking_memory(data):
    part = part_of(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="`a part`"):
            everything(part)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data) + 100_000
    finally:
        tracemalloc.stop()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["F32", "a", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "shape", "dtype"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = ["about", "boxes", "dtype", "shape", "data_offsets", "box", "entry", "metadata"]


@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=3), st.integers(0, 20))
@example({}, 8)
def test_any_header_is_read_or_refused(replaced, length):
    entry = F32 | {key: value for key, value in replaced.items() if key in F32}
    boxes = replaced.get("boxes", {"a": replaced.get("box", ["a", [2], [0]])})
    metadata = {"about": json.dumps(replaced.get("about", {})), "boxes": json.dumps(boxes)}
    header = {"__metadata__": replaced.get("metadata", metadata), "a": replaced.get("entry", entry)}
    try:
        everything(part_of(packed(header, bytes(length))))
    except CheckpointError as error:
        assert "`a part`" in str(error)


GOOD = written([leaf("a", torch.arange(6).view(2, 3)), leaf("b", torch.ones(3), of=[7], offset=[2])]).numpy().tobytes()


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(GOOD)))
def test_any_bytes_are_read_or_refused(changes, length):
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    try:
        everything(part_of(data[: len(GOOD) - length]))
    except CheckpointError as error:
        assert "`a part`" in str(error)
