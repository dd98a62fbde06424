"""Training that waits for its next batch."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.profile.planted.program import Planted, seeded, weights


class Small(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, stride=2), nn.Conv2d(width, 2 * width, 3, stride=2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.head(x.mean((2, 3)))


class Pictures:
    """Pictures, and how each is to be cut, flipped and lit."""

    def __init__(self, count: int, random: torch.Generator) -> None:
        self.images = torch.rand(count, 3, 36, 36, generator=random)
        self.labels = torch.randint(0, 10, (count,), generator=random)
        self.tops, self.lefts = torch.randint(0, 5, (2, count), generator=random)
        self.flips = torch.rand(count, generator=random) < 0.5
        self.gains = 0.8 + 0.4 * torch.rand(count, 3, generator=random)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """One picture at a time, as transforms usually work."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures
        self.places = list(zip(pictures.tops.tolist(), pictures.lefts.tolist(), pictures.flips.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left, flip = self.places[index]
        image = self.pictures.images[index, :, top : top + 32, left : left + 32]  # fault: augmented-one-at-a-time
        if flip:
            image = image.flip(2)  # fault: augmented-one-at-a-time
        image = image * self.pictures.gains[index].view(3, 1, 1)  # fault: augmented-one-at-a-time
        image = image.clamp(0, 1).sub(0.5).div(0.25)  # fault: augmented-one-at-a-time
        return image, self.pictures.labels[index]  # fault: augmented-one-at-a-time


def augmented_together(pictures: Pictures, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same for all pictures of a batch at once."""
    cuts = pictures.images.unfold(2, 32, 1).unfold(3, 32, 1)
    for numbers in torch.arange(len(pictures.images)).split(size):
        images = cuts[numbers, :, pictures.tops[numbers], pictures.lefts[numbers]]
        images = torch.where(pictures.flips[numbers].view(-1, 1, 1, 1), images.flip(3), images)
        images = images.mul_(pictures.gains[numbers].view(-1, 3, 1, 1))
        yield images.clamp_(0, 1).sub_(0.5).div_(0.25), pictures.labels[numbers]


def augmenting(steps: int, one_at_a_time: bool) -> list[Tensor]:
    random = seeded()
    pictures = Pictures(64 * steps, random)
    model = Small(10, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    batches = DataLoader(Augmented(pictures), 64) if one_at_a_time else augmented_together(pictures, 64)
    for images, labels in batches:  # fault: augmented-one-at-a-time
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Houses(Dataset[Tensor]):
    """Rows of a table in a text file."""

    def __init__(self, file: Path, anew: bool) -> None:
        self.file = file
        self.table = None if anew else self.parse()

    def parse(self) -> list[list[float]]:
        lines = self.file.read_text().splitlines()[1:]  # fault: table-read-for-each-row
        return [[float(cell) for cell in line.split(",")] for line in lines]  # fault: table-read-for-each-row

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Tensor:
        table = self.table if self.table is not None else self.parse()  # fault: table-read-for-each-row
        return torch.tensor(table[index])


class Price(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 512), nn.Linear(512, 512), nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.third(x).squeeze(1)


def house_prices(steps: int, anew: bool) -> list[Tensor]:
    """A table that would fit in memory many times; each epoch has five batches."""
    random = seeded()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "houses.csv"
        rows = torch.rand(120, 8, generator=random).tolist()
        names = "rooms,area,floor,age,north,east,garden,price"
        file.write_text("\n".join([names, *(",".join(f"{cell:.4f}" for cell in row) for row in rows)]))
        loader = DataLoader(Houses(file, anew), batch_size=24, shuffle=True, generator=random)
        model = Price()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        for _ in range(steps):
            for batch in loader:  # fault: table-read-for-each-row
                for _ in range(4):
                    noisy = batch[:, :7].repeat(4, 1) + 0.05 * torch.randn(4 * len(batch), 7, generator=random)
                    loss = F.mse_loss(model(noisy), batch[:, 7].repeat(4))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    return weights(model)


class Recordings(Dataset[tuple[Tensor, int]]):
    """Sounds as bytes, two for each sample, as they stand in a WAV file."""

    def __init__(self, sounds: list[bytes], one_by_one: bool) -> None:
        self.sounds, self.one_by_one = sounds, one_by_one

    def __len__(self) -> int:
        return len(self.sounds)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raw = self.sounds[index]
        if self.one_by_one:
            samples = []
            for place in range(0, len(raw), 2):  # fault: samples-decoded-one-by-one
                pair = raw[place : place + 2]  # fault: samples-decoded-one-by-one
                sample = int.from_bytes(pair, "little", signed=True)  # fault: samples-decoded-one-by-one
                samples.append(sample / 32768)  # fault: samples-decoded-one-by-one
            sound = torch.tensor(samples)  # fault: samples-decoded-one-by-one
        else:
            sound = torch.from_numpy(np.frombuffer(raw, dtype="<i2").astype(np.float32) / 32768)
        return sound.unsqueeze(0), index % 5


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 48, 31, stride=4), nn.Conv1d(48, 96, 15, stride=4)
        self.third, self.head = nn.Conv1d(96, 96, 7, stride=2), nn.Linear(96, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.head(x.mean(2))


def keywords(steps: int, one_by_one: bool) -> list[Tensor]:
    random = seeded()
    noise = torch.randint(-3000, 3000, (64, 1600), generator=random)
    sounds = [sound.numpy().astype("<i2").tobytes() for sound in noise]
    loader = DataLoader(Recordings(sounds, one_by_one), batch_size=16, shuffle=True, generator=random)
    model = Keywords()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    for _ in range(steps):
        for sound, label in loader:  # fault: samples-decoded-one-by-one
            loss = F.cross_entropy(model(sound), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


def from_bucket(number: int) -> tuple[Tensor, Tensor]:
    """A shard from a bucket that is some way off."""
    time.sleep(0.004)  # fault: shard-after-shard
    random = torch.Generator().manual_seed(number)
    return torch.rand(32, 3, 30, 30, generator=random), torch.randint(0, 12, (32,), generator=random)


def shard_after_shard(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(count):
        yield from_bucket(number)  # fault: shard-after-shard


def one_shard_ahead(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    with ThreadPoolExecutor(1) as pool:
        coming: Future[tuple[Tensor, Tensor]] = pool.submit(from_bucket, 0)
        for number in range(count):
            shard = coming.result()
            coming = pool.submit(from_bucket, number + 1)
            yield shard


def from_a_bucket(steps: int, in_turn: bool) -> list[Tensor]:
    seeded()
    model = Small(12, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    for images, labels in shard_after_shard(steps) if in_turn else one_shard_ahead(steps):  # fault: shard-after-shard
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    *(
        Planted(name, "loading", run, fixed, steps, __name__)
        for name, run, fixed, steps in (
            ("augmented-one-at-a-time", lambda n: augmenting(n, True), lambda n: augmenting(n, False), 140),
            ("table-read-for-each-row", lambda n: house_prices(n, True), lambda n: house_prices(n, False), 16),
            ("samples-decoded-one-by-one", lambda n: keywords(n, True), lambda n: keywords(n, False), 12),
        )
    ),
    Planted(
        "shard-after-shard",
        "loading",
        lambda n: from_a_bucket(n, True),
        lambda n: from_a_bucket(n, False),
        100,
        __name__,
        clock=time.perf_counter,
    ),
]
