"""Checksums of chunks: the same whoever computes them, on as many threads as there are."""

import sys
import zlib
from importlib import reload

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shoestring.checkpoint.format import checksum
from shoestring.checkpoint.format.checksum import CHUNK, sums, threads_beside


@pytest.fixture(params=["isal", "zlib"])
def computing(request, monkeypatch):
    """The module, with and without the extra."""
    if request.param == "isal":
        pytest.importorskip("isal")
        yield checksum
        return
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal.isal_zlib", None)  # an import of it fails
        yield reload(checksum)
    reload(checksum)


@given(data=st.binary(max_size=300), threads=st.integers(1, 3))
@example(data=b"", threads=2)
def test_a_checksum_is_crc_32(data, threads):
    assert sums(
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8), threads
    ) == ([zlib.crc32(data)] if data else [])


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 9])
def test_each_chunk_has_its_own_in_order_however_many_compute_them(computing, threads):
    data = torch.randint(0, 256, (3 * CHUNK + 5,), dtype=torch.uint8, generator=torch.Generator().manual_seed(threads))
    chunks = data.split(CHUNK)
    assert computing.sums(data, threads) == [zlib.crc32(chunk.numpy().data) for chunk in chunks]


def test_threads_beside_training_are_a_quarter_of_a_ranks_share(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
    assert [threads_beside(ranks) for ranks in (1, 2, 8, 16)] == [4, 2, 1, 1]
