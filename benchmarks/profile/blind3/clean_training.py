"""Training without any of the nine faults."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.profile.planted.program import Clean, seeded, weights


class CausalLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query, self.shared, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norms[0](x)
        query = self.split(self.query(normal))
        key, value = self.split(self.shared(normal)).chunk(2, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normal = self.norms[1](x)
        opened = F.silu(self.gate(normal))
        return x + self.down(opened * self.up(normal))


class CausalModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList([CausalLayer(width, 4) for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def characters(steps: int) -> list[Tensor]:
    """A language model of characters, with a schedule and clipped gradients."""
    random = seeded()
    text = torch.randint(0, 90, (20_000,), generator=random)
    model = CausalModel(90, 128, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 65, (16, 1), generator=random)
        window = text[starts + torch.arange(65)]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return weights(model)


class Composer(nn.Module):
    """Two recurrent layers with states of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.lower, self.upper = nn.LSTM(64, 128, batch_first=True), nn.LSTM(128, 96, batch_first=True)
        self.head = nn.Linear(96, 128)

    def forward(self, notes: Tensor, lower: Tensor, cell: Tensor, upper: Tensor, top: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(notes)
        x, (lower, cell) = self.lower(x, (lower, cell))
        x, (upper, top) = self.upper(x, (upper, top))
        return self.head(x), lower, cell, upper, top


def melodies(steps: int) -> list[Tensor]:
    """Truncated back-propagation through time, with states that go on from window to window."""
    random = seeded()
    model = Composer()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    state = [torch.zeros(1, 24, width) for width in (128, 128, 96, 96)]
    losses = []
    for _ in range(steps):
        notes = torch.randint(0, 128, (24, 49), generator=random)
        scores, *state = model(notes[:, :-1], *(part.detach() for part in state))
        loss = F.cross_entropy(scores.flatten(0, 1), notes[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*weights(model), torch.tensor(losses)]


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)), inplace=True)
        hidden = self.norms[1](self.second(hidden))
        return F.relu(hidden + self.shortcut(x), inplace=True)


