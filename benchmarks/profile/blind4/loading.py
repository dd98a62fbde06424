"""Training that waits for its data."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, default_collate

from benchmarks.profile.planted.program import Planted, seeded, weights

WORDS = re.compile(r"[a-z]+|[0-9]|[^a-z0-9\s]")


def reviews(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    words = [f"{chr(97 + number % 26)}{chr(97 + number // 26)}" for number in range(400)]
    return [" ".join(words[number] for number in rng.integers(0, 400, 160)) + ", 10!" for _ in range(count)]


def tokens_of(text: str) -> Tensor:
    numbers = [sum(ord(letter) * 31**place for place, letter in enumerate(word)) % 1000 for word in WORDS.findall(text)]
    return torch.tensor(numbers[:128])


class Reviews(Dataset):
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return tokens_of(self.texts[index]), index % 2  # fault: tokens-anew-each-epoch


class TokenizedReviews(Reviews):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(texts)
        self.tokens = [tokens_of(text) for text in texts]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.tokens[index], index % 2


class Sentiment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(1000, 64), nn.Conv1d(64, 96, 3)
        self.head = nn.Linear(96, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.words(tokens).mT
        return self.head(F.relu(self.read(vectors)).amax(2))


def sentiment(steps: int, kind: type[Reviews]) -> list[Tensor]:
    """Epochs over a small corpus."""
    random = seeded()
    model = Sentiment()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(kind(reviews(64)), batch_size=16, shuffle=True, generator=random)
    for _ in range(steps):
        for tokens, labels in loader:  # fault: tokens-anew-each-epoch
            loss = F.cross_entropy(model(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


def mel_filters(count: int, bins: int) -> Tensor:
    """Triangles over the bins of a spectrum, that are wider the higher they are: (filters, bins)."""
    edges = np.expm1(np.linspace(0, np.log1p(bins - 1), count + 2))
    filters = np.zeros((count, bins), np.float32)
    for number in range(count):
        low, middle, high = edges[number : number + 3]
        for place in range(int(low), min(int(high) + 1, bins)):
            rise, fall = (place - low) / (middle - low), (high - place) / (high - middle)
            filters[number, place] = max(0.0, min(rise, fall))
    return torch.from_numpy(filters)


class Commands(Dataset):
    """Spoken commands as log-mel spectra."""

    def __init__(self, count: int) -> None:
        self.waves = torch.randn(64, 4000, generator=torch.Generator().manual_seed(1))
        self.count, self.window = count, torch.hann_window(256)

    def __len__(self) -> int:
        return self.count

    def filters(self) -> Tensor:
        return mel_filters(40, 129)  # fault: filters-for-each-clip

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        wave = self.waves[index % 64]
        spectrum = torch.stft(wave, 256, 128, window=self.window, return_complex=True).abs()
        return (self.filters() @ spectrum + 1e-6).log(), index % 8


class CommandsWithFilters(Commands):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.made = mel_filters(40, 129)

    def filters(self) -> Tensor:
        return self.made


def commands(steps: int, kind: type[Commands]) -> list[Tensor]:
    seeded()
    model = nn.Sequential(nn.Conv1d(40, 64, 3), nn.ReLU(), nn.Conv1d(64, 64, 3), nn.ReLU(), nn.Flatten())
    head = nn.Linear(64 * 28, 8)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, fused=True)
    for spectra, labels in DataLoader(kind(steps * 16), batch_size=16):  # fault: filters-for-each-clip
        loss = F.cross_entropy(head(model(spectra)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(head)


class History(Protocol):
    def __contains__(self, item: object, /) -> bool: ...


class Listened(Dataset):
    """Songs a person listened to, each with one that he did not."""

    def __init__(self, histories: Sequence[Sequence[int]], as_sets: bool) -> None:
        self.pairs = [(user, song) for user, songs in enumerate(histories) for song in songs[:20]]
        self.heard: list[History] = [set(songs) if as_sets else list(songs) for songs in histories]
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return len(self.pairs)

    def unheard(self, user: int) -> int:
        heard = self.heard[user]
        while True:
            song = int(self.rng.integers(0, 8000))
            if song not in heard:  # fault: history-searched
                return song

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        user, song = self.pairs[index]
        return user, song, self.unheard(user)


def songs(steps: int, as_sets: bool) -> list[Tensor]:
    """Vectors of people and songs, from what they listened to."""
    random = seeded()
    rng = np.random.default_rng(0)
    histories = [rng.choice(8000, 3000, replace=False).tolist() for _ in range(40)]
    people, tracks, mix = nn.Embedding(40, 64), nn.Embedding(8000, 64, sparse=True), nn.Linear(64, 64)
    dense = torch.optim.SGD([*people.parameters(), *mix.parameters()], lr=0.1, fused=True)
    sparse = torch.optim.SGD(tracks.parameters(), lr=0.1)
    data = Listened(histories, as_sets)
    sampler = RandomSampler(data, replacement=True, num_samples=steps * 64, generator=random)
    for user, liked, other in DataLoader(data, 64, sampler=sampler):  # fault: history-searched
        taste = mix(people(user))
        loss = -F.logsigmoid((taste * (tracks(liked) - tracks(other))).sum(1)).mean()
        dense.zero_grad()
        sparse.zero_grad()
        loss.backward()
        dense.step()
        sparse.step()
    return [*weights(people), *weights(mix)]


class Forecasts(IterableDataset):
    """Weather over regions, in pieces that a service sends each after a while."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in range(self.pieces):
            time.sleep(0.02)  # fault: pieces-asked-in-turn
            random = torch.Generator().manual_seed(piece)
            yield from zip(torch.randn(64, 96, generator=random), torch.randn(64, 8, generator=random), strict=True)


def weather(steps: int, workers: int) -> list[Tensor]:
    seeded()
    model = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 384), nn.GELU(), nn.Linear(384, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    context = "fork" if workers else None
    loader = DataLoader(
        Forecasts(steps), 64, num_workers=workers, multiprocessing_context=context, collate_fn=default_collate
    )
    for maps, later in loader:  # fault: pieces-asked-in-turn
        for _ in range(10):
            loss = F.mse_loss(model(maps), later)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(
        "tokens-anew-each-epoch",
        "loading",
        lambda n: sentiment(n, Reviews),
        lambda n: sentiment(n, TokenizedReviews),
        15,
        __name__,
    ),
    Planted(
        "filters-for-each-clip",
        "loading",
        lambda n: commands(n, Commands),
        lambda n: commands(n, CommandsWithFilters),
        50,
        __name__,
    ),
    Planted("history-searched", "loading", lambda n: songs(n, False), lambda n: songs(n, True), 60, __name__),
    Planted(
        "pieces-asked-in-turn",
        "loading",
        lambda n: weather(n, 0),
        lambda n: weather(n, 1),
        25,
        __name__,
        clock=time.perf_counter,
    ),
]
