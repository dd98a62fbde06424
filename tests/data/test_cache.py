"""The cache of samples: what comes out is what went in, whatever happens on the way, and nothing is read twice."""

import os
import threading
import tomllib
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.world import World
from shoestring.data import Data
from shoestring.data.cache import Cached, OnDisk, Shared, folded_crc32
from shoestring.data.flattening import from_bytes, to_bytes
from shoestring.data.images import Images
from shoestring.data.loader import Loader
from shoestring.run import parse
from shoestring.training.loop import train
from tests.waiting import until

LIMIT = 60  # seconds for what takes a hundredth of one


class Store:
    """A data set that counts who asks it."""

    def __init__(self, samples=40, size=100):
        self.samples, self.size, self.asked = samples, size, []

    fingerprint = "a store"

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.asked.append(index)
        return {"inputs": torch.full((self.size,), index), "targets": index}


class Remote(Store):
    """The same, of which bytes are fetched and decoded."""

    def fetch(self, index):
        self.asked.append(index)
        return index.to_bytes(4, "little") * self.size

    def decode(self, raw):
        return {"inputs": torch.tensor(list(raw[:4])), "length": len(raw)}

    __getitem__ = None


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and one == other


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.integers(0, 255), max_size=6).map(lambda values: torch.tensor(values, dtype=torch.uint8)),
    st.lists(st.floats(-1, 1), min_size=1, max_size=4).map(lambda values: np.array(values, dtype=np.float32)),
)
samples = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(samples)
@settings(max_examples=60)
def test_samples_come_back_as_they_were(sample):
    assert equal(from_bytes(bytearray(to_bytes(sample))), sample)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5, 3)])
