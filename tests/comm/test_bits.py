"""What is packed comes back, in no more bytes than an independent formula says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.comm.codecs.bits import decode_indices, encode_indices, index_bytes, pack, packed_bytes, unpack


@pytest.mark.slow
@given(bits=st.integers(1, 32), rows=st.integers(1, 3), count=st.integers(0, 70), seed=st.integers(0, 99))
@settings(max_examples=150)
def test_codes_come_back(bits, rows, count, seed):
    codes = torch.randint(2**bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    codes[:, -1:] = 2**bits - 1
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_bytes(count, bits))
    assert torch.equal(unpack(packed, bits, count).long(), codes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_codes_may_have_any_integer_dtype(dtype):
    codes = torch.arange(77, dtype=dtype)[None]
    assert torch.equal(unpack(pack(codes, 7), 7, 77), codes.to(torch.uint8))


@given(bits=st.integers(1, 32), count=st.integers(0, 10_000))
def test_packing_is_dense(bits, count):
    assert count * bits / 8 <= packed_bytes(count, bits) < count * bits / 8 + bits


@given(data=st.data(), n=st.integers(1, 5000), rows=st.integers(1, 3))
@settings(max_examples=150)
def test_indices_come_back(data, n, rows):
    """Ascending, equal ones among them, the least and the largest possible too."""
    count = data.draw(st.integers(1, n))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    indices = torch.randint(n, (rows, count), generator=generator).sort(dim=1).values
    indices[0, 0], indices[-1, -1] = 0, n - 1
    packed = encode_indices(indices, n)
    assert packed.shape == (rows, index_bytes(count, n))
    assert torch.equal(decode_indices(packed, count, n), indices)


def test_indices_of_large_ranges_come_back():
    n = 2**33
    indices = torch.randint(n, (2, 1000), generator=torch.Generator().manual_seed(0)).sort(dim=1).values
    assert torch.equal(decode_indices(encode_indices(indices, n), 1000, n), indices)


@pytest.mark.parametrize("density", [0.5, 0.25, 0.1, 0.01, 0.001])
def test_indices_take_little_more_than_their_entropy(density):
    n = 1_000_000
    k = int(density * n)
    entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert entropy <= 8 * index_bytes(k, n) < entropy + 0.6 * k + (0.5 * k if density > 0.2 else 0)
