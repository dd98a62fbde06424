"""Copies from a GPU in one call: what the driver is told, and what it is not told."""

import ctypes

import pytest
import torch

from shoestring.checkpoint.tiers import gpu_copies
from shoestring.checkpoint.tiers.gpu_copies import CopyAttributes, copy_from_gpu


class Driver:
    """Does what CUDA's driver does with the arguments of its call, in this host's memory."""

    def __init__(self, status=0):
        self.status, self.copied = status, 0

    def __call__(self, targets, sources, sizes, count, attributes, first, attribute_count, stream):
        told = ctypes.cast(attributes, ctypes.POINTER(CopyAttributes)).contents
        assert (told.order, told.flags, attribute_count.value) == (1, 1, 1)
        assert ctypes.cast(first, ctypes.POINTER(ctypes.c_size_t)).contents.value == 0
        assert len(targets) == len(sources) == len(sizes) == count.value
        if not self.status:
            for target, source, size in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(target, source, size)
                self.copied += size
        return self.status


class Stream:
    cuda_stream = 7


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(1)
    even = torch.randn(5, 3, generator=generator), torch.randn((), generator=generator).bfloat16()
    uneven = torch.randn(4, 6, generator=generator).t(), torch.empty(0), torch.randn(3, generator=generator).double()
    sources = [even[0], uneven[0], uneven[1], even[1], uneven[2]]
    targets = [torch.full(each.shape, torch.nan, dtype=each.dtype) for each in sources[:4]]
    return [*targets, torch.full((3,), torch.nan)], sources


@pytest.mark.parametrize(
    ("driver", "copied"),
    [(Driver(), 5 * 3 * 4 + 2), (Driver(status=1), 0), (None, 0)],
    ids=["batch", "refused", "none"],
)
def test_all_is_copied_with_and_without_the_drivers_call(driver, copied, pairs, monkeypatch):
    monkeypatch.setattr(gpu_copies, "batched_copy", lambda: driver)
    monkeypatch.setattr(gpu_copies, "is_on_gpu", lambda _: True)
    targets, sources = pairs
    copy_from_gpu(targets, sources, Stream())
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))
    assert driver is None or driver.copied == copied


def test_the_driver_is_told_of_nothing_that_lies_in_this_hosts_memory(pairs, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(gpu_copies, "batched_copy", lambda: driver)
    targets, sources = pairs
    copy_from_gpu(targets, sources, Stream())
    assert driver.copied == 0
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources, strict=True))


def test_what_is_conjugated_lazily_is_copied_by_torch(monkeypatch):
    monkeypatch.setattr(gpu_copies, "is_on_gpu", lambda _: True)
    driver, source = Driver(), torch.tensor([1 + 2j, 3 - 1j]).conj()
    monkeypatch.setattr(gpu_copies, "batched_copy", lambda: driver)
    target = torch.zeros(2, dtype=source.dtype)
    copy_from_gpu([target], [source], Stream())
    assert driver.copied == 0 and torch.equal(target, source)


def test_attributes_lie_in_memory_as_the_driver_reads_them():
    assert ctypes.sizeof(CopyAttributes) == 24
    assert [getattr(CopyAttributes, name).offset for name, *_ in CopyAttributes._fields_] == [0, 4, 12, 20]