def test_tensors_of_any_type_and_shape_come_back_writable_and_apart(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    turned = tensor.mT if tensor.ndim == 2 else tensor
    raw = to_bytes([tensor, turned])
    one, other = from_bytes(bytearray(raw))
    assert one.dtype == dtype and one.shape == tensor.shape and other.shape == turned.shape
    assert torch.equal(one, tensor)
    one.zero_()
    assert torch.equal(other, turned)


@given(size=st.integers(1, 3 * 8192), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_the_checksum_sees_any_bit(size, at, bit):
    raw = np.random.default_rng(size).integers(256, size=size, dtype=np.uint8)
    before = folded_crc32(raw)
    raw[int(at * size)] ^= 1 << bit
    assert folded_crc32(raw) != before
    assert folded_crc32(raw[:-1]) != before


def test_a_sample_that_is_changed_in_place_stays_as_it_was_in_the_cache(root):
    cached = Cached(Store(), memory=1 << 20)
    wanted = cached[3]["inputs"].clone()
    for _ in range(3):
        found = cached[3]["inputs"]
        assert torch.equal(found, wanted)
        found.zero_()
    assert cached.counts.memory == 3
    cached.close()


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(DataError, match="holds a set"):
        to_bytes({"a": {1, 2}})


@pytest.mark.parametrize("where", ["memory", "disk", "both"])
@pytest.mark.parametrize("kind", [Store, Remote])
def test_each_sample_is_fetched_once(root, where, kind):
    store = kind()
    sizes = {"memory": {"memory": 1 << 20}, "disk": {"disk": 1 << 20, "folder": root / "disk"}}
    how = sizes["memory"] | sizes["disk"] if where == "both" else sizes[where]
    cached = Cached(store, **how)
    first = [cached[index] for index in range(40)]
    again = [cached[index] for index in range(40)]
    assert sorted(store.asked) == list(range(40))
    assert equal(first, again)
    cached.close()
    if where != "memory":  # what is on disk stays
        other = Cached(kind(), **how)
        assert equal(other[7], first[7])
        assert other.dataset.asked == []
        other.close()
    assert not list(root.glob("shoestring-data-*/*"))


def test_what_does_not_fit_is_fetched_each_time_and_what_fits_is_kept(root):
    one = len(to_bytes(Store()[0]))
    cached = Cached(Store(), memory=10 * one + 5, disk=15 * (one + 8), folder=root / "disk")
    for _ in range(3):
        for index in range(40):
            assert cached[index]["targets"] == index
    counts = cached.counts
    assert counts.memory == 20  # ten samples, in two epochs
    assert counts.disk == 10  # five more
    assert counts.fetched == 40 + 2 * 25
    assert sum(path.stat().st_size for path in (root / "disk").glob("*/*/*")) <= 15 * (one + 8)
    cached.close()


def test_damaged_bytes_never_come_out(root):
    store = Store()
    cached = Cached(store, memory=1 << 20, disk=1 << 20, folder=root / "disk")
    for index in range(40):
        cached[index]
    chance = np.random.default_rng(0)
    for number in range(100):
        index = number % 40
        begin, length = int(cached.shared.entries["offset"][index]), int(cached.shared.entries["length"][index])
        at = cached.shared.table + begin + int(chance.integers(length))
        cached.shared.memory[at] ^= 1 << int(chance.integers(8))
        path = cached.shelf.path(index)
        raw = bytearray(path.read_bytes())
        match number % 4:
            case 0:
                raw[int(chance.integers(len(raw)))] ^= 1 << int(chance.integers(8))
            case 1:
                raw = raw[: int(chance.integers(len(raw)))]
            case 2:
                raw += b"x"
            case 3:
                raw = bytearray()
        path.write_bytes(raw)
        assert equal(cached[index], Store()[index])
        assert equal(cached[index], Store()[index])
    assert len(store.asked) == 40 + 100
    cached.close()


def test_ranks_share_memory_and_the_last_one_removes_it(root):
    store = Store()
    one, other = Cached(store, memory=1 << 20), Cached(Store(), memory=1 << 20)
    for index in range(40):
        one[index]
    assert [other[index]["targets"] for index in range(40)] == list(range(40))
    assert other.dataset.asked == []
    one.close()
    assert equal(other[3], Store()[3])
    assert list(root.glob("shoestring-data-*/*"))
    other.close()
    assert not list(root.glob("shoestring-data-*/*"))


def hold(root, ready):
    Shared.__init__.__defaults__ = (root,)
    cached = Cached(Store(), memory=1 << 20)
    cached[5]
    ready.set()
    threading.Event().wait(60)


@pytest.mark.slow
def test_what_a_killed_process_left_is_used_by_the_next_and_removed_by_one_of_another_data_set(root):
    context = get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(root, ready))
    process.start()
    assert ready.wait(60)
    process.kill()
    process.join()
    assert list(root.glob("shoestring-data-*/*"))
    cached = Cached(Store(), memory=1 << 20)
    assert equal(cached[5], Store()[5])
    assert cached.dataset.asked == []
    del cached.shared.entries, cached.shared.bytes  # as if it were killed, too
    cached.shared.memory.close()
    os.close(cached.shared.file)
    other = Store()
    other.fingerprint = "another"
    another = Cached(other, memory=1 << 20)
    assert len(list(root.glob("shoestring-data-*/*"))) == 1
    another.close()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_loaders_workers_find_what_was_fetched_ahead(root, context):
    cached = Cached(Store(), memory=1 << 20)
    loader = Loader(cached, batch=8, workers=1, context=context, seed=3)
    batches = iter(loader)
    seen = [int(each) for each in next(batches)[0]["targets"]]
    until(lambda: cached.counts.ahead > 0)  # before the worker, which is at most two batches ahead, asks for the last
    seen += [int(each) for _ in range(4) for each in next(batches)[0]["targets"]]
    assert sorted(seen) == list(range(40))
    del batches
    loader.close()
    assert cached.counts.ahead > 0
    cached.close()


def test_the_order_is_heard_before_it_is_asked_for(root):
    heard = []

    class Hears(Store):
        def ahead(self, indices):
            heard.append(list(indices))

    plain, loader = Loader(Store(), batch=8, size=2, rank=1, accumulate=2, seed=1), None
    loader = Loader(Hears(), batch=8, size=2, rank=1, accumulate=2, seed=1)
    wanted = [[int(i) for part in step for i in part["ids"]] for step, _ in zip(plain, range(6), strict=False)]
    next(iter(loader))
    assert heard[0] == [i for step in wanted[:5] for i in step]


def test_threads_fetch_a_sample_once(root):
    came, others, goes_on = threading.Event(), threading.Barrier(8), threading.Event()

    class Slow(Store):
        def __getitem__(self, index):
            came.set()
            assert goes_on.wait(LIMIT)
            return super().__getitem__(index)

    def asks():
        others.wait(LIMIT)
        assert int(cached[7]["targets"]) == 7

    store = Slow()
    cached = Cached(store, memory=1 << 20)
    threads = [threading.Thread(target=cached.__getitem__, args=(7,))]
    threads[0].start()
    assert came.wait(LIMIT)
    threads += [threading.Thread(target=asks) for _ in range(7)]
    for thread in threads[1:]:
        thread.start()
    others.wait(LIMIT)
    goes_on.set()
    for thread in threads:
        thread.join()
    assert store.asked == [7]
    cached.close()


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cache_memory"):
        Data(cache_memory=-1.0)
    with pytest.raises(DataError, match="needs a folder"):
        Cached(Store(), disk=100)


def test_a_full_disk_ends_the_growth_and_nothing_else(tmp_path, monkeypatch):
    shelf = OnDisk(tmp_path / "shelf", 1 << 20)
    assert shelf.put(1, b"abc")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    assert not shelf.put(2, b"abc")
    assert shelf.get(1) == b"abc"
    assert shelf.get(2) is None
    shelf.close()


RUN = """
[run]
model = "shoestring.models.images:small"
data = "tests.data.test_cache:slow_images"
steps = 6
batch = 16
folder = "{root}/run"
[model]
widths = [2, 4]
[data]
cache_memory = 0.001
cache_disk = 0.001
cache_folder = "{root}/disk"
"""


def slow_images():
    """For a run file."""
    return Images(torch.arange(64, dtype=torch.uint8).view(64, 1, 1, 1).expand(64, 1, 28, 28), torch.arange(64) % 10)


def test_a_run_takes_its_samples_through_the_cache_and_gives_its_memory_back(root):
    train(parse(tomllib.loads(RUN.format(root=root))), World())
    assert len(list((root / "disk").glob("*/*/*"))) == 64
    assert not list(root.glob("shoestring-data-*/*"))
