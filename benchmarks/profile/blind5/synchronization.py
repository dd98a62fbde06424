"""Loops that take a value out of a tensor each time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Reviews(nn.Module):
    """Stars of a review, from the average of what its words mean."""

    def __init__(self, asked: bool) -> None:
        super().__init__()
        self.asked = asked
        self.words, self.read = nn.Embedding(800, 64), nn.Linear(64, 128)
        self.think, self.stars = nn.Linear(128, 64), nn.Linear(64, 5)

    def pool(self, x: Tensor, lengths: Tensor) -> Tensor:
        if not self.asked:
            real = (torch.arange(x.size(1)) < lengths.unsqueeze(1)).to(x.dtype)
            return torch.bmm(real.unsqueeze(1), x).squeeze(1) / lengths.unsqueeze(1)
        pooled = []
        for sentence, length in zip(x.unbind(), lengths, strict=True):
            pooled.append(sentence[: length.item()].mean(0))  # fault: words-up-to-their-length
        return torch.stack(pooled)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        x = F.relu(self.read(self.words(words)))
        x = F.relu(self.think(x))
        return self.stars(self.pool(x, lengths))


def reviewing(steps: int, asked: bool) -> list[Tensor]:
    random = seeded()
    model = Reviews(asked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    for _ in range(steps):
        words = torch.randint(0, 800, (96, 12), generator=random)
        lengths, stars = torch.randint(3, 13, (96,), generator=random), torch.randint(0, 5, (96,), generator=random)
        loss = F.cross_entropy(model(words, lengths), stars)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inside = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.classify = nn.Conv2d(16, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.down(x))
        x = F.relu(self.inside(x))
        return self.classify(x)


def street_scenes(steps: int, class_by_class: bool) -> list[Tensor]:
    """Training of a segmentation, with how well it overlaps for each class, over all batches."""
    random = seeded()
    model = Segmenter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    inside, around = torch.zeros(21, dtype=torch.long), torch.zeros(21, dtype=torch.long)
    overlap, joined = [0] * 21, [0] * 21
    for _ in range(steps):
        images, truth = torch.rand(4, 3, 40, 40, generator=random), torch.randint(0, 21, (4, 20, 20), generator=random)
        scores = model(images)
        loss = F.cross_entropy(scores, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        guess = scores.detach().argmax(1)
        if class_by_class:
            for label in range(21):
                guessed, real = guess == label, truth == label
                overlap[label] += (guessed & real).sum().item()  # fault: overlap-of-each-class
                joined[label] += (guessed | real).sum().item()  # fault: overlap-of-each-class
        else:
            table = torch.bincount((truth * 21 + guess).flatten(), minlength=441).view(21, 21)
            right = table.diagonal()
            inside += right
            around += table.sum(0) + table.sum(1) - right
    if class_by_class:
        return [torch.tensor(overlap), torch.tensor(joined), *weights(model)]
    return [inside, around, *weights(model)]


class Values(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see, self.think, self.value = nn.Linear(8, 128), nn.Linear(128, 128), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.see(x))
        x = F.relu(self.think(x))
        return self.value(x)


def surprising_first(steps: int, noted_in_turn: bool) -> list[Tensor]:
    """Deep Q-learning that remembers the better what it guessed worse (prioritized experience replay)."""
    random = seeded()
    online, target = Values(), Values()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.SGD(online.parameters(), lr=0.01, fused=True)
    states, after = torch.randn(2, 3000, 8, generator=random)
    actions, rewards = torch.randint(0, 4, (3000,), generator=random), torch.randn(3000, generator=random)
    priorities = torch.ones(3000)
    for _ in range(steps):
        picked = torch.multinomial(priorities, 128, generator=random)
        with torch.no_grad():
            wanted = rewards[picked] + 0.9 * target(after[picked]).amax(1)
        values = online(states[picked]).gather(1, actions[picked].unsqueeze(1)).squeeze(1)
        errors = wanted - values
        loss = errors.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if noted_in_turn:
            for memory, error in zip(picked.tolist(), errors.detach(), strict=True):
                priorities[memory] = abs(error.item()) + 0.01  # fault: errors-noted-in-turn
        else:
            priorities[picked] = errors.detach().abs() + 0.01
    return [priorities, *weights(online)]


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(60, 256), nn.Linear(256, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        x = F.gelu(self.second(x))
        return F.normalize(self.third(x), dim=1)


def nearest(vector: Tensor, gallery: Tensor) -> int:
    """Number of the vector of a gallery that is nearest."""
    distances = (gallery - vector).square().sum(1)
    best, best_number = distances[0], 0
    for number, distance in enumerate(distances):
        if distance < best:  # fault: nearest-by-comparing
            best, best_number = distance, number
    return best_number


def recognized(steps: int, compared: bool) -> list[Tensor]:
    """Faces are told from each other by a triplet loss, and after each batch a few are looked up."""
    random = seeded()
    model = Embedder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    numbers = []
    for _ in range(steps):
        faces = torch.randn(64, 60, generator=random)
        others = faces + 0.3 * torch.randn(64, 60, generator=random)
        anchor, positive = model(faces), model(others)
        loss = F.triplet_margin_loss(anchor, positive, positive.roll(1, 0), margin=0.2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gallery, asked = anchor.detach(), positive.detach()[:6]
        if compared:
            numbers.append(torch.tensor([nearest(vector, gallery) for vector in asked]))
        else:
            numbers.append((gallery.unsqueeze(0) - asked.unsqueeze(1)).square().sum(2).argmin(1))
    return [torch.stack(numbers), *weights(model)]


PROGRAMS = [
    Planted(name, "synchronization", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("words-up-to-their-length", lambda n: reviewing(n, True), lambda n: reviewing(n, False), 220),
        ("overlap-of-each-class", lambda n: street_scenes(n, True), lambda n: street_scenes(n, False), 350),
        ("errors-noted-in-turn", lambda n: surprising_first(n, True), lambda n: surprising_first(n, False), 650),
        ("nearest-by-comparing", lambda n: recognized(n, True), lambda n: recognized(n, False), 330),
    )
]
