"""What samples draw at random follows from the seed and their place, whatever loads them."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from shoestring.data.loader import Loader, sweep


class Noisy(Dataset):
    """Samples of random numbers of torch, NumPy and Python."""

    def __init__(self, samples=48):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), np.random.rand(), random.random(), torch.initial_seed() % 2**20]
        return {"x": torch.tensor(drawn, dtype=torch.float64), "targets": torch.tensor(index)}


class InBatches(Noisy):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


DATASETS = [Noisy, InBatches, lambda: Subset(Noisy(64), range(48))]


def drawn(make=Noisy, *, workers=0, rank=0, size=1, seed=0, first=0, steps=12, accumulate=1):
    """The numbers of each sample, (samples, 4), from the step `first` on; the generators before it do not matter."""
    torch.manual_seed(rank + first), np.random.seed(rank + first), random.seed(rank + first)
    loader = Loader(make(), batch=8, rank=rank, size=size, seed=seed, workers=workers, accumulate=accumulate)
    loader.consumed = 8 * first
    batches = iter(loader)
    found = torch.cat([micro["x"] for _ in range(steps - first) for micro in next(batches)])
    loader.close()
    return found


def share(ones, others):
    """The share of draws that are equal, of each generator."""
    return (ones == others).double().mean(0).tolist()


@pytest.mark.parametrize("make", DATASETS)
@pytest.mark.parametrize("workers", [0, 2])
def test_draws_are_those_of_one_process_after_a_resume_too(make, workers):
    whole = drawn(make)
    assert torch.equal(drawn(make, workers=workers), whole)
    assert torch.equal(drawn(make, workers=workers, first=5), whole[40:])


@pytest.mark.parametrize("make", DATASETS)
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_seeds_epochs_and_samples_draw_different_numbers(make, workers):
    first = drawn(make, workers=workers, size=2)
    assert share(first, drawn(make, workers=workers, size=2, rank=1)) == [0, 0, 0, 0]
    assert share(first, drawn(make, workers=workers, size=2, seed=1)) == [0, 0, 0, 0]
    whole = drawn(make, workers=workers)  # two epochs
    assert [len(whole[:, column].unique()) for column in range(3)] == [96, 96, 96]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_samples_draw_the_same_on_any_number_of_ranks(accumulate):
    whole = drawn(accumulate=accumulate).view(12, accumulate, 8 // accumulate, 4)
    parts = [drawn(size=2, rank=rank, accumulate=accumulate).view(12, accumulate, -1, 4) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 2), whole)


@pytest.mark.parametrize("make", DATASETS)
def test_the_generators_of_training_stay_as_they_were_and_evaluations_are_alike(make):
    states = []
    for work in (lambda: None, lambda: next(iter(Loader(make(), batch=8))), lambda: list(sweep(make(), batch=5))):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        work()
        states.append((torch.rand(()).item(), np.random.rand(), random.random(), torch.initial_seed()))
    assert len(set(states)) == 1
    first, again = ([batch["x"] for batch in sweep(make(), batch=5)] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert len(torch.cat(first)[:48, 0].unique()) == 48
