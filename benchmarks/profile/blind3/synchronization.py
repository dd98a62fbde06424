"""Values that are taken out of tensors one at a time, in a loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights

BLANK = 0


def collapse_one_by_one(best: Tensor) -> list[list[int]]:
    """Words from the best label of each frame: repeated labels count once, blanks not at all."""
    words = []
    for row in best:
        word, last = [], BLANK
        for label in row:
            current = label.item()  # fault: label-by-label
            if current not in (BLANK, last):
                word.append(int(current))
            last = int(current)
        words.append(word)
    return words


def collapse_lists(best: Tensor) -> list[list[int]]:
    words = []
    for row in best.tolist():
        previous = [BLANK, *row[:-1]]
        words.append([label for label, last in zip(row, previous, strict=True) if label not in (BLANK, last)])
    return words


class Acoustics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(40, 128, 5, padding=2), nn.Conv1d(128, 128, 5, padding=2)
        self.head = nn.Conv1d(128, 32, 1)

    def forward(self, speech: Tensor) -> Tensor:
        x = F.relu(self.first(speech))
        x = F.relu(self.second(x))
        return self.head(x)


def transcription(steps: int, collapse: Callable[[Tensor], list[list[int]]]) -> Tensor:
    random = seeded()
    model = Acoustics().eval()
    counts = torch.zeros(32)
    with torch.inference_mode():
        for _ in range(steps):
            labels = model(torch.randn(8, 40, 200, generator=random)).argmax(1)
            for word in collapse(labels):
                counts += torch.bincount(torch.tensor(word), minlength=32)
    return counts


class HardExamples:
    """Remembers how large the loss of each example was, and draws those that were hard more often."""

    def __init__(self, count: int) -> None:
        self.losses = torch.ones(count)

    def draw(self, size: int, random: torch.Generator) -> Tensor:
        return torch.multinomial(self.losses, size, generator=random)

    def remember(self, which: Tensor, losses: Tensor) -> None:
        for place, example in enumerate(which):
            before = self.losses[example].item()  # fault: remembered-one-by-one
            self.losses[example] = 0.9 * before + 0.1 * losses[place].item()  # fault: remembered-one-by-one


class HardExamplesAtOnce(HardExamples):
    def remember(self, which: Tensor, losses: Tensor) -> None:
        self.losses[which] = self.losses[which].lerp(losses, 0.1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(128, 1024), nn.Linear(1024, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.third(x)


def mining(steps: int, kind: type[HardExamples]) -> list[Tensor]:
    random = seeded()
    x, y = torch.randn(2000, 128, generator=random), torch.randint(0, 10, (2000,), generator=random)
    examples, model = kind(len(x)), Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    for _ in range(steps):
        which = examples.draw(96, random)
        losses = F.cross_entropy(model(x[which]), y[which], reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        examples.remember(which, losses.detach())
    return [*weights(model), examples.losses]


class SumTree:
    """Priorities of transitions; each node has the sum of the two below it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nodes = torch.zeros(2 * capacity, dtype=torch.float64)

    def set(self, which: Tensor, priorities: Tensor) -> None:
        self.nodes[which + self.capacity] = priorities.double()
        self._add_up()

    def _add_up(self) -> None:
        first = self.capacity // 2
        while first:
            self.nodes[first : 2 * first] = self.nodes[2 * first : 4 * first].view(-1, 2).sum(1)
            first //= 2

    def find(self, targets: Tensor) -> Tensor:
        """The transition at each of these places on the line of all priorities."""
        found = []
        for target in targets.tolist():
            node = 1
            while node < self.capacity:
                node *= 2
                left = self.nodes[node].item()  # fault: descends-by-item
                if target >= left:
                    target -= left
                    node += 1
            found.append(node - self.capacity)
        return torch.tensor(found)


class VectorSumTree(SumTree):
    def find(self, targets: Tensor) -> Tensor:
        nodes = torch.ones(len(targets), dtype=torch.long)
        for _ in range(self.capacity.bit_length() - 1):
            nodes = nodes * 2
            left = self.nodes[nodes]
            right = targets >= left
            targets, nodes = torch.where(right, targets - left, targets), nodes + right
        return nodes - self.capacity


def replay(steps: int, kind: type[SumTree]) -> list[Tensor]:
    """Value learning from transitions that are drawn by their error."""
    random = seeded()
    tree, model = kind(1024), Classifier()
    states, returns = torch.randn(1024, 128, generator=random), torch.randn(1024, 10, generator=random)
    tree.set(torch.arange(1024), torch.ones(1024))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        which = tree.find(torch.rand(64, generator=random, dtype=torch.float64) * tree.nodes[1])
        errors = F.smooth_l1_loss(model(states[which]), returns[which], reduction="none").mean(1)
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
        tree.set(which, errors.detach() + 0.5)
    return [tree.nodes.float()]


PROGRAMS = [
    Planted(name, "synchronization", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        (
            "label-by-label",
            lambda n: transcription(n, collapse_one_by_one),
            lambda n: transcription(n, collapse_lists),
            40,
        ),
        (
            "remembered-one-by-one",
            lambda n: mining(n, HardExamples),
            lambda n: mining(n, HardExamplesAtOnce),
            150,
        ),
        ("descends-by-item", lambda n: replay(n, SumTree), lambda n: replay(n, VectorSumTree), 150),
    )
]