def digits(steps: int) -> list[Tensor]:
    """A residual network on small images, which lie in memory in batches."""
    random = seeded()
    images, labels = torch.randn(8, 24, 3, 32, 32, generator=random), torch.randint(0, 10, (8, 24), generator=random)
    stem, stages, head = nn.Conv2d(3, 24, 3, padding=1), nn.Sequential(Stage(24, 48), Stage(48, 96)), nn.Linear(96, 10)
    model = nn.ModuleList([stem, stages, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    for number in range(steps):
        x = F.relu(stem(images[number % 8]))
        pooled = F.adaptive_avg_pool2d(stages(x), 1).flatten(1)
        loss = F.cross_entropy(head(pooled), labels[number % 8], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Passing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.send, self.keep, self.mix = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = self.send(x).index_select(0, source)
        arrived = torch.zeros_like(x).index_add(0, target, messages)
        hidden = F.relu(arrived + self.keep(x))
        return self.mix(hidden)


def roads(steps: int) -> list[Tensor]:
    """Message passing on a grid of roads, in both directions."""
    random = seeded()
    nodes = torch.arange(900).view(30, 30)
    along, across = (nodes[:, :-1].flatten(), nodes[:, 1:].flatten()), (nodes[:-1].flatten(), nodes[1:].flatten())
    source = torch.cat([along[0], along[1], across[0], across[1]])
    target = torch.cat([along[1], along[0], across[1], across[0]])
    read, layers, head = nn.Linear(12, 96), nn.ModuleList([Passing(96) for _ in range(3)]), nn.Linear(96, 1)
    model = nn.ModuleList([read, layers, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        sensors = torch.randn(900, 12, generator=random)
        x = read(sensors)
        for layer in layers:
            x = x + layer(x, source, target)
        loss = F.smooth_l1_loss(head(x).squeeze(1), sensors.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Tower(nn.Module):
    """Bags of categories and dense features of a user or of an item."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(600, 32, mode="sum")
        self.dense, self.join, self.out = nn.Linear(64, 256), nn.Linear(288, 256), nn.Linear(256, 64)

    def forward(self, categories: Tensor, features: Tensor) -> Tensor:
        hidden = F.relu(self.dense(features))
        joined = torch.cat([hidden, self.bags(categories)], 1)
        hidden = F.relu(self.join(joined))
        return F.normalize(self.out(hidden), dim=1)


def retrieval(steps: int) -> list[Tensor]:
    """Two towers; the other items of the batch are the wrong answers."""
    random = seeded()
    users, items = Tower(), Tower()
    optimizer = torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=0.02, fused=True)
    for _ in range(steps):
        categories = torch.randint(0, 600, (2, 512, 5), generator=random)
        features = torch.randn(2, 512, 64, generator=random)
        wanted = users(categories[0], features[0])
        offered = items(categories[1], features[1])
        loss = F.cross_entropy(wanted @ offered.T * 10, torch.arange(512))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*weights(users), *weights(items)]


class Wide(nn.Module):
    """A perceptron whose layers have lines of their own."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.head(x)


def distillation(steps: int) -> list[Tensor]:
    """A small network learns from a larger one, which stays as it is."""
    random = seeded()
    teacher, student = Wide(128, 320, 50).eval().requires_grad_(False), Wide(128, 192, 50)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        x = torch.randn(512, 128, generator=random)
        with torch.no_grad():
            wanted = F.log_softmax(teacher(x), dim=1)
        loss = F.kl_div(F.log_softmax(student(x), dim=1), wanted, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(student)


class Waves(Dataset):
    """Whole batches of sounds that are made as they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        return torch.randn(64, 1, 1024, generator=random), torch.randint(0, 6, (64,), generator=random)


class SoundClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 64, 16, stride=4), nn.Conv1d(64, 96, 8, stride=2)
        self.third, self.head = nn.Conv1d(96, 128, 4, stride=2), nn.Linear(128, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.head(x.mean(2))


def sounds(steps: int) -> list[Tensor]:
    """A worker process makes the batches while the model learns from those before."""
    seeded()
    model = SoundClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    loader = DataLoader(Waves(steps), None, num_workers=1, prefetch_factor=4, multiprocessing_context="fork")
    for x, labels in loader:
        for part, wanted in [*zip(x.split(16), labels.split(16), strict=True)] * 2:
            loss = F.cross_entropy(model(part), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


@contextmanager
def process_group(rank: int, size: int, store: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def replicated(steps: int) -> list[Tensor]:
    """DistributedDataParallel, whose gradients are averaged once for four small batches."""
    random = seeded()
    module = Wide(192, 256, 8)
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, Path(folder, "store")):
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(steps):
            for micro in range(4):
                x, y = torch.randn(256, 192, generator=random), torch.randint(0, 8, (256,), generator=random)
                with model.no_sync() if micro < 3 else nullcontext():
                    loss = F.cross_entropy(model(x), y) / 4
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(module)


def other_replica(store: Path, count: int, rounds: int) -> None:
    with process_group(1, 2, store):
        for _ in range(rounds):
            dist.all_reduce(torch.zeros(count))
    os._exit(0)


def local_steps(steps: int) -> list[Tensor]:
    """Two ranks average their parameters after every ten steps; those of the other are zero."""
    random = seeded()
    model = Wide(128, 256, 8)
    count, rounds = sum(parameter.numel() for parameter in model.parameters()), steps // 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        other = multiprocessing.get_context("fork").Process(
            target=other_replica, args=(store, count, rounds), daemon=True
        )
        other.start()
        try:
            with process_group(0, 2, store):
                for number in range(1, steps + 1):
                    x, y = torch.randn(512, 128, generator=random), torch.randint(0, 8, (512,), generator=random)
                    loss = F.cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if number % 10 == 0:
                        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
                        dist.all_reduce(flat)
                        nn.utils.vector_to_parameters(flat / 2, model.parameters())
        finally:
            other.join(20)
            other.kill()
    return weights(model)


@cache
def compiled_model() -> tuple[nn.Module, list[Callable[[Tensor], Tensor]], dict[str, Tensor]]:
    """A model, its parts, which are compiled one by one, and its first weights."""
    seeded()
    model = nn.ModuleList([Wide(96, 192, 192), Wide(192, 192, 192), Wide(192, 192, 12)])
    first = {name: value.clone() for name, value in model.state_dict().items()}
    return model, [torch.compile(part, backend="eager", dynamic=True) for part in model], first


def compiled(steps: int) -> list[Tensor]:
    """Batches of many sizes, which the compiled code was made for."""
    random = seeded()
    model, (lower, middle, upper), first = compiled_model()
    model.load_state_dict(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for number in range(steps):
        size = 200 + 16 * (number % 9)
        x, y = torch.randn(size, 96, generator=random), torch.randint(0, 12, (size,), generator=random)
        hidden = lower(x)
        hidden = middle(hidden)
        loss = F.cross_entropy(upper(hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (characters, 12),
        (melodies, 40),
        (digits, 18),
        (roads, 60),
        (retrieval, 45),
        (distillation, 60),
        (sounds, 25),
        (replicated, 40),
        (local_steps, 120),
        (compiled, 100),
    )
]
