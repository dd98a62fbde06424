"""Batches in an order that is a function of the seed alone, and a position that is one integer.

Global sample g is the one at position g of the data set's order (`order.py`): a batch may reach into the next epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import IGNORED
from shoestring.data.order import Order, Shuffled

log = logging.getLogger("shoestring.data")
Batch = dict[str, Tensor]
AHEAD = 4
"""Steps whose samples a data set may fetch ahead."""


class _Identified(Dataset[Any]):
    """A data set whose fetched batches also hold the ids of their samples."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, ids: Sequence[int]) -> tuple[Sequence[int], list[Any]]:
        fetch: Callable[[Sequence[int]], list[Any]] | None
        fetch = getattr(self.dataset, "__getitems__", None)  # torch's own optional protocol
        return ids, fetch(ids) if fetch else [self.dataset[index] for index in ids]


def _collate(fetched: Any) -> Any:
    """Stack the samples that `_Identified` fetched, and add their ids to a dict."""
    ids, samples = fetched
    batch = default_collate(samples)
    return {**batch, "ids": torch.tensor(ids, dtype=torch.int64)} if isinstance(batch, dict) else batch


class Loader:
    """The micro-batches of each optimizer step, epoch after epoch without end.

    The global batch of `batch` samples is cut into `accumulate` micro-batches and each of these into `size` parts, in
    order: the ranks together get exactly the global batch, whatever their number. A part is a dict of the samples'
    tensors, stacked to (batch / (size · accumulate), ...), and "ids", the int64 numbers of the samples.

    The position is `consumed`, the samples handed to the training loops of all ranks. A step counts when the loop
    takes it: what worker processes have fetched ahead does not. Loading a state while iterating moves the iteration.
    One iteration at a time; `close` ends the workers.

    Args:
        dataset: any map-style data set with a length. Samples that are no dicts (tuples, say) are stacked as
            `default_collate` does, without ids. Its `fingerprint`, where it has one, goes into the state; its
            `order(seed)`, where it has one, is the order, else each sample comes once an epoch; its `ahead(ids)`, where
            it has one, hears what comes next.
        batch: samples of an optimizer step, over all ranks.
        rank: this process.
        size: processes that share the batch.
        accumulate: micro-batches of a step.
        seed: of the order.
        workers: processes that fetch ahead; 0 fetches in this one.
        context: how workers start, `fork`, `forkserver` or `spawn`; the platform's way unless given.

    Raises:
        ConfigError: `batch` does not divide, or a count is out of range.
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
    ) -> None:
        _check(batch, rank, size, accumulate)
        self.samples = _length(dataset)
        if self.samples == 0:
            raise DataError("the data set has no samples", hint="use more text or a smaller data.sequence")
        if batch > self.samples:
            log.warning("a batch of %d takes samples more than once: the data set has %d", batch, self.samples)
        self.dataset, self.batch, self.rank, self.size, self.accumulate = dataset, batch, rank, size, accumulate
        self.seed, self.workers, self.context = seed, workers, context
        self.consumed = 0
        """Samples handed out so far, over all ranks."""
        self._jumps = 0
        self._order: tuple[int, Order] | None = None
        self._fetcher: DataLoader[Batch] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self.consumed // self.samples

    def ids(self, start: int, count: int) -> np.ndarray:
        """The samples at the global positions from `start` on, in order; int64 (count,)."""
        if self._order is None or self._order[0] != self.seed:
            order: Callable[[int], Order] | None = getattr(self.dataset, "order", None)
            self._order = self.seed, order(self.seed) if order else Shuffled(self.seed, self.samples)
        return self._order[1].at(np.arange(start, start + count))

    def _micro_batches(self) -> Iterator[list[int]]:
        """This rank's part of every micro-batch from the present position on, without end."""
        start = self.consumed
        ahead: Callable[[list[int]], None] | None = getattr(self.dataset, "ahead", None)
        while True:
            if ahead is not None:
                coming = self.ids(start, (1 + AHEAD) * self.batch).reshape(
                    -1, self.size, self.batch // (self.size * self.accumulate)
                )
                ahead(coming[:, self.rank].flatten().tolist())
            ids = self.ids(start, self.batch).reshape(self.accumulate, self.size, -1)
            yield from ids[:, self.rank].tolist()
            start += self.batch

    def _fetch(self) -> Iterator[Batch]:
        if self._fetcher is None:
            self._fetcher = DataLoader(
                _Identified(self.dataset),
                batch_sampler=_Endless(self._micro_batches),
                collate_fn=_collate,
                num_workers=self.workers,
                persistent_workers=self.workers > 0,
                generator=torch.Generator(),  # else it would draw a seed from the generator that dropout draws from
                multiprocessing_context=self.context if self.workers else None,
            )
        return iter(self._fetcher)

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        while True:
            jumps, fetched = self._jumps, self._fetch()
            while True:
                step = tuple(next(fetched) for _ in range(self.accumulate))
                if jumps != self._jumps:
                    break
                self.consumed += self.batch
                yield step

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of the data set; equal on every rank."""
        return {
            "consumed": self.consumed,
            "seed": self.seed,
            "samples": self.samples,
            "fingerprint": _fingerprint(self.dataset),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from where `state_dict` was taken, in its order; the number of ranks and the batch may differ.

        Raises:
            DataError: it was taken on another data set.
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
    """A batch sampler that starts anew, from the loader's position, whenever it is iterated."""

    def __init__(self, batches: Callable[[], Iterator[list[int]]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches()


def sweep(dataset: Dataset[Any], *, batch: int, rank: int = 0, size: int = 1, limit: int = 0) -> Iterator[Batch]:
    """Every sample once, in order, for evaluation: this rank's share of the first `limit` samples (0: all).

    Every rank gets equally many batches of `batch` samples, as sharded models need it. Where the samples do not
    divide, the last one is repeated with targets of -100, which no loss counts. Floating-point targets have no such
    value: then the last batches are smaller, and samples that are fewer than the ranks are left out.
    """
    _check(batch, rank, size, 1, whole=False)
    samples, identified = _length(dataset), _Identified(dataset)
    samples = min(limit, samples) if limit else samples
    for first in range(0, samples, batch * size):
        start, left = first + rank * batch, samples - first
        part = _collate(identified.__getitems__([min(i, samples - 1) for i in range(start, start + batch)]))
        if left < batch * size:
            targets = (part["targets"] if "targets" in part else part["labels"]) if isinstance(part, dict) else part[1]
            if targets.is_floating_point():
                if left < size:
                    return
                share = range(first + left * rank // size, first + left * (rank + 1) // size)
                part = _collate(identified.__getitems__(share))
            else:
                targets[max(samples - start, 0) :] = IGNORED
        yield part


def _length(dataset: Dataset[Any]) -> int:
    return len(cast(Sized, dataset))  # torch leaves `__len__` out of Dataset


def _fingerprint(dataset: Dataset[Any]) -> str:
    return str(getattr(dataset, "fingerprint", ""))


def _check(batch: int, rank: int, size: int, accumulate: int, *, whole: bool = True) -> None:
    if batch < 1 or size < 1 or accumulate < 1 or not 0 <= rank < size:
        raise ConfigError(
            f"a batch of {batch} in {accumulate} micro-batches for rank {rank} of {size}",
            hint="all are at least 1, and the rank is below the number of ranks",
        )
    parts = size * accumulate
    if whole and batch % parts:
        near = max(1, round(batch / parts)) * parts
        raise ConfigError(
            f"a batch of {batch} does not divide by {size} ranks × {accumulate} micro-batches",
            hint=f"the nearest batch that does is {near}",
        )
