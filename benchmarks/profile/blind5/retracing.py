"""Code that is traced or compiled again and again, or whose graph breaks."""

from __future__ import annotations

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Sentences(nn.Module):
    """Which of three moods a sentence has; words beyond its end count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(300, 48), nn.Parameter(torch.randn(40, 48) * 0.1)
        self.wide, self.narrow = nn.Linear(48, 192), nn.Linear(192, 48)
        self.weigh, self.mood = nn.Linear(48, 1), nn.Linear(48, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places[: words.size(1)]
        x = x + self.narrow(F.gelu(self.wide(x)))
        importance = self.weigh(x).squeeze(2).masked_fill(words == 0, -1e9)
        return self.mood((importance.softmax(1).unsqueeze(2) * x).sum(1))


def moods(steps: int, as_they_come: bool) -> list[Tensor]:
    """Batches are as long as their longest sentence; the twin pads all of them to forty words."""
    random = seeded()
    torch._dynamo.reset()
    model = Sentences()
    forward = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for number in range(steps):
        longest = 20 + 5 * (3 * number % 5)
        words, labels = torch.zeros(96, 40, dtype=torch.long), torch.randint(0, 3, (96,), generator=random)
        words[:, :longest] = torch.randint(1, 300, (96, longest), generator=random)
        scores = forward(words[:, :longest] if as_they_come else words)  # fault: sentences-as-long-as-they-come
        loss = F.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 160), nn.Linear(160, 160), nn.Linear(160, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        x = F.silu(self.second(x))
        return self.third(x).squeeze(1)


def cross_validation(steps: int, each_fold: bool) -> list[Tensor]:
    """A model for each of six folds; the twin compiles one, and gives it the first weights again for each fold."""
    random = seeded()
    torch._dynamo.reset()
    table, truth = torch.randn(6, 256, 32, generator=random), torch.randn(6, 256, generator=random)
    start = Regression()
    model = Regression()
    forward = torch.compile(model, backend="aot_eager")
    scores = []
    for fold in range(6):
        if each_fold:
            torch._dynamo.reset()  # fault: compiled-for-each-fold
            model = Regression()
            forward = torch.compile(model, backend="aot_eager")  # fault: compiled-for-each-fold
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
        x, y = (part[[other for other in range(6) if other != fold]].flatten(0, 1) for part in (table, truth))
        for _ in range(steps // 6 + 1):
            loss = F.mse_loss(forward(x), y)  # fault: compiled-for-each-fold
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scores.append(F.mse_loss(model(table[fold]), truth[fold]).detach())
    return [torch.stack(scores)]


class Annealing(nn.Module):
    """A codebook whose choices become harder with each call."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.calls = counts, 0
        self.register_buffer("calls_as_tensor", torch.zeros(()))
        self.calls_as_tensor: Tensor
        self.encode, self.codes, self.decode = nn.Linear(40, 64), nn.Parameter(torch.randn(96, 64)), nn.Linear(64, 40)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1  # fault: calls-counted-in-module
            sharpness = 1.0 + 0.001 * self.calls  # fault: calls-counted-in-module
        else:
            self.calls_as_tensor.add_(1)
            sharpness = 1.0 + 0.001 * self.calls_as_tensor
        chances = (self.encode(x) @ self.codes.T * (0.1 * sharpness)).softmax(1)
        return self.decode(chances @ self.codes)


def codebook(steps: int, counts: bool) -> list[Tensor]:
    random = seeded()
    torch._dynamo.reset()
    model = Annealing(counts)
    forward = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, fused=True)
    for _ in range(steps):
        x = torch.randn(320, 40, generator=random)
        loss = F.mse_loss(forward(x), x)  # fault: calls-counted-in-module
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Ragged(nn.Module):
    """Averages of the first few rows of each of some groups."""

    def __init__(self, as_numbers: bool) -> None:
        super().__init__()
        self.as_numbers = as_numbers
        self.inner, self.outer = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        if self.as_numbers:
            largest = int(sizes.max())  # fault: sizes-asked-in-compiled-code
            real = torch.arange(x.size(1)) < sizes.unsqueeze(1).clamp(max=largest)
        else:
            real = torch.arange(x.size(1)) < sizes.unsqueeze(1)
        mean = (x * real.unsqueeze(2)).sum(1) / sizes.unsqueeze(1)
        return torch.tanh(self.outer(mean))


def ragged(steps: int, as_numbers: bool) -> list[Tensor]:
    random = seeded()
    torch._dynamo.reset()
    forward = torch.compile(Ragged(as_numbers), backend="eager")
    answers = []
    with torch.no_grad():
        for _ in range(steps):
            total = torch.zeros(24)
            for _ in range(20):
                x = torch.randn(4, 6, 24, generator=random)
                sizes = torch.randint(1, 7, (4,), generator=random)
                total += forward(x, sizes).sum(0)
            answers.append(total)
    return [torch.stack(answers)]


PROGRAMS = [
    Planted(name, "retracing", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("sentences-as-long-as-they-come", lambda n: moods(n, True), lambda n: moods(n, False), 80),
        ("compiled-for-each-fold", lambda n: cross_validation(n, True), lambda n: cross_validation(n, False), 360),
        ("calls-counted-in-module", lambda n: codebook(n, True), lambda n: codebook(n, False), 500),
        ("sizes-asked-in-compiled-code", lambda n: ragged(n, True), lambda n: ragged(n, False), 300),
    )
]
