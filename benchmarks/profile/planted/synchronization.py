"""Values taken out of tensors one at a time, in a loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def count_right(logits: Tensor, labels: Tensor) -> int:
    right = 0
    for row in range(len(labels)):
        if logits[row].argmax().item() == labels[row].item():  # fault: accuracy-by-row
            right += 1
    return right


def count_right_at_once(logits: Tensor, labels: Tensor) -> int:
    return int((logits.argmax(1) == labels).sum())


def classification(steps: int, by_row: bool) -> list[Tensor]:
    random = seeded()
    count = count_right if by_row else count_right_at_once
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    x, labels = torch.randn(128, 20, generator=random), torch.randint(0, 5, (128,), generator=random)
    right = []
    for _ in range(steps):
        logits = model(x)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append(count(logits, labels))
    return [*weights(model), torch.tensor(right)]


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(200, 48), nn.Linear(48, 48), nn.Linear(48, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.table(tokens)
        hidden = torch.tanh(self.mix(embedded))
        return self.head(hidden)


def greedy_decode(model: Bigrams, start: Tensor, length: int) -> list[list[int]]:
    sequences: list[list[int]] = [[token] for token in start.tolist()]
    state = start
    for _ in range(length):
        state = model(state).argmax(-1)
        for number in range(len(sequences)):
            token = int(state[number])  # fault: token-by-token
            if sequences[number][-1] != 0:
                sequences[number].append(token)
    return sequences


def greedy_decode_at_once(model: Bigrams, start: Tensor, length: int) -> list[list[int]]:
    states = [start]
    for _ in range(length):
        logits = model(states[-1])
        states.append(logits.argmax(-1))
    sequences = torch.stack(states, 1).tolist()
    return [tokens[: tokens.index(0) + 1] if 0 in tokens else tokens for tokens in sequences]


@torch.no_grad()
def generation(steps: int, by_token: bool) -> Tensor:
    """Greedy decoding of a bigram network until the end token."""
    random = seeded()
    decode = greedy_decode if by_token else greedy_decode_at_once
    model = Bigrams()
    counts = []
    for start in torch.randint(1, 200, (steps, 64), generator=random):
        counts.append([sum(tokens) for tokens in decode(model, start, 20)])
    return torch.tensor(counts)


class RangeObserver:
    """Follows the range of activations, for quantization."""

    def __init__(self) -> None:
        self.low, self.high = 0.0, 0.0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for channel in output.detach().unbind(-1):
            self.low = min(self.low, channel.min().item())  # fault: observer-item
            self.high = max(self.high, channel.max().item())  # fault: observer-item

    def range(self) -> list[Tensor]:
        return [torch.tensor(self.low), torch.tensor(self.high)]


class TensorRangeObserver:
    """The same, which leaves its numbers in tensors."""

    def __init__(self) -> None:
        self.extremes = torch.zeros(2)

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        low, high = torch.aminmax(output.detach())
        self.extremes = torch.stack([torch.minimum(self.extremes[0], low), torch.maximum(self.extremes[1], high)])

    def range(self) -> list[Tensor]:
        return [*self.extremes]


@torch.no_grad()
def calibration(steps: int, observer_class: type[RangeObserver] | type[TensorRangeObserver]) -> list[Tensor]:
    random = seeded()
    first, second = nn.Linear(64, 64), nn.Linear(64, 32)
    observers = [observer_class(), observer_class()]
    for layer, observer in zip((first, second), observers, strict=True):
        layer.register_forward_hook(observer)
    samples = torch.randn(8, 256, 64, generator=random)
    for step in range(steps):
        x = samples[step % 8] * (1 + 1 / (step + 1))
        hidden = F.gelu(first(x))
        second(hidden)
    return [value for observer in observers for value in observer.range()]


def physics(steps: int, adaptive_by_item: bool) -> Tensor:
    """Particles in a potential; the step size of each particle follows its own force."""
    random = seeded()
    position, velocity = torch.randn(150, 3, generator=random), torch.zeros(150, 3)
    for _ in range(steps):
        force = -position - 0.3 * position.pow(3)
        strength = force.norm(dim=1)
        if adaptive_by_item:
            sizes = torch.empty(150)
            for particle in range(150):
                sizes[particle] = 0.01 / max(1.0, float(strength[particle]))  # fault: step-size-by-particle
        else:
            sizes = 0.01 / strength.clamp(min=1.0)
        velocity = velocity + sizes[:, None] * force
        position = position + sizes[:, None] * velocity
    return position


PROGRAMS = [
    Planted(
        "accuracy-by-row",
        "synchronization",
        lambda n: classification(n, True),
        lambda n: classification(n, False),
        300,
        __name__,
    ),
    Planted(
        "token-by-token",
        "synchronization",
        lambda n: generation(n, True),
        lambda n: generation(n, False),
        150,
        __name__,
    ),
    Planted(
        "observer-item",
        "synchronization",
        lambda n: calibration(n, RangeObserver),
        lambda n: calibration(n, TensorRangeObserver),
        400,
        __name__,
    ),
    Planted(
        "step-size-by-particle",
        "synchronization",
        lambda n: physics(n, True),
        lambda n: physics(n, False),
        500,
        __name__,
    ),
]
