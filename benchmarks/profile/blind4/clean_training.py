"""Training without any of the nine faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profile.planted.program import Clean, seeded, weights


class Perceptron(nn.Module):
    """Three hidden layers of one width."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.head(x)


def loss_once_an_epoch(steps: int) -> list[Tensor]:
    """Tables in memory; the loss is added up as a tensor, and told after each epoch."""
    random = seeded()
    data = TensorDataset(torch.randn(1024, 40, generator=random), torch.randint(0, 5, (1024,), generator=random))
    loader = DataLoader(data, batch_size=128, shuffle=True, generator=random)
    model = Perceptron(40, 320, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    history = []
    for _ in range(steps):
        total = torch.zeros(())
        for x, labels in loader:
            loss = F.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        history.append(total.item() / len(loader))
    return [torch.tensor(history), *weights(model)]


def slow_scan(number: int) -> tuple[Tensor, Tensor]:
    """A scan from a store that answers slowly."""
    time.sleep(0.004)
    random = torch.Generator().manual_seed(number)
    return torch.randn(256, 64, generator=random), torch.randn(256, 1, generator=random)


def fetched_ahead(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Scans in order, the next four of which are under way while one is used."""
    with ThreadPoolExecutor(4) as pool:
        coming: list[Future[tuple[Tensor, Tensor]]] = [
            pool.submit(slow_scan, number) for number in range(min(4, count))
        ]
        for number in range(count):
            scan = coming.pop(0).result()
            if number + 4 < count:
                coming.append(pool.submit(slow_scan, number + 4))
            yield scan


def slow_store(steps: int) -> list[Tensor]:
    """The store is slow, and yet nothing waits for it."""
    seeded()
    model = Perceptron(64, 384, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    for x, y in fetched_ahead(steps):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.judge = nn.Linear(32, 192), nn.Linear(192, 192), nn.Linear(192, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.softplus(self.first(x))
        x = F.softplus(self.second(x))
        return self.judge(x)


def penalized(steps: int) -> list[Tensor]:
    """A Wasserstein critic whose gradient is held near one: two backward passes, the first part of the loss."""
    random = seeded()
    critic = Critic()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9), fused=True)
    for _ in range(steps):
        real, fake, mixing = torch.randn(3, 128, 32, generator=random)
        between = torch.lerp(real, fake, mixing[:, :1].sigmoid()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(critic)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see, self.think = nn.Linear(16, 128), nn.Linear(128, 128)
        self.act, self.value = nn.Linear(128, 6), nn.Linear(128, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.tanh(self.see(states))
        thought = torch.tanh(self.think(seen))
        return self.act(thought).log_softmax(1), self.value(thought).squeeze(1)


def advantage(steps: int) -> list[Tensor]:
    """Advantage actor-critic; returns are added up from lists that are taken once a rollout."""
    random = seeded()
    model = ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=True)
    for _ in range(steps):
        states, actions = torch.randn(512, 16, generator=random), torch.randint(0, 6, (512, 1), generator=random)
        rewards, ended = states.sum(1).tolist(), (torch.rand(512, generator=random) < 0.02).tolist()
        returns, after = [0.0] * 512, 0.0
        for time_ in reversed(range(512)):
            after = rewards[time_] + 0.98 * after * (not ended[time_])
            returns[time_] = after
        wanted = torch.tensor(returns)
        chances, values = model(states)
        gain = (chances.gather(1, actions).squeeze(1) * (wanted - values.detach())).mean()
        loss = F.smooth_l1_loss(values, wanted) - gain
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Basket(nn.Module):
    """What somebody buys next, from what is in the basket."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(3000, 96, mode="mean", sparse=True)
        self.mix, self.hide, self.offers = nn.Linear(96, 384), nn.Linear(384, 96), nn.Linear(96, 500)

    def forward(self, items: Tensor) -> Tensor:
        taste = F.relu(self.mix(self.items(items)))
        taste = F.relu(self.hide(taste))
        return self.offers(taste)


def baskets(steps: int) -> list[Tensor]:
    random = seeded()
    model = Basket()
    sparse = torch.optim.SparseAdam(model.items.parameters(), lr=1e-2)
    dense = torch.optim.AdamW(
        [*model.mix.parameters(), *model.hide.parameters(), *model.offers.parameters()], fused=True
    )
    for _ in range(steps):
        items, bought = (
            torch.randint(0, 3000, (192, 4), generator=random),
            torch.randint(0, 500, (192,), generator=random),
        )
        loss = F.cross_entropy(model(items), bought)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
    return weights(model)


class Masked(nn.Module):
    """Guesses the hidden patches of a picture from those that are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(48, 96), nn.Parameter(torch.randn(64, 96) * 0.02)
        self.encode = nn.ModuleList([nn.Linear(96, 96) for _ in range(3)])
        self.mix = nn.Linear(16, 64)
        self.decode = nn.Linear(96, 48)

    def forward(self, patches: Tensor, seen: Tensor) -> Tensor:
        x = self.embed(patches.index_select(1, seen)) + self.place.index_select(0, seen)
        for layer in self.encode:
            x = x + F.gelu(layer(x))
        everywhere = self.mix(x.mT).mT + self.place
        return self.decode(F.gelu(everywhere))


def hidden_patches(steps: int) -> list[Tensor]:
    random = seeded()
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        images = torch.randn(32, 3, 32, 32, generator=random)
        patches = images.view(32, 3, 8, 4, 8, 4).permute(0, 2, 4, 1, 3, 5).reshape(32, 64, 48)
        seen = torch.randperm(64, generator=random)[:16]
        loss = F.mse_loss(model(patches, seen), patches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def accumulated(steps: int) -> list[Tensor]:
    """Four small batches to one update, because more does not fit."""
    random = seeded()
    model = Perceptron(96, 256, 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    for _ in range(steps):
        for _ in range(4):
            x = torch.randn(128, 96, generator=random)
            loss = F.l1_loss(model(x), x.sort(1).values) / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Conv2d(1, 16, 3, stride=2), nn.Conv2d(16, 32, 3, stride=2)
        self.project, self.last = nn.Linear(32 * 36, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.low(x))
        x = F.relu(self.high(x)).flatten(1)
        x = F.relu(self.project(x))
        return F.normalize(self.last(x), dim=1)


def two_views(steps: int) -> list[Tensor]:
    """Two views of a letter are to be near each other, and far from all others."""
    random = seeded()
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        letters = torch.rand(48, 1, 28, 28, generator=random)
        one = model(letters + 0.1 * torch.randn(letters.shape, generator=random))
        other = model(letters.roll((1, -1), (2, 3)))
        scores = one @ other.T / 0.1
        loss = F.cross_entropy(scores, torch.arange(48)) + F.cross_entropy(scores.T, torch.arange(48))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Demand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.narrow = nn.Conv1d(6, 128, 7, padding=3), nn.Conv1d(128, 32, 5, padding=2)
        self.remember, self.head = nn.GRU(32, 24, batch_first=True), nn.Linear(24, 24)

    def forward(self, series: Tensor) -> Tensor:
        x = F.relu(self.read(series))
        x = F.relu(self.narrow(x))
        states, _ = self.remember(x[:, :, ::24].mT)
        return self.head(states[:, -1])


def demand(steps: int) -> list[Tensor]:
    """A day of demand from the weeks before, with a rate that warms up."""
    random = seeded()
    model = Demand()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)
    for _ in range(steps):
        series, day = torch.randn(32, 6, 168, generator=random), torch.randn(32, 24, generator=random)
        loss = F.huber_loss(model(series), day)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return weights(model)


class Relations(nn.Module):
    """Attention of nodes to those that point at them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        query, key = self.query(x).index_select(0, target), self.key(x).index_select(0, source)
        score = (query * key).sum(1).div(8).clamp(-5, 5).exp()
        total = score.new_zeros(len(x)).index_add(0, target, score)
        value = self.value(x).index_select(0, source) * score.unsqueeze(1)
        mixed = torch.zeros_like(x).index_add(0, target, value) / (total.unsqueeze(1) + 1e-6)
        return x + F.relu(self.out(mixed))


def papers(steps: int) -> list[Tensor]:
    """Subjects of papers from what they cite."""
    random = seeded()
    read, first, second, head = nn.Linear(256, 64), Relations(64), Relations(64), nn.Linear(64, 7)
    parameters = [parameter for part in (read, first, second, head) for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    words, subjects = torch.randn(1000, 256, generator=random), torch.randint(0, 7, (1000,), generator=random)
    source, target = torch.randint(0, 1000, (2, 4000), generator=random)
    for _ in range(steps):
        x = first(F.relu(read(words)), source, target)
        loss = F.cross_entropy(head(second(x, source, target)), subjects)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (loss_once_an_epoch, 10),
        (slow_store, 60),
        (penalized, 80),
        (advantage, 80),
        (baskets, 80),
        (hidden_patches, 40),
        (accumulated, 30),
        (two_views, 60),
        (demand, 60),
        (papers, 40),
    )
]
