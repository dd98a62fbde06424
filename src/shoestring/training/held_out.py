"""The held-out samples of a run, as `run.evaluate` gets them: this rank's share, and what all ranks computed."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoestring._torch import tree_map_only
from shoestring.collectives import bytes_of
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import Batch, Output, Repeated
from shoestring.data.loader import shares, sweep
from shoestring.training.data_loading import DataSets, to_device


class HeldOut:
    """The held-out samples of an evaluation. Iterating over it gives this rank's batches, on its device.

    All ranks have the same number of batches. If a rank has a sample that counts on another rank, because there are
    fewer samples than ranks in the last round, the entry `valid` of a batch that is a dict is False there; `gather`
    leaves such rows out.

    Args:
        samples: the data set to take samples from.
        limit: number of samples to use, from the first on; 0 uses all.
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
        """This rank's batches, those that count on another rank as `Repeated`; for `Job.evaluate`."""
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

    def gather(self, rows: Any) -> Any:
        """Gather rows of all ranks, in the order of the data set and each sample once. A collective.

        If ranks have data of their own, the rows are those of the first rank, of the second, and so on.

        Args:
            rows: a tensor (n, ...), or a tuple, list or dict of such tensors, with a row for each sample of this rank's
                batches, in their order.

        Returns:
            The same with (len(self), ...) rows, on the device of `rows`, on every rank.

        Raises:
            ConfigError: there are not as many rows as samples.
        """
        return tree_map_only(Tensor, self._gathered, rows)

    def _gathered(self, rows: Tensor) -> Tensor:
        world, own = self._job.world, self._ids(self._rank)

        def check() -> None:
            if not rows.ndim or len(rows) != len(own):
                raise ConfigError(
                    f"`gather` got a tensor of shape {tuple(rows.shape)}, and this rank has {len(own)} samples",
                    hint="give a row for each sample of this rank's batches: torch.cat(rows of each batch)",
                )

        world.agree(check)
        place = self._rank.to_bytes(8, "little")
        parts: dict[int, Tensor] = {}
        for content in world.gather(place + bytes_of(rows).cpu().numpy().tobytes()):
            rank = int.from_bytes(content[:8], "little")  # ranks that work together on samples have the same rows
            shape = (len(self._ids(rank)), *rows.shape[1:])
            parts[rank] = torch.empty(shape, dtype=rows.dtype)
            if len(content) > 8:
                parts[rank] = torch.frombuffer(bytearray(content[8:]), dtype=rows.dtype).view(shape)
        ids = torch.tensor([sample for rank in sorted(parts) for sample in self._ids(rank)])
        together = torch.cat([parts[rank] for rank in sorted(parts)])
        return together[ids >= 0][ids[ids >= 0].argsort()].to(rows.device)

    def _ids(self, rank: int) -> list[int]:
        """The number of the sample of each of a rank's rows, -1 for one that counts on another rank."""
        first, parts = 0, shares(len(self), self._batch, rank, self._size)
        if self._data.of_ranks:  # samples are numbered through over ranks
            first, parts = sum(self._lengths[:rank]), shares(self._lengths[rank], self._batch, 0, 1, self._rounds)
        return [-1 if part.repeated else first + sample for part in parts for sample in part.ids]
