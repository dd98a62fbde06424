"""The order, the split over ranks, and the position of the loader, against a plain enumeration."""

import re
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import Repeated
from shoestring.data.loader import Loader, sweep
from shoestring.data.order import permutation


class Numbers(Dataset):
    """Sample i is {"x": [i, i²]}; it has no `__getitems__`."""

    def __init__(self, samples, fingerprint="numbers"):
        self.samples, self.fingerprint = samples, fingerprint

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"x": torch.tensor([index, index * index])}


class Pairs(Numbers):
    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(-index)


def steps(loader, count):
    """The ids of the next `count` steps, each a list of micro-batches."""
    return [[micro["ids"].tolist() for micro in step] for step in islice(iter(loader), count)]


def union(parts):
    """The global batches, from what each rank got: micro-batch by micro-batch, rank by rank."""
    return [
        [number for micro in zip(*ranks, strict=True) for part in micro for number in part]
        for ranks in zip(*parts, strict=True)
    ]


shapes = st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(-5, 2**70))


@pytest.mark.slow
@settings(max_examples=60)
@given(shapes)
def test_every_epoch_holds_every_sample_once_for_any_shape(shape):
    samples, size, accumulate, part, seed = shape
    batch = size * accumulate * part
    count = -(-3 * samples // batch)
    loaders = [
        Loader(Numbers(samples), batch=batch, rank=rank, size=size, accumulate=accumulate, seed=seed)
        for rank in range(size)
    ]
    flat = list(chain.from_iterable(union([steps(loader, count) for loader in loaders])))
    for epoch in range(3):
        ids = flat[epoch * samples : (epoch + 1) * samples]
        assert sorted(ids) == list(range(samples))
        assert ids == permutation(seed, epoch, samples).tolist()


@pytest.mark.slow
@settings(max_examples=60)
@given(shapes, st.integers(0, 6), st.integers(0, 6))
def test_a_run_moved_from_two_ranks_to_one_and_back_sees_the_remaining_samples(shape, first, second):
    samples, _, accumulate, part, seed = shape
    batch = 2 * accumulate * part

    def ranks(size, state=None):
        made = [
            Loader(Numbers(samples), batch=batch, rank=r, size=size, accumulate=accumulate, seed=seed)
            for r in range(size)
        ]
        for loader in made:
            if state:
                loader.load_state_dict(state)
        return made

    expected = union([steps(ranks(1)[0], first + second + 4)])
    seen, state = [], None
    for size, count in ((2, first), (1, second), (2, 4)):
        loaders = ranks(size, state)
        seen += union([steps(loader, count) for loader in loaders])
        assert len({str(loader.state_dict()) for loader in loaders}) == 1
        state = loaders[0].state_dict()
    assert seen == expected
    assert state["consumed"] == batch * (first + second + 4)


def test_the_order_is_fixed_for_all_time():
    assert permutation(0, 0, 10).tolist() == [1, 3, 5, 7, 4, 9, 0, 6, 8, 2]
    assert permutation(1, 0, 10).tolist() != permutation(0, 0, 10).tolist()
    assert permutation(0, 1, 10).tolist() != permutation(0, 0, 10).tolist()


def test_the_order_is_the_scalar_splitmix64_sort():
    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, epoch in ((0, 0), (-1, 3), (2**63 + 5, 1)):
        stream = seed % 2**64
        for word in (epoch, golden):
            stream = (mix(stream ^ word) + golden) % 2**64
        keys = [mix((stream + (i + 1) * golden) % 2**64) for i in range(500)]
        assert permutation(seed, epoch, 500).tolist() == sorted(range(500), key=keys.__getitem__)


def test_neighbours_do_not_stay_neighbours():
    order = permutation(7, 0, 10_000)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.03
    assert (np.abs(np.diff(order)) == 1).mean() < 0.001


def test_samples_come_with_their_tensors():
    (micro,) = next(iter(Loader(Numbers(7), batch=3)))
    assert micro["ids"].dtype == torch.int64
    assert torch.equal(micro["x"], torch.stack([micro["ids"], micro["ids"] ** 2], 1))


def test_samples_that_are_no_dicts_are_stacked_as_they_are():
    ((one, other),) = next(iter(Loader(Pairs(7), batch=3)))
    assert torch.equal(one, -other)


def test_loading_a_state_moves_an_iteration_under_way():
    loader = Loader(Numbers(20), batch=2)
    batches = iter(loader)
    first = [next(batches)[0]["ids"].tolist() for _ in range(3)]
    state = loader.state_dict()
    after = [next(batches)[0]["ids"].tolist() for _ in range(3)]
    loader.load_state_dict(state)
    assert [next(batches)[0]["ids"].tolist() for _ in range(3)] == after
    assert [[ids] for ids in first + after] == steps(Loader(Numbers(20), batch=2), 6)


def test_a_state_brings_its_seed():
    source = Loader(Numbers(20), batch=2, seed=5)
    steps(source, 2)
    other = Loader(Numbers(20), batch=2, seed=6)
    other.load_state_dict(source.state_dict())
    assert steps(other, 3) == steps(source, 3)


@pytest.mark.parametrize("other", [Numbers(21), Numbers(20, "others")])
def test_a_position_in_another_data_set_is_refused(other):
    with pytest.raises(DataError, match="another data set"):
        Loader(other, batch=2).load_state_dict(Loader(Numbers(20), batch=2).state_dict())


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_give_the_same_batches_and_do_not_move_the_position(context):
    plain = Loader(Numbers(30), batch=4, accumulate=2)
    expected = steps(plain, 12)
    loader = Loader(Numbers(30), batch=4, accumulate=2, workers=2, context=context)
    batches = iter(loader)
    seen = [[micro["ids"].tolist() for micro in next(batches)] for _ in range(5)]
    state = loader.state_dict()
    assert state["consumed"] == loader.consumed == 20
    del batches
    loader.load_state_dict(state)
    seen += steps(loader, 7)
    assert seen == expected
    assert loader.epoch == 48 // 30
    loader.close()


@pytest.mark.parametrize(("batch", "nearest"), [(7, 6), (1, 6), (10, 12), (17, 18)])
def test_a_batch_that_does_not_divide_names_the_nearest_that_does(batch, nearest):
    with pytest.raises(
        ConfigError, match=f"2 ranks × 3 micro-batches .*nearest batch size that is divisible is {nearest}"
    ):
        Loader(Numbers(20), batch=batch, size=2, accumulate=3)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"batch": 2, "rank": 2, "size": 2}, {"batch": 2, "accumulate": 0}])
