"""Steps that wait for their batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.profile.planted.program import Planted, seeded, weights
from benchmarks.profile.planted_by_author.model import Blocks, Training


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Texts of numbers, parsed anew each time."""

    def __init__(self, parsed: bool) -> None:
        values = torch.randn(512, 64, generator=seeded()).tolist()
        self.texts = [" ".join(f"{value:.4f}" for value in row) for row in values]
        self.kept = [self.parse(text) for text in self.texts] if parsed else None

    def parse(self, text: str) -> Tensor:
        return torch.tensor([float(word) for word in text.split()])  # fault: parse-each-time

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.kept[index] if self.kept else self.parse(self.texts[index])  # fault: parse-each-time
        return x, x.sum()


class Stored(Dataset[Tensor]):
    """A store that takes its time for each record."""

    def __init__(self, kept: bool) -> None:
        self.kept, self.values = kept, torch.randn(2048, 256, generator=seeded())

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> Tensor:
        if not self.kept:
            time.sleep(0.0005)  # fault: slow-store
        return self.values[index]


def _parsed(steps: int, fixed: bool) -> list[Tensor]:
    data, training, done = Rows(parsed=fixed), Training(Blocks(64, 512)), 0
    kept = torch.stack([row for row, _ in data]) if fixed else None
    while done < steps:
        loader = ((rows, None) for rows in kept.split(64)) if kept is not None else DataLoader(data, batch_size=64)
        for x, _ in loader:  # fault: parse-each-time
            training.step(x)
            done += 1
    return weights(training.model)


def _slow_store(steps: int, fixed: bool) -> list[Tensor]:
    data, training = Stored(kept=fixed), Training(Blocks(256, 1024))
    batches = iter(DataLoader(data, batch_size=16))
    for _ in range(steps):
        x = next(batches)  # fault: slow-store
        training.step(x)
    return weights(training.model)


def _whole_batches(data: TensorDataset, size: int) -> Iterator[tuple[Tensor, ...]]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _row_by_row(steps: int, fixed: bool) -> list[Tensor]:
    x = torch.randn(4096, 32, generator=seeded())
    data, training, done = TensorDataset(x, x.sum(-1)), Training(Blocks(32, 128)), 0
    while done < steps:
        batches = _whole_batches(data, 256) if fixed else DataLoader(data, batch_size=256)
        for rows, _ in batches:  # fault: collate-rows
            training.step(rows)
            done += 1
    return weights(training.model)


PROGRAMS = [
    Planted("parse-each-time", "loading", partial(_parsed, fixed=False), partial(_parsed, fixed=True), 240, __name__),
    Planted(
        *("slow-store", "loading", partial(_slow_store, fixed=False), partial(_slow_store, fixed=True), 100, __name__),
        clock=time.perf_counter,
    ),
    Planted(
        "collate-rows", "loading", partial(_row_by_row, fixed=False), partial(_row_by_row, fixed=True), 240, __name__
    ),
]
