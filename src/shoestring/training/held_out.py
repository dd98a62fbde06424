"""The held-out samples of a run for `run.evaluate`: this rank's share, and a way to gather results of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoestring._torch import tree_map_only
from shoestring.collectives import bytes_of
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import Batch, Output, Repeated
from shoestring.data.clients import Clients
from shoestring.data.loader import shares, sweep
from shoestring.training.build import client_states
from shoestring.training.data_loading import DataSets, to_device


class HeldOut:
    """The held-out samples of an evaluation. Iterating over a `HeldOut` gives this rank's batches, on its device.

    All ranks have the same number of batches. In the last round there may be fewer samples than ranks; then some ranks
    repeat a sample that another rank counts. If a batch is a dict, its entry `valid` is False for a repeated sample;
    `gather` leaves out the rows of repeated samples.

    Args:
        samples: the data set to take samples from.
        limit: number of samples to use, from the beginning; 0 uses all.
    """

    def __init__(self, job: Job, data: DataSets, samples: Dataset[Any], batch: int, limit: int = 0) -> None:
        axes = attachments_of(job).data_axes
        self.dataset = samples
        """The whole data set of this rank."""
        self._job, self._data, self._batch = job, data, batch
        self._rank, self._size = job.world.index_over(axes), job.world.ranks_over(axes)
        length = len(cast(Sized, samples))  # torch leaves `__len__` out of Dataset
        lengths = [held_out for _, held_out in data.of_ranks] or [length]
        self._limit = -(-limit // len(lengths))
        self._lengths = [min(self._limit, length) if self._limit else length for length in lengths]
        self._rounds = -(-max(self._lengths) // batch) if data.of_ranks else 0

    def __len__(self) -> int:
        """Number of samples of this evaluation, over all ranks."""
        return sum(self._lengths)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.parts():
            yield batch.batch if isinstance(batch, Repeated) else batch

    def parts(self) -> Iterator[Batch | Repeated]:
        """This rank's batches for `Job.evaluate`; batches that another rank counts are wrapped in `Repeated`."""
        rank, size = (0, 1) if self._data.of_ranks else (self._rank, self._size)
        for batch in sweep(
            self.dataset,
            batch=self._batch,
            rank=rank,
            size=size,
            limit=self._limit,
            collate=self._data.collate,
            rounds=self._rounds,
        ):
            yield to_device(batch, self._job.world.device)

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """The model's output on a batch, computed as in training."""
        return attachments_of(self._job).forward(model, batch)

    @property
    def clients(self) -> Sequence[str]:
        """Names of the clients that this rank trains; empty without a feature that trains clients in turn."""
        return client_states(self._job).clients if isinstance(self._data.train, Clients) else ()

    def acting(self, client: str) -> AbstractContextManager[None]:
        """Context in which the model has the parameters that stay with a client, one of `clients`.

        Outside of this context, an evaluation uses the merged parameters and, for parameters that stay with clients,
        their initial values.
        """
        return client_states(self._job).acting(client)

    def gather(self, rows: Any) -> Any:
        """Gather rows of all ranks in the order of the data set, with each sample once. A collective.

        If ranks have data sets of their own, the rows follow in the order of ranks.

        Args:
            rows: a tensor (n, ...), or a tuple, list or dict of such tensors; one row for each sample of this rank's
                batches, in the order of the batches.

        Returns:
            `rows` with len(self) rows instead of n, on the device of `rows`, on every rank.

        Raises:
            ConfigError: the number of rows differs from the number of this rank's samples.
        """
        return tree_map_only(Tensor, self._gathered, rows)

    def _gathered(self, rows: Tensor) -> Tensor:
        world, own = self._job.world, self._ids(self._rank)

        def check() -> None:
            if not rows.ndim or len(rows) != len(own):
                raise ConfigError(
                    f"`gather` got a tensor of shape {tuple(rows.shape)}, and this rank has {len(own)} samples",
                    hint="give one row for each sample of this rank's batches: torch.cat(rows of each batch)",
                )

        world.agree(check)
        place = self._rank.to_bytes(8, "little")
        parts: dict[int, Tensor] = {}
        for content in world.gather(place + bytes_of(rows).cpu().numpy().tobytes()):
            rank = int.from_bytes(content[:8], "little")  # ranks that share samples send the same rows
            shape = (len(self._ids(rank)), *rows.shape[1:])
            parts[rank] = torch.empty(shape, dtype=rows.dtype)
            if len(content) > 8:
                parts[rank] = torch.frombuffer(bytearray(content[8:]), dtype=rows.dtype).view(shape)
        ids = torch.tensor([sample for rank in sorted(parts) for sample in self._ids(rank)])
        together = torch.cat([parts[rank] for rank in sorted(parts)])
        return together[ids >= 0][ids[ids >= 0].argsort()].to(rows.device)

    def _ids(self, rank: int) -> list[int]:
        """Index of the sample of each row of a rank; -1 if another rank counts the sample."""
        first, parts = 0, shares(len(self), self._batch, rank, self._size)
        if self._data.of_ranks:  # samples are numbered consecutively over all ranks
            first, parts = sum(self._lengths[:rank]), shares(self._lengths[rank], self._batch, 0, 1, self._rounds)
        return [-1 if part.repeated else first + sample for part in parts for sample in part.ids]