def test_counts_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        Loader(Numbers(20), **wrong)


def test_an_empty_data_set_is_refused():
    with pytest.raises(DataError, match="no samples"):
        Loader(Numbers(0), batch=1)


def test_a_batch_of_more_than_the_data_set_has_is_said(caplog):
    loader = Loader(Numbers(3), batch=8)
    assert "a batch of 8 takes samples more than once: the data set has 3" in caplog.text
    assert len(next(iter(loader))[0]["ids"]) == 8
    caplog.clear()
    Loader(Numbers(8), batch=8)
    assert not caplog.text


def test_a_batch_far_beyond_the_data_set_is_refused():
    Loader(Numbers(3), batch=3072)
    with pytest.raises(ConfigError, match=r"a batch of 3,073 for a data set of 3 samples"):
        Loader(Numbers(3), batch=3073)


class Targeted(Numbers):
    def __getitem__(self, index):
        return {"targets": torch.tensor([index, index])}


FORMS = {
    "whole-number targets": Targeted,
    "real targets": lambda samples: TensorDataset(torch.arange(samples), torch.arange(samples) / 2),
    "no targets": Numbers,
    "texts": lambda samples: [str(index) for index in range(samples)],
}


@pytest.mark.parametrize("form", FORMS)
@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 5), st.integers(0, 31))
def test_a_sweep_has_every_sample_once_in_equally_many_batches_on_every_rank(form, samples, batch, size, limit):
    data, seen = FORMS[form](samples), []
    total = min(limit, samples) if limit else samples
    for rank in range(size):
        parts = list(sweep(data, batch=batch, rank=rank, size=size, limit=limit, collate=collated))
        assert len(parts) == -(-total // (batch * size))
        for part in parts:
            repeated, part = isinstance(part, Repeated), getattr(part, "batch", part)
            assert part["valid"].tolist() == [not repeated] * len(part["ids"]) and 1 <= len(part["ids"]) <= batch
            seen += [] if repeated else part["ids"].tolist()
    assert sorted(seen) == list(range(total))


def collated(samples):
    return {"samples": samples}


def test_samples_that_cannot_be_stacked_are_named_by_their_forms():
    different = [{"inputs": torch.zeros(3, 16, 16)}, {"inputs": torch.zeros(3, 17, 16)}]
    lacking = [{"inputs": torch.zeros(2)}, {"input": torch.zeros(2)}]
    for samples, said in (
        (different, "{inputs: (3, 16, 16)}, another {inputs: (3, 17, 16)}"),
        (lacking, "{input: (2,)}, another {inputs: (2,)}"),
    ):
        for workers in (0, 1):
            with pytest.raises(DataError, match=re.escape(said)) as caught:
                next(iter(Loader(samples, batch=2, workers=workers)))
            assert "run.collate" in caught.value.hint and "Traceback" not in str(caught.value)
        with pytest.raises(DataError, match=re.escape(said)):
            list(sweep(samples, batch=2))
    with pytest.raises(DataError, match="NoneType"):
        next(iter(Loader([None, None], batch=2)))


class Broken(Numbers):
    def __getitem__(self, index):
        raise DataError(f"`{index}.png` is no picture")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_data_set_stays_one_line(workers):
    with pytest.raises(DataError, match=r"^`\d.png` is no picture$"):
        next(iter(Loader(Broken(4), batch=2, workers=workers)))


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_what_the_users_own_function_makes_of_samples(workers):
    loader = Loader(Numbers(6), batch=4, accumulate=2, workers=workers, collate=collated)
    first = next(iter(loader))
    assert [len(part["samples"]) for part in first] == [2, 2]
    assert [[int(sample["x"][0]) for sample in part["samples"]] for part in first] == [
        part["ids"].tolist() for part in first
    ]
    loader.close()
