"""Training that waits for its data."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.profile.planted.program import Planted, seeded, weights


class Network(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.head(x)


@cache
def archive() -> Path:
    """Measurements and labels in one compressed file."""
    path = Path(tempfile.mkdtemp(prefix="measurements-")) / "all.npz"
    rng = np.random.default_rng(0)
    features = rng.integers(-40, 40, (512, 64)).astype(np.float32) / 16
    np.savez_compressed(path, features=features, labels=rng.integers(0, 5, 512))
    return path


class Measurements(Dataset):
    """Opens the file for each sample, so that workers need not share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with np.load(path) as file:
            self.count = len(file["labels"])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with np.load(self.path) as file:  # fault: opened-for-each-sample
            features, labels = file["features"], file["labels"]  # fault: opened-for-each-sample
        return torch.from_numpy(features[index]), int(labels[index])


class MeasurementsInMemory(Measurements):
    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.features, self.labels = torch.from_numpy(file["features"]), file["labels"].tolist()
        self.count = len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.features[index], self.labels[index]


def classify(steps: int, kind: type[Measurements]) -> list[Tensor]:
    random = seeded()
    data = kind(archive())
    sampler = RandomSampler(data, replacement=True, num_samples=steps * 16, generator=random)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = Network(64, 1792, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for features, labels in loader:  # fault: opened-for-each-sample
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


@cache
def database() -> Path:
    """Ratings of films by users."""
    path = Path(tempfile.mkdtemp(prefix="ratings-")) / "ratings.db"
    rng = np.random.default_rng(0)
    with sqlite3.connect(path) as connection:
        connection.execute("create table ratings (number integer, person blob, film blob, stars real)")
        connection.executemany(
            "insert into ratings values (?, ?, ?, ?)",
            (
                (
                    number,
                    rng.normal(size=32).astype(np.float32).tobytes(),
                    rng.normal(size=32).astype(np.float32).tobytes(),
                    float(rng.integers(1, 6)),
                )
                for number in range(2400)
            ),
        )
    connection.close()
    return path


Rating = tuple[Tensor, float]


def to_rating(person: bytes, film: bytes, stars: float) -> Rating:
    return torch.frombuffer(bytearray(person + film), dtype=torch.float32), stars


class Ratings(Dataset):
    """Asks the data base, which has no index, for one rating after the other."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(database())

    def __len__(self) -> int:
        return 2400

    def __getitem__(self, index: int) -> Rating:
        query = "select person, film, stars from ratings where number = ?"
        row = self.connection.execute(query, (index,)).fetchone()  # fault: one-row-a-query
        return to_rating(*row)


class RatingsInMemory(Ratings):
    """Reads all of them when it is made, in one query."""

    def __init__(self) -> None:
        connection = sqlite3.connect(database())
        rows = connection.execute("select person, film, stars from ratings order by number")
        self.rows = [to_rating(*row) for row in rows]
        connection.close()

    def __getitem__(self, index: int) -> Rating:
        return self.rows[index]


def batches_of(data: Dataset[Rating], count: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """The training's batches, for ever."""
    while True:
        sampler = RandomSampler(data, num_samples=count, generator=random)  # pyrefly: ignore
        for features, stars in DataLoader(data, 48, sampler=sampler, drop_last=True):  # fault: one-row-a-query
            yield features, stars.float()


def ratings(steps: int, kind: type[Ratings]) -> list[Tensor]:
    random = seeded()
    model = Network(64, 1200, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    batches = batches_of(kind(), 600, random)
    for _ in range(steps):
        features, stars = next(batches)  # fault: one-row-a-query
        loss = F.mse_loss(model(features).squeeze(1), stars)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def pad_lists(batch: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    longest = max(len(series) for series in batch)
    rows = []
    for series in batch:
        filled = [list(values) for values in series]  # fault: padded-as-lists
        filled += [[0.0] * 16 for _ in range(longest - len(series))]
        rows.append(filled)
    return torch.tensor(rows)  # fault: padded-as-lists


def pad_tensors(batch: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(batch), batch_first=True)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.squeeze = nn.Conv1d(16, 384, 5, padding=2), nn.Conv1d(384, 24, 5, padding=2)
        self.unsqueeze, self.narrow = nn.Conv1d(24, 384, 5, padding=2), nn.Conv1d(384, 16, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.widen(x))
        code = self.squeeze(hidden)
        hidden = F.relu(self.unsqueeze(code))
        return self.narrow(hidden)


def sensors(steps: int, as_tensors: bool) -> list[Tensor]:
    """Series of different lengths from machines' sensors."""
    random = seeded()
    rng = np.random.default_rng(0)
    series = [rng.normal(size=(int(rng.integers(40, 80)), 16)).astype(np.float32) for _ in range(128)]
    data = [torch.from_numpy(values) for values in series] if as_tensors else [values.tolist() for values in series]
    collate: Callable[..., Tensor] = pad_tensors if as_tensors else pad_lists
    sampler = RandomSampler(data, replacement=True, num_samples=steps * 16, generator=random)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 16, True), collate_fn=collate)  # pyrefly: ignore
    model = Autoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for batch in loader:  # fault: padded-as-lists
        x = batch.mT
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Archive(Dataset):
    """Scans on a shared file system, each of which takes a while to come."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.004)  # fault: scans-in-turn
        return torch.randn(1, 48, 48, generator=torch.Generator().manual_seed(index))


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inside, self.up = nn.Conv2d(1, 24, 3), nn.Conv2d(24, 24, 3), nn.ConvTranspose2d(24, 1, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.down(x))
        x = F.relu(self.inside(x))
        return self.up(x)


def segmentation(steps: int, workers: int) -> list[Tensor]:
    seeded()
    model = Segmenter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    context = "fork" if workers else None
    loader = DataLoader(
        Archive(steps * 4), 4, num_workers=workers, multiprocessing_context=context, prefetch_factor=None
    )
    for scans in loader:  # fault: scans-in-turn
        for _ in range(6):
            loss = F.binary_cross_entropy_with_logits(model(scans), (scans > 0).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(
        "opened-for-each-sample",
        "loading",
        lambda n: classify(n, Measurements),
        lambda n: classify(n, MeasurementsInMemory),
        20,
        __name__,
    ),
    Planted(
        "one-row-a-query", "loading", lambda n: ratings(n, Ratings), lambda n: ratings(n, RatingsInMemory), 30, __name__
    ),
    Planted("padded-as-lists", "loading", lambda n: sensors(n, False), lambda n: sensors(n, True), 25, __name__),
    Planted(
        "scans-in-turn",
        "loading",
        lambda n: segmentation(n, 0),
        lambda n: segmentation(n, 2),
        35,
        __name__,
        clock=time.perf_counter,
    ),
]
