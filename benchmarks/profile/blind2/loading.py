"""Training that waits for its data."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from benchmarks.profile.planted.program import Planted, seeded, weights


class Scans(Dataset[tuple[Tensor, Tensor]]):
    """Slices of scans in compressed archives, each of which is opened again for each slice."""

    def __init__(self, files: list[Path], slices: int) -> None:
        self.files, self.slices = files, slices

    def __len__(self) -> int:
        return len(self.files) * self.slices

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        archive = np.load(self.files[index // self.slices])
        scan = archive["scan"]  # fault: archive-for-each-slice
        label = archive["label"]  # fault: archive-for-each-slice
        return torch.from_numpy(scan[index % self.slices]), torch.tensor(int(label))


class ScansInMemory(Scans):
    """The same slices from archives that were read once."""

    def __init__(self, files: list[Path], slices: int) -> None:
        super().__init__(files, slices)
        archives = [np.load(file) for file in files]
        self.scans = torch.from_numpy(np.stack([archive["scan"] for archive in archives])).flatten(0, 1)
        self.labels = torch.tensor([int(archive["label"]) for archive in archives])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.scans[index], self.labels[index // self.slices]


def radiology(steps: int, dataset_class: type[Scans]) -> list[Tensor]:
    """Classifies slices of scans; `steps` are epochs."""
    random, rng = seeded(), np.random.default_rng(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    model(torch.zeros(1, 1, 64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.npz") for number in range(8)]
        for number, file in enumerate(files):
            scan = rng.integers(0, 40, size=(12, 64, 64)).astype(np.float32)
            np.savez_compressed(file, scan=scan, label=number % 3)
        loader = DataLoader(dataset_class(files, 12), batch_size=16, shuffle=True, generator=random)
        for _ in range(steps):
            for scans, labels in loader:  # fault: archive-for-each-slice
                loss = F.cross_entropy(model(scans[:, None]), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return weights(model)


def tables(steps: int, by_row: bool) -> list[Tensor]:
    """A network for a table: rows are taken one by one and stacked, or as whole batches; `steps` are epochs."""
    random = seeded()
    table = TensorDataset(torch.randn(4096, 40, generator=random), torch.randn(4096, 1, generator=random))
    if by_row:
        loader = DataLoader(table, batch_size=256)
    else:
        sampler = BatchSampler(SequentialSampler(table), batch_size=256, drop_last=False)
        loader = DataLoader(table, sampler=sampler, batch_size=None)
    model = nn.Sequential(nn.Linear(40, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        for features, target in loader:  # fault: row-by-row
            loss = F.mse_loss(model(features), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


class Sensors(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a recording, with their spectrum."""

    def __init__(self) -> None:
        self.recording = torch.randn(20_000, generator=seeded())

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.recording[index * 64 : index * 64 + 256]
        return torch.fft.rfft(window).abs(), window.mean()


def monitoring(steps: int, persistent: bool) -> list[Tensor]:
    """Short epochs with workers, which are started again for each epoch or stay; `steps` are epochs."""
    seeded()
    loader = DataLoader(Sensors(), batch_size=32, num_workers=2, persistent_workers=persistent)
    model = nn.Sequential(nn.Linear(129, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        for spectrum, mean in loader:  # fault: workers-for-each-epoch
            loss = F.mse_loss(model(spectrum).squeeze(1), mean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(
        "archive-for-each-slice",
        "loading",
        lambda steps: radiology(steps, Scans),
        lambda steps: radiology(steps, ScansInMemory),
        steps=4,
        module=__name__,
    ),
    Planted(
        "row-by-row",
        "loading",
        lambda steps: tables(steps, True),
        lambda steps: tables(steps, False),
        steps=12,
        module=__name__,
    ),
    Planted(
        "workers-for-each-epoch",
        "loading",
        lambda steps: monitoring(steps, False),
        lambda steps: monitoring(steps, True),
        steps=12,
        module=__name__,
        clock=time.perf_counter,
    ),
]
