"""Training that waits for its data."""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.profile.planted.program import Planted, seeded, weights


def text_records() -> list[str]:
    rng = np.random.default_rng(0)
    return [json.dumps({"label": int(rng.integers(4)), "features": rng.normal(size=200).tolist()}) for _ in range(256)]


class ParsedEachTime(Dataset):
    """Records of text that are parsed whenever they are taken."""

    def __init__(self) -> None:
        self.records = text_records()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        record = json.loads(self.records[index])  # fault: parsed-each-time
        return torch.tensor(record["features"]), record["label"]


class ParsedOnce(ParsedEachTime):
    """The same, parsed in advance."""

    def __init__(self) -> None:
        parsed = [json.loads(record) for record in text_records()]
        self.features = torch.tensor([record["features"] for record in parsed])
        self.labels = [record["label"] for record in parsed]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.features[index], self.labels[index]


def epochs(steps: int, dataset_class: type[ParsedEachTime]) -> list[Tensor]:
    random = seeded()
    loader = DataLoader(dataset_class(), batch_size=32, shuffle=True, generator=random)
    model = nn.Sequential(nn.Linear(200, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(steps):
        for features, labels in loader:  # fault: parsed-each-time
            loss = F.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


class RemoteStore:
    """Blocks of samples, each of which takes six milliseconds to arrive, as from a disk across a network."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.blocks = []
        for _ in range(16):
            file = io.BytesIO()
            np.save(file, rng.normal(size=(64, 32)).astype(np.float32))
            self.blocks.append(file.getvalue())

    def read(self, number: int) -> np.ndarray:
        time.sleep(0.006)  # fault: remote-reads
        return np.load(io.BytesIO(self.blocks[number % 16]))


def blocks_in_turn(store: RemoteStore, count: int) -> Iterator[Tensor]:
    for number in range(count):
        yield torch.from_numpy(store.read(number))  # fault: remote-reads


def blocks_in_advance(store: RemoteStore, count: int) -> Iterator[Tensor]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        for block in pool.map(store.read, range(count)):
            yield torch.from_numpy(block)


def sparse_coding(steps: int, blocks_of: Callable[[RemoteStore, int], Iterator[Tensor]]) -> Tensor:
    """Dictionary learning without autograd, on blocks from a store."""
    dictionary = torch.randn(32, 48, generator=seeded())
    for block in blocks_of(RemoteStore(), steps):  # fault: remote-reads
        code = torch.zeros(64, 48)
        for _ in range(10):
            code = F.softshrink(code - 0.005 * (code @ dictionary.T - block) @ dictionary, 0.01)
        error = code @ dictionary.T - block
        dictionary = F.normalize(dictionary - 0.01 * error.T @ code, dim=0)
    return dictionary


class Shards(IterableDataset):
    """Batches from shards whose opening takes time; each worker takes its part of them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for shard in range(first, self.count, stride):
            time.sleep(0.02)
            yield torch.randn(64, 16, generator=torch.Generator().manual_seed(shard))


def sharded(steps: int, workers: int) -> list[Tensor]:
    """Principal components by Oja's rule, from shards that worker processes read."""
    loader = DataLoader(Shards(steps), batch_size=None, num_workers=workers, multiprocessing_context="fork")
    components, mean = torch.eye(16, 4), torch.zeros(16)
    for batch in loader:  # fault: too-few-workers
        mean = 0.9 * mean + 0.1 * batch.mean(0)
        centred = batch - mean
        projected = centred @ components
        components = torch.linalg.qr(components + 0.01 * centred.T @ projected).Q
    return [components, mean]


@cache
def photographs() -> Path:
    """A folder of images as uncompressed arrays."""
    folder = Path(tempfile.mkdtemp(prefix="photographs-"))
    rng = np.random.default_rng(0)
    for number in range(48):
        np.save(folder / f"{number}.npy", rng.integers(0, 256, (3, 64, 64), dtype=np.uint8))
    return folder


def augmented(pixels: np.ndarray) -> Tensor:
    image = torch.from_numpy(pixels).double() / 255
    for _ in range(3):
        image = F.avg_pool2d(image, 3, stride=1, padding=1)  # fault: blurred-each-time
    return image[:, ::4, ::4].float().flatten()


class Photographs(Dataset):
    def __init__(self, prepared: bool) -> None:
        paths = sorted(photographs().glob("*.npy"))
        self.paths: list[Any] = paths
        self.images = [augmented(np.load(path)) for path in paths] if prepared else []

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        if self.images:
            return self.images[index]
        return augmented(np.load(self.paths[index]))  # fault: blurred-each-time


def contrastive(steps: int, prepared: bool) -> list[Tensor]:
    """SimCLR-like training, where the deterministic part of the augmentation is done for each batch."""
    random = seeded()
    loader = DataLoader(Photographs(prepared), batch_size=16, shuffle=True, generator=random, drop_last=True)
    encoder, projector = nn.Linear(768, 64), nn.Linear(64, 32)
    optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=1e-3, fused=True)
    for _ in range(steps):
        for batch in loader:  # fault: blurred-each-time
            noise = torch.randn(2, *batch.shape, generator=random) * 0.1
            one, two = (F.normalize(projector(F.relu(encoder(batch + part))), dim=1) for part in noise)
            loss = F.cross_entropy(one @ two.T / 0.1, torch.arange(len(batch)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [*weights(encoder), *weights(projector)]


PROGRAMS = [
    Planted(
        "parsed-each-time",
        "loading",
        lambda n: epochs(n, ParsedEachTime),
        lambda n: epochs(n, ParsedOnce),
        20,
        __name__,
    ),
    Planted(
        "remote-reads",
        "loading",
        lambda n: sparse_coding(n, blocks_in_turn),
        lambda n: sparse_coding(n, blocks_in_advance),
        80,
        __name__,
        clock=time.perf_counter,
    ),
    Planted(
        "too-few-workers",
        "loading",
        lambda n: sharded(n, 1),
        lambda n: sharded(n, 2),
        60,
        __name__,
        clock=time.perf_counter,
    ),
    Planted(
        "blurred-each-time", "loading", lambda n: contrastive(n, False), lambda n: contrastive(n, True), 15, __name__
    ),
]
