"""The data loader: the order of samples depends only on the seed, and the loader's position is one integer.

Positions count samples over all ranks and epochs, so a batch may reach into the next epoch. `order.py` maps a position
to a sample. The random draws of the data set for a sample depend only on the seed and the position (`draws.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring.core.task import Batch, Collate, Repeated
from shoestring.data.draws import Draws, seed_of
from shoestring.data.order import Order, Shuffled

log = logging.getLogger("shoestring.data")
AHEAD = 4
"""Number of optimizer steps whose samples a data set may fetch ahead."""


class _Places(NamedTuple):
    """The samples of a micro-batch and their positions."""

    ids: list[int]
    positions: list[int]
    stream: tuple[int | str, ...]
    """Name of the sequence of samples that the positions refer to; see `Draws`."""


class _Identified(Dataset[Any]):
    """A data set that returns batches together with the ids of their samples, and seeds the random draws of each
    sample."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        source: Any = dataset
        # A subset or a cache uses random numbers if the data set that it wraps does.
        while not hasattr(source, "draws") and hasattr(source, "dataset"):
            source = source.dataset
        self.draws = getattr(source, "draws", True)

    def __getitems__(self, places: _Places) -> tuple[Sequence[int], list[Any]]:
        fetch: Callable[[Sequence[int]], list[Any]] | None
        fetch = getattr(self.dataset, "__getitems__", None)  # torch's optional method for fetching a batch
        if not self.draws:
            return places.ids, fetch(places.ids) if fetch else [self.dataset[index] for index in places.ids]
        with Draws(*places.stream) as draws:
            if fetch is not None:
                draws.begin(places.positions[0] if places.positions else 0)
                return places.ids, fetch(places.ids)
            samples = []
            for index, position in zip(places.ids, places.positions, strict=True):
                draws.begin(position)
                samples.append(self.dataset[index])
        return places.ids, samples


@dataclass(frozen=True)
class _Batches:
    """Makes a batch of the samples that `_Identified` returned; if the batch is a dict, the ids are added to it.

    In a worker process, an error that a user can act on is returned instead of raised, because torch would put the
    worker's traceback into its message.
    """

    collate: Collate | None
    fetch: Callable[[_Places], tuple[Sequence[int], list[Any]]]

    def __call__(self, places: _Places) -> Any:
        ids, samples = self.fetch(places)
        batch = (self.collate or stacked)(samples)
        return {**batch, "ids": torch.tensor(ids, dtype=torch.int64)} if isinstance(batch, dict) else batch


@dataclass(frozen=True)
class _Fetched:
    """A data set of batches, for torch's DataLoader; errors that a user can act on are returned."""

    batches: _Batches

    def __getitems__(self, places: _Places) -> Any:
        try:
            return self.batches(places)
        except ShoestringError as error:
            return error


def stacked(samples: list[Any]) -> Batch:
    """Stack samples to a batch: torch's `default_collate`, with an error that says which shapes differ.

    Raises:
        DataError: samples hold tensors of different shapes, or values that are no tensors, arrays, numbers or texts.
    """
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        forms = sorted(set(map(_form, samples)))
        difference = f"one is {forms[0]}, another {forms[1]}" if len(forms) > 1 else ""
        if not difference and isinstance(error, RuntimeError):
            raise  # the samples are alike, so the cause is another, such as a lack of shared memory
        hint = "name a function that makes a batch of a list of such samples: run.collate = 'package.module:callable'"
        raise DataError(f"samples cannot be stacked to a batch: {difference or error}", hint=hint) from error


def _form(sample: Any) -> str:
    """Describe the form of a sample as text: the shape of each array or tensor, and the type of each other value."""
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {_form(value)}" for name, value in sample.items()) + "}"
    if isinstance(sample, list | tuple):
        return "(" + ", ".join(map(_form, sample)) + ")"
    shape = getattr(sample, "shape", None)
    return type(sample).__name__ if shape is None else str(tuple(shape))


_MOST_REPEATS = 1024
"""Maximum number of times that a batch may contain each sample; a larger number is a mistake in the batch size."""


