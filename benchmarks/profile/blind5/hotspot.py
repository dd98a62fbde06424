"""Most of the time goes into one line, which computes far more than is used of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Towers(nn.Module):
    """How well users and what they clicked on go together."""

    def __init__(self, all_pairs: bool) -> None:
        super().__init__()
        self.all_pairs = all_pairs
        self.users, self.items = nn.Embedding(800, 64), nn.Embedding(1200, 64)
        self.user_in, self.user_out = nn.Linear(64, 128), nn.Linear(128, 128)
        self.item_in, self.item_out = nn.Linear(64, 128), nn.Linear(128, 128)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user = F.relu(self.user_in(self.users(users)))
        user = self.user_out(user)
        item = F.relu(self.item_in(self.items(items)))
        item = self.item_out(item)
        if self.all_pairs:
            return (user @ item.T).diagonal()  # fault: diagonal-of-a-product
        return (user * item).sum(1)


def recommending(steps: int, all_pairs: bool) -> list[Tensor]:
    random = seeded()
    model = Towers(all_pairs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    running = torch.zeros(())
    for _ in range(steps):
        users = torch.randint(0, 800, (896,), generator=random)
        items = torch.randint(0, 1200, (896,), generator=random)
        clicked = (users % 7 == items % 7).float()
        loss = F.binary_cross_entropy_with_logits(model(users, items), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
    return [running / steps, *weights(model)]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(80, 256), nn.Linear(256, 256), nn.Linear(256, 80)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.third(x)


def second_moments(z: Tensor, sample_by_sample: bool) -> Tensor:
    z = z - z.mean(0)
    if sample_by_sample:
        return torch.einsum("ni,nj->nij", z, z).mean(0)  # fault: moments-of-each-sample
    return z.T @ z / len(z)


def decorrelating(steps: int, sample_by_sample: bool) -> list[Tensor]:
    """Two views are to agree, and the features of a view not to depend on each other (as in VICReg)."""
    random = seeded()
    encoder = Encoder()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.02, momentum=0.9, fused=True)
    off_diagonal = 1 - torch.eye(80)
    for _ in range(steps):
        x = torch.randn(192, 80, generator=random)
        one = encoder(x + 0.1 * torch.randn(192, 80, generator=random))
        other = encoder(x + 0.1 * torch.randn(192, 80, generator=random))
        covariances = second_moments(one, sample_by_sample)
        loss = F.mse_loss(one, other) + (covariances * off_diagonal).square().sum() / 80
        loss = loss + F.relu(1 - (one.var(0) + 1e-4).sqrt()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(encoder)


class FewShot(nn.Module):
    """Classes are told by the angle between a picture's vector and each class's prototype."""

    def __init__(self, by_broadcast: bool) -> None:
        super().__init__()
        self.by_broadcast = by_broadcast
        self.see, self.look = nn.Conv2d(1, 24, 5, stride=2), nn.Conv2d(24, 48, 3, stride=2)
        self.describe, self.prototypes = nn.Linear(48 * 25, 64), nn.Parameter(torch.randn(90, 64))

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.see(images))
        x = F.relu(self.look(x))
        x = self.describe(x.flatten(1))
        if self.by_broadcast:
            return F.cosine_similarity(x.unsqueeze(1), self.prototypes.unsqueeze(0), dim=2)  # fault: cosine-by-pairs
        return F.normalize(x, dim=1) @ F.normalize(self.prototypes, dim=1).T


def few_shot(steps: int, by_broadcast: bool) -> list[Tensor]:
    random = seeded()
    model = FewShot(by_broadcast)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    total, right = 0, torch.zeros((), dtype=torch.long)
    for _ in range(steps):
        images, labels = torch.rand(64, 1, 28, 28, generator=random), torch.randint(0, 90, (64,), generator=random)
        scores = model(images)
        loss = F.cross_entropy(10 * scores, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        right += (scores.detach().argmax(1) == labels).sum()
        total += len(labels)
    return [right / total, *weights(model)]


class Facts(nn.Module):
    """Is there a relation of this kind between two things? One matrix for each kind of relation."""

    def __init__(self, every_relation: bool) -> None:
        super().__init__()
        self.every_relation = every_relation
        self.things = nn.Embedding(500, 32)
        self.head, self.tail = nn.Linear(32, 40), nn.Linear(32, 40)
        self.relations = nn.Parameter(torch.randn(28, 40, 40) * 0.1)

    def forward(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        head = torch.tanh(self.head(self.things(heads)))
        tail = torch.tanh(self.tail(self.things(tails)))
        if self.every_relation:
            scores = torch.einsum("bi,rij,bj->br", head, self.relations, tail)  # fault: every-relation-scored
            return scores.gather(1, relations.unsqueeze(1)).squeeze(1)
        chosen = self.relations.index_select(0, relations)
        turned = torch.bmm(head.unsqueeze(1), chosen).squeeze(1)
        return (turned * tail).sum(1)


def completing_facts(steps: int, every_relation: bool) -> list[Tensor]:
    random = seeded()
    model = Facts(every_relation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        heads, tails, wrong = torch.randint(0, 500, (3, 128), generator=random)
        relations = torch.randint(0, 28, (128,), generator=random)
        better, worse = model(heads, relations, tails), model(heads, relations, wrong)
        loss = F.margin_ranking_loss(better, worse, torch.ones(128), margin=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "hotspot", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("diagonal-of-a-product", lambda n: recommending(n, True), lambda n: recommending(n, False), 110),
        ("moments-of-each-sample", lambda n: decorrelating(n, True), lambda n: decorrelating(n, False), 120),
        ("cosine-by-pairs", lambda n: few_shot(n, True), lambda n: few_shot(n, False), 90),
        ("every-relation-scored", lambda n: completing_facts(n, True), lambda n: completing_facts(n, False), 220),
    )
]
