"""Loops that take a value out of a tensor each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded


def distance_of_tensors(reference: Tensor, heard: Tensor) -> int:
    """How many tokens must be changed, inserted or left out."""
    row = list(range(len(heard) + 1))
    for i, wanted in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j in range(1, len(row)):
            change = diagonal if heard[j - 1] == wanted else diagonal + 1  # fault: tokens-compared-as-tensors
            diagonal, row[j] = row[j], min(change, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def distance_of_lists(reference: Tensor, heard: Tensor) -> int:
    wanted, tokens = reference.tolist(), heard.tolist()
    row = list(range(len(tokens) + 1))
    for i, token in enumerate(wanted, 1):
        diagonal, row[0] = row[0], i
        for j in range(1, len(row)):
            change = diagonal if tokens[j - 1] == token else diagonal + 1
            diagonal, row[j] = row[j], min(change, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def dictation(steps: int, distance: Callable[[Tensor, Tensor], int]) -> list[Tensor]:
    """The rate of wrong tokens of a small recognizer."""
    random = seeded()
    model = nn.Sequential(nn.Conv1d(40, 128, 5, padding=2), nn.ReLU(), nn.Conv1d(128, 30, 1)).eval()
    errors = 0
    with torch.inference_mode():
        for _ in range(steps):
            scores = model(torch.randn(4, 40, 200, generator=random))
            heard = scores.argmax(1)[:, ::8]
            references = torch.randint(0, 30, (4, 20), generator=random)
            errors += sum(distance(reference, tokens) for reference, tokens in zip(references, heard, strict=True))
    return [torch.tensor(float(errors))]


def overlaps(boxes: Tensor) -> Tensor:
    """Intersection over union of all pairs of boxes."""
    low, high = torch.maximum(boxes[:, None, :2], boxes[None, :, :2]), torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return shared / (area[:, None] + area - shared)


def suppress_pairs(boxes: Tensor) -> list[int]:
    """Boxes, best first, that no better one covers."""
    shared = overlaps(boxes)
    kept: list[int] = []
    for box in range(len(boxes)):
        if all(shared[box, better] < 0.3 for better in kept):  # fault: pairs-of-boxes
            kept.append(box)
    return kept


def suppress_rows(boxes: Tensor) -> list[int]:
    covers = (overlaps(boxes) >= 0.3).tolist()
    kept: list[int] = []
    for box in range(len(boxes)):
        if not any(covers[box][better] for better in kept):
            kept.append(box)
    return kept


def faces(steps: int, suppress: Callable[[Tensor], list[int]]) -> list[Tensor]:
    random = seeded()
    model = nn.Sequential(nn.Conv2d(3, 24, 5, stride=2), nn.ReLU(), nn.Conv2d(24, 5, 3)).eval()
    counts = []
    with torch.no_grad():
        for _ in range(steps):
            found = model(torch.rand(1, 3, 96, 96, generator=random))[0].flatten(1)
            best = found[4].topk(80).indices
            corners, sizes = torch.rand(80, 2, generator=random) * 80, 20 + 5 * found[2:4, best].T.sigmoid()
            counts.append(len(suppress(torch.cat([corners, corners + sizes], 1))))
    return [torch.tensor(counts)]


class Returns:
    """What the episodes of many environments brought."""

    def __init__(self, environments: int) -> None:
        self.running = torch.zeros(environments)
        self.finished: list[float] = []

    def add(self, rewards: Tensor, done: Tensor) -> None:
        self.running += rewards
        for environment in range(len(done)):
            if done[environment]:  # fault: ended-or-not
                self.finished.append(float(self.running[environment]))
                self.running[environment] = 0


class ReturnsOfEnded(Returns):
    def add(self, rewards: Tensor, done: Tensor) -> None:
        self.running += rewards
        self.finished += self.running[done].tolist()
        self.running.masked_fill_(done, 0)


def simulation(steps: int, kind: type[Returns]) -> list[Tensor]:
    """A policy plays many simple games at once."""
    random = seeded()
    policy = nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8))
    returns, states = kind(128), torch.randn(128, 8, generator=random)
    with torch.no_grad():
        for _ in range(steps):
            states = 0.9 * states + 0.3 * policy(states) + 0.2 * torch.randn(128, 8, generator=random)
            done = torch.rand(128, generator=random) < 0.02
            returns.add(-states.square().mean(1), done)
            states[done] = 0
    return [torch.tensor(returns.finished)]


def words_by_token(batch: Tensor, vocabulary: Sequence[str]) -> list[str]:
    return [" ".join(vocabulary[int(token)] for token in text) for text in batch]  # fault: words-by-token


def words_by_list(batch: Tensor, vocabulary: Sequence[str]) -> list[str]:
    return [" ".join(vocabulary[token] for token in text) for text in batch.tolist()]


def captions(steps: int, to_words: Callable[[Tensor, Sequence[str]], list[str]]) -> list[Tensor]:
    """What a small model of captions would say next after each token, written down."""
    random = seeded()
    vocabulary = [f"w{number:03}" for number in range(200)]
    embed, mix, head = nn.Embedding(200, 64), nn.Linear(64, 64), nn.Linear(64, 200)
    length = 0
    with torch.no_grad():
        for _ in range(steps):
            tokens = torch.randint(0, 200, (32, 16), generator=random)
            hidden = torch.tanh(mix(embed(tokens)))
            said = to_words(head(hidden).argmax(2), vocabulary)
            length += sum(len(set(text.split())) for text in said)
    return [torch.tensor(float(length))]


PROGRAMS = [
    Planted(name, "synchronization", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        (
            "tokens-compared-as-tensors",
            lambda n: dictation(n, distance_of_tensors),
            lambda n: dictation(n, distance_of_lists),
            100,
        ),
        ("pairs-of-boxes", lambda n: faces(n, suppress_pairs), lambda n: faces(n, suppress_rows), 90),
        ("ended-or-not", lambda n: simulation(n, Returns), lambda n: simulation(n, ReturnsOfEnded), 1500),
        ("words-by-token", lambda n: captions(n, words_by_token), lambda n: captions(n, words_by_list), 500),
    )
]
