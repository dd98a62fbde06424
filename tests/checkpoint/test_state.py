"""State as bytes and back, and every damage to the bytes refused."""

import math
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.checkpoint.format.state import pack, unpack
from shoestring.core.errors import CheckpointError

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def same(one, other):
    """Equal in type and value, bit for bit."""
    if isinstance(one, torch.Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        keys = [(type(key), key) for key in one] == [(type(key), key) for key in other]
        return keys and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    data = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype).reshape(shape)


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = np.dtype(draw(st.sampled_from(["f4", "f8", "i4", "i8", "u1", "u4", "?"])))
    numbers = np.arange(math.prod(shape), dtype=np.float64).reshape(shape).astype(dtype)
    return numbers.T if draw(st.booleans()) else numbers


keys = st.one_of(st.text(max_size=3), st.integers(-5, 5), st.sampled_from(["a", "a/b", "1", "tensor", "map", "", "/"]))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), tensors(), arrays()
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=80)
@given(st.dictionaries(keys, values, max_size=4))
def test_round_trip(state):
    assert same(unpack(pack(state)), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype):
    state = {"x": torch.tensor([0, 1, 0, 1]).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    assert same(unpack(pack(state)), state)


def test_paths_that_read_alike_do_not_collide():
    one, two, three = (torch.full((2,), float(number)) for number in range(3))
    state = {"a/b": one, "a": {"b": two}, 1: one, "1": three}
    assert same(unpack(pack(state)), state)


def test_tied_and_strided_tensors_come_back_by_value():
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"embed": weight, "head": weight, "transposed": weight.T, "row": weight[1], "every": weight[:, ::2]}
    assert same(unpack(pack(state)), {name: tensor.clone().contiguous() for name, tensor in state.items()})


def test_parameters_and_numpy_scalars_become_plain():
    state = {"p": torch.nn.Parameter(torch.ones(2)), "f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True)}
    again = unpack(pack(state))
    assert type(again["p"]) is torch.Tensor and not again["p"].requires_grad
    assert (again["f"], again["i"], again["b"]) == (0.5, 3, True) and type(again["b"]) is bool


def test_not_a_number_and_infinities_come_back():
    numbers = [math.nan, math.inf, -math.inf, -0.0, 5e-324]
    again = unpack(pack({"list": numbers, "tensor": torch.tensor(numbers, dtype=torch.float64)}))
    assert same(again["list"], numbers) and math.copysign(1, again["list"][3]) == -1
    assert same(again["tensor"], torch.tensor(numbers, dtype=torch.float64))


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", object(), 1j, np.array(["text"]), np.array([object()]), torch.float32, np.complex64(1)],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_by_their_path(value):
    with pytest.raises(CheckpointError, match="cannot save `outer/inner/0`"):
        pack({"outer": {"inner": [value]}})


def test_odd_keys_and_dtypes_are_refused():
    with pytest.raises(CheckpointError, match=r"cannot save `outer`: its key \(1, 2\)"):
        pack({"outer": {(1, 2): 3}})
    with pytest.raises(CheckpointError, match="complex128"):
        pack({"x": torch.zeros(1, dtype=torch.complex128)})


STATE = {"weights": torch.arange(24.0).reshape(4, 6), "step": 17, "random": (3, [1, 2, None]), "name": "run"}


def test_every_cut_is_refused():
    data = pack(STATE)
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            unpack(data[:length])
    with pytest.raises(CheckpointError):
        unpack(data + b"\0")


def test_every_flipped_bit_is_refused_or_means_the_same():
    data = bytearray(pack(STATE))
    for position in range(len(data)):
        data[position] ^= 1 << (position % 8)
        with suppress(CheckpointError):
            assert same(unpack(bytes(data)), STATE)  # a flip in the padding, or in white space
        data[position] ^= 1 << (position % 8)
    assert same(unpack(bytes(data)), STATE)


def test_another_safetensors_file_is_refused():
    from safetensors.torch import save

    with pytest.raises(CheckpointError, match="not a saved state"):
        unpack(save({"weight": torch.ones(2)}))
