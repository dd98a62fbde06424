"""Uncompressed gradients are averaged where they lie, in as few passes over memory as there can be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import counting

from shoestring.comm.codecs.dense import join


@pytest.mark.parametrize(("order", "dtype", "passes"), [
    ([0, 1, 2], "fp32", 2.0),  # the sum is read, and the mean written; whether it is finite is seen on the way
    ([2, 1, 0], "fp32", 6.0),  # and copied there and back
    ([0, 1, 2], "bf16", 4.0),  # 4 + 2 bytes to round, 2 + 2 to divide, 2 + 4 to deliver
])  # fmt: skip
def test_bytes_moved_in_sizes_of_the_gradients(pool, order, dtype, passes):
    for result in pool.call(counting.count_dense, order=order, dtype=dtype, infinite=False):
        assert result["moved"] == pytest.approx(passes, rel=1e-3)
        assert result["averages"] == [1.5, 1.5]  # what was kept stays when gradients are zeroed


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_an_infinite_gradient_is_nan_everywhere(pool, order):
    for result in pool.call(counting.count_dense, order=order, dtype="fp32", infinite=True):
        assert result["nan"] and not result["fine"]


def test_ddps_only_bucket_is_averaged_where_it_lies(pool):
    """From the second step on: DDP's first bucket has the order of a forward pass."""
    for found in pool.call(counting.joined_under_ddp, parts=1):
        assert found == [[False], [True], [True]]


def test_only_what_follows_in_memory_is_joined():
    memory = torch.arange(12.0)
    one, two, three = memory[:4].view(2, 2), memory[4:6], memory[6:]
    assert join([one, two, three], torch.float32).data_ptr() == memory.data_ptr()
    assert join([two, three], torch.float32).data_ptr() == two.data_ptr()
    for tensors in ([one, three], [two, one], [one.t(), two], [one, two.clone()], [two, memory.new_empty(0), three]):
        joined = join(tensors, torch.float32)
        assert joined.tolist() == torch.cat([each.flatten() for each in tensors]).tolist()
    assert join([one, two], torch.bfloat16).dtype == torch.bfloat16
