"""The cache of samples behind a store that is throttled: what an epoch waits, and what comes out after damage."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.rows import Bar, Measured
from shoestring.data.cache import Cached
from shoestring.data.loader import Loader

RATE = 20e6
"""Bytes a second that the store gives."""
SAMPLES, SIZE, BATCH = 600, 100_000, 20
STEP = 0.02
"""Seconds of a training step."""


class Store:
    """Samples of random bytes, sent at a rate that all who ask share."""

    fingerprint = "a throttled store"

    def __init__(self, rate: float | None) -> None:
        self.rate, self.free, self.lock = rate, 0.0, threading.Lock()

    def __len__(self) -> int:
        return SAMPLES

    def fetch(self, index: int) -> bytes:
        if self.rate is not None:
            with self.lock:
                self.free = max(self.free, time.monotonic()) + SIZE / self.rate
                until = self.free
            time.sleep(max(until - time.monotonic(), 0.0))
        return np.random.default_rng(index).bytes(SIZE)

    def decode(self, raw: bytes) -> dict[str, Any]:
        return {"inputs": torch.frombuffer(bytearray(raw), dtype=torch.uint8)}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.decode(self.fetch(index))


class Memory(Store):
    """The same, held as tensors."""

    def __init__(self) -> None:
        super().__init__(None)
        self.samples = [self.decode(self.fetch(index)) for index in range(SAMPLES)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def epochs(dataset: Any, count: int) -> list[float]:
    """Seconds of each epoch, in steps that take a while."""
    found, loader = [], Loader(dataset, batch=BATCH, seed=1)
    batches = iter(loader)
    for _ in range(count):
        began = time.perf_counter()
        for _ in range(SAMPLES // BATCH):
            next(batches)
            time.sleep(STEP)
        found.append(time.perf_counter() - began)
    return found


def measured(what: str) -> Measured:
    with TemporaryDirectory() as folder:
        cached = Cached(Store(RATE), memory=2 * SAMPLES * SIZE, disk=2 * SAMPLES * SIZE, folder=Path(folder))
        first, *later = epochs(cached, 4)
        cached.close()
        onward = Cached(Store(RATE), disk=2 * SAMPLES * SIZE, folder=Path(folder))
        from_disk = min(epochs(onward, 2))
        onward.close()
    least = SAMPLES * SIZE / RATE
    memory = min(epochs(Memory(), 3))
    note = (
        f"{SAMPLES * SIZE / 1e6:.0f} MB: first epoch {first:.2f} s, {least:.2f} s of sending; later {min(later):.2f} s"
    )
    note += f", from disk {from_disk:.2f} s; from memory {memory:.2f} s"
    return Measured(first / least if what == "first" else memory / min(later), note)


def damage() -> Measured:
    """Of 200 changes to what is kept, on either level, those that came out."""
    logging.getLogger("shoestring").setLevel(logging.ERROR)
    wrong = 0
    chance = np.random.default_rng(0)
    store = Store(None)
    with TemporaryDirectory() as folder:
        for number in range(200):
            index = int(chance.integers(20))
            cached = Cached(store, memory=(number % 2) << 22, disk=1 << 22, folder=Path(folder))
            cached[index]
            if cached.shared is not None:
                begin = cached.shared.table + int(cached.shared.entries["offset"][index])
                at = begin + int(chance.integers(int(cached.shared.entries["length"][index])))
                cached.shared.memory[at] ^= 1 << int(chance.integers(8))
            if cached.shelf is not None:
                path = cached.shelf.path(index)
                raw = bytearray(path.read_bytes())
                raw[int(chance.integers(len(raw)))] ^= 1 << int(chance.integers(8))
                path.write_bytes(raw[: None if number % 3 else int(chance.integers(len(raw)))])
            wrong += not torch.equal(cached[index]["inputs"], store[index]["inputs"])
            cached.close()
    return Measured(float(wrong), "single bits in memory and on disk, and files cut short")


def rows() -> list[Bar]:
    return [
        Bar(
            "optim.cache-first",
            "seconds of a first epoch over a store of 20 MB/s, over those of sending its bytes",
            "<=",
            1.05,
            measure=lambda _: measured("first"),
        ),
        Bar(
            "optim.cache-second",
            "rate of later epochs over a store of 20 MB/s, over that from memory",
            ">=",
            0.95,
            measure=lambda _: measured("second"),
        ),
        Bar(
            "optim.cache-damage",
            "damaged samples that came out, of 200",
            "<=",
            0.0,
            measure=lambda _: damage(),
            kind="exact",
        ),
    ]