class Loader:
    """Iterates over optimizer steps, each a tuple of this rank's micro-batches, through all epochs, without end.

    The global batch of `batch` samples is cut into `accumulate` micro-batches, and each micro-batch into `size` shards,
    in order. Together the ranks get exactly the global batch, for any number of ranks. By default a shard is a dict of
    the samples' tensors, stacked to (batch / (size · accumulate), ...), and "ids", the indices of the samples in the
    data set (int64).

    The position is `consumed`, the number of samples that the training loops of all ranks have taken. Samples that
    workers have prefetched but training has not taken are not included. If a state is loaded during an iteration, the
    iteration continues at the loaded position. Only one iteration may run at a time; `close` ends the workers.

    Args:
        dataset: any map-style data set with a length. Samples that are not dicts (tuples, say) are stacked by
            `default_collate`, without ids. Optional members: `fingerprint` is saved in the state and compared on
            resume; `order(seed)` returns the order of samples, by default a new shuffle for each epoch; `ahead(ids)` is
            called with the samples that come next; `draws = False` declares that samples involve no random draws;
            otherwise the random number generators are seeded for each sample (or for each batch, if the data set has
            `__getitems__`).
        batch: number of samples in an optimizer step, over all ranks.
        rank: rank of this process.
        size: number of processes that share the batch.
        accumulate: number of micro-batches in a step.
        seed: seed of the order and of the samples' random draws.
        workers: number of processes that load data; 0 loads in this process.
        context: how workers start: `fork`, `forkserver` or `spawn`; defaults to the platform's default.
        collate: list of samples -> batch, in place of stacking; "ids" are added to a batch that is a dict.

    Raises:
        ConfigError: `batch` is not divisible by `size` x `accumulate`, or a count is out of range or far beyond the
            size of the data set.
        DataError: the data set is empty.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch: int,
        rank: int = 0,
        size: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        workers: int = 0,
        context: str | None = None,
        collate: Collate | None = None,
    ) -> None:
        check_batch(batch, rank, size, accumulate)
        self.samples = _length(dataset)
        if self.samples == 0:
            raise DataError("the data set has no samples", hint="use more text or a smaller data.sequence")
        if batch > _MOST_REPEATS * self.samples:
            hint = "lower run.batch, and set run.epochs or run.steps to learn each sample several times"
            raise ConfigError(f"a batch of {batch:,} for a data set of {self.samples:,} samples", hint=hint)
        if batch > self.samples:
            log.warning("a batch of %d takes samples more than once: the data set has %d", batch, self.samples)
        self.dataset, self.batch, self.rank, self.size, self.accumulate = dataset, batch, rank, size, accumulate
        self.seed, self.workers, self.context, self.collate = seed, workers, context, collate
        self.consumed = 0
        """Number of samples taken so far, over all ranks."""
        self._jumps = 0
        self._order: tuple[int, Order] | None = None
        self._fetcher: DataLoader[Batch] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self.consumed // self.samples

    def ids(self, start: int, count: int) -> np.ndarray:
        """The indices of the samples at positions `start` to `start` + `count` - 1; int64 (count,)."""
        if self._order is None or self._order[0] != self.seed:
            order: Callable[[int], Order] | None = getattr(self.dataset, "order", None)
            self._order = self.seed, order(self.seed) if order else Shuffled(self.seed, self.samples)
        return self._order[1].at(np.arange(start, start + count))

    def _micro_batches(self) -> Iterator[_Places]:
        """This rank's shard of every micro-batch from the current position on, without end."""
        start, stream = self.consumed, ("training", self.seed)
        places = np.arange(self.batch).reshape(self.accumulate, self.size, -1)[:, self.rank]
        ahead: Callable[[list[int]], None] | None = getattr(self.dataset, "ahead", None)
        while True:
            if ahead is not None:
                coming = self.ids(start, (1 + AHEAD) * self.batch).reshape(
                    -1, self.size, self.batch // (self.size * self.accumulate)
                )
                ahead(coming[:, self.rank].flatten().tolist())
            ids = self.ids(start, self.batch)
            for part in places:
                yield _Places(ids[part].tolist(), (start + part).tolist(), stream)
            start += self.batch

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        while True:
            if self._fetcher is None:  # worker processes persist from one iteration to the next
                self._fetcher = DataLoader(
                    cast(Any, _Fetched(_Batches(self.collate, _Identified(self.dataset).__getitems__))),
                    batch_sampler=_Endless(self._micro_batches),
                    collate_fn=_as_it_is,
                    num_workers=self.workers,
                    persistent_workers=self.workers > 0,
                    # This generator seeds the workers; torch would draw their seed from the generator of dropout.
                    generator=torch.Generator().manual_seed(seed_of("workers", self.seed, self.rank, self.consumed)),
                    multiprocessing_context=self.context if self.workers else None,
                )
            # Fetching starts again after `load_state_dict`, because the prefetched batches are then stale.
            jumps, fetched = self._jumps, iter(self._fetcher)
            while True:
                try:
                    step = tuple(map(_checked, (next(fetched) for _ in range(self.accumulate))))
                except RuntimeError as error:
                    if "unable to allocate shared memory" not in str(error):  # part of torch's message, from a worker
                        raise
                    raise DataError(
                        "no room in /dev/shm for the batches of data.workers",
                        hint="set data.workers to 0, or give the container more shared memory (docker run --shm-size)",
                    ) from error
                if jumps != self._jumps:
                    break
                self.consumed += self.batch
                yield step

    def state_dict(self) -> dict[str, Any]:
        """The position and the identity of the data set; the same on every rank."""
        return {
            "consumed": self.consumed,
            "seed": self.seed,
            "samples": self.samples,
            "fingerprint": _fingerprint(self.dataset),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position and in the order of a saved state; the batch and the number of ranks may differ.

        Raises:
            DataError: the state belongs to another data set.
        """
        saved = state_dict["samples"], state_dict["fingerprint"]
        if saved != (self.samples, _fingerprint(self.dataset)):
            raise DataError(
                f"the position belongs to another data set, of {saved[0]} samples; this one has {self.samples}",
                hint="resume with the same data and [data] settings, or start a new run",
            )
        self.consumed, self.seed = int(state_dict["consumed"]), int(state_dict["seed"])
        self._jumps += 1

    def close(self) -> None:
        """End the worker processes."""
        self._fetcher = None


class _Endless:
    """A batch sampler whose iterations each start at the loader's current position."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


def _as_it_is(batch: Any) -> Any:
    return batch


def _checked(batch: Any) -> Batch:
    if isinstance(batch, ShoestringError):
        raise batch
    return batch


class Share(NamedTuple):
    """The indices of the samples in one batch of `sweep`."""

    ids: list[int]
    repeated: bool
    """Whether the batch holds only one sample, which another rank evaluates; this copy does not count."""


def shares(samples: int, batch: int, rank: int, size: int, rounds: int = 0) -> Iterator[Share]:
    """Iterate over the batches of one rank; every sample belongs to one rank, and all ranks have the same number of
    batches.

    The samples of the last round are divided evenly. A rank that gets none of them repeats the last sample.

    Args:
        rounds: minimum number of batches.
    """
    for first in range(0, max(samples, rounds * batch * size), batch * size):
        left = max(min(samples - first, batch * size), 0)
        ids = list(range(first + left * rank // size, first + left * (rank + 1) // size))
        yield Share(ids, repeated=False) if ids else Share([samples - 1], repeated=True)


def sweep(
    dataset: Dataset[Any],
    *,
    batch: int,
    rank: int = 0,
    size: int = 1,
    limit: int = 0,
    collate: Collate | None = None,
    rounds: int = 0,
) -> Iterator[Batch | Repeated]:
    """Iterate once over this rank's share of the first `limit` samples (0: all samples), in order, for evaluation.

    All ranks get the same number of batches, because sharded models communicate in each forward pass. Every sample is
    in exactly one batch of one rank. Batches have `batch` samples, except that the last batches of the ranks share the
    remainder; if the remainder is smaller than the number of ranks, the ranks without a sample get a copy of the last
    sample, as `Repeated`. If a batch is a dict, its entry `valid`, bool (samples,), is False for such a copy. Random
    draws depend only on the sample, so all evaluations see the same samples.

    Args:
        collate: list of samples -> batch, in place of stacking.
        rounds: minimum number of batches; a batch for which no samples are left is `Repeated`.
    """
    check_batch(batch, rank, size, 1, whole=False)
    batches, samples = _Batches(collate, _Identified(dataset).__getitems__), _length(dataset)
    for ids, repeated in shares(min(limit, samples) if limit else samples, batch, rank, size, rounds):
        part = batches(_Places(ids, ids, ("evaluation",)))
        if isinstance(part, dict):
            part["valid"] = torch.full((len(ids),), not repeated)
        yield Repeated(part) if repeated else part


def _length(dataset: Dataset[Any]) -> int:
    return len(cast(Sized, dataset))  # torch's class Dataset does not declare `__len__`


def _fingerprint(dataset: Dataset[Any]) -> str:
    return str(getattr(dataset, "fingerprint", ""))


def check_batch(batch: int, rank: int, size: int, accumulate: int, *, whole: bool = True) -> None:
    """Raise ConfigError unless all counts are in range and the batch is divisible by the number of micro-batches of all
    ranks.

    If `whole` is False, the batch need not be divisible.
    """
    if batch < 1 or size < 1 or accumulate < 1 or not 0 <= rank < size:
        raise ConfigError(
            f"a batch of {batch} in {accumulate} micro-batches for rank {rank} of {size}",
            hint="batch, micro-batches and ranks must be at least 1, and the rank less than the number of ranks",
        )
    parts = size * accumulate
    if whole and batch % parts:
        near = max(1, round(batch / parts)) * parts
        raise ConfigError(
            f"a batch of {batch} is not divisible by {size} ranks × {accumulate} micro-batches",
            hint=f"the nearest batch size that is divisible is {near}",
        )
