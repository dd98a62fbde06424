"""Inference, evaluation, generative models and learning by trial, without any of the nine faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.profile.planted.program import Clean, seeded, weights


class Photographs(nn.Module):
    """A backbone of separable convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 4, stride=4)
        self.spatial = nn.ModuleList([nn.Conv2d(48, 48, 3, padding=1, groups=48) for _ in range(3)])
        self.up = nn.ModuleList([nn.Conv2d(48, 96, 1) for _ in range(3)])
        self.down = nn.ModuleList([nn.Conv2d(96, 48, 1) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for spatial, up, down in zip(self.spatial, self.up, self.down, strict=True):
            hidden = spatial(x)
            hidden = F.relu(up(hidden))
            x = x + down(hidden)
        return x.mean((2, 3))


def channels_last(steps: int) -> list[Tensor]:
    """Features of images, in one layout from the first to the last."""
    random = seeded()
    model = Photographs().eval().to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    images = torch.randn(2, 16, 3, 112, 112, generator=random)
    batches = [batch.contiguous(memory_format=torch.channels_last) for batch in images]
    with torch.inference_mode():
        return [model(batches[number % 2]) for number in range(steps)]


class CachedLayer(nn.Module):
    """Attention of one token at a time to those before, whose keys and values are kept."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: Tensor, length: int) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).view(len(x), 3, self.heads, 1, -1)
        cache[:, :, :, length] = qkv[:, 1:, :, 0]
        known = cache[:, :, :, : length + 1]
        attended = F.scaled_dot_product_attention(qkv[:, 0], known[:, 0], known[:, 1])
        x = x + self.out(attended.flatten(1))
        hidden = F.gelu(self.up(self.norms[1](x)))
        return x + self.down(hidden)


def generation(steps: int) -> list[Tensor]:
    """Continues texts, with a cache that is as long as they can get."""
    random = seeded()
    embed, head = nn.Embedding(400, 320), nn.Linear(320, 400, bias=False)
    layers = nn.ModuleList([CachedLayer(320, 5) for _ in range(3)])
    caches = torch.zeros(3, 32, 2, 5, 128, 64)
    token, texts = torch.randint(0, 400, (32,), generator=random), []
    with torch.inference_mode():
        for number in range(steps):
            x = embed(token)
            for layer, cached in zip(layers, caches, strict=True):
                x = layer(x, cached, number % 128)
            token = head(x).argmax(1)
            texts.append(token)
    return [torch.stack(texts)]


class Reviewer(nn.Module):
    """Convolutions of two widths over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3000, 64)
        self.short, self.long = nn.Conv1d(64, 96, 4), nn.Conv1d(64, 96, 5)
        self.hidden, self.head = nn.Linear(192, 64), nn.Linear(64, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).mT
        return self.classify(self.short_features(x), self.long_features(x))

    def short_features(self, x: Tensor) -> Tensor:
        return self.short(x).amax(2)

    def long_features(self, x: Tensor) -> Tensor:
        return self.long(x).amax(2)

    def classify(self, short: Tensor, long: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(torch.cat([short, long], 1))))


def evaluation(steps: int) -> list[Tensor]:
    """Accuracy on a test set, which is kept in memory."""
    random = seeded()
    words, opinions = torch.randint(0, 3000, (640, 80), generator=random), torch.randint(0, 2, (640,), generator=random)
    model = Reviewer().eval()
    accuracies = []
    with torch.inference_mode():
        for _ in range(steps):
            right = torch.zeros((), dtype=torch.long)
            for batch, wanted in zip(words.split(64), opinions.split(64), strict=True):
                right += (model(batch).argmax(1) == wanted).sum()
            accuracies.append(right.item() / len(words))
    return [torch.tensor(accuracies)]


class Member(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        return self.third(x)


def ensemble(steps: int) -> list[Tensor]:
    """Eight models at once, by vmap; how far they are apart is how sure they are."""
    random = seeded()
    members: list[nn.Module] = [Member() for _ in range(8)]
    parameters, buffers = stack_module_state(members)

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(members[0], (parameters, buffers), (x,))

    spreads = []
    with torch.no_grad():
        for _ in range(steps):
            x = torch.randn(512, 128, generator=random)
            spreads.append(vmap(one, in_dims=(0, 0, None))(parameters, buffers, x).std(0).mean(0))
    return spreads


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(24, 256), nn.Linear(256, 256), nn.Linear(256, 256)
        self.policy, self.value = nn.Linear(256, 6), nn.Linear(256, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        x = torch.tanh(self.third(x))
        return F.log_softmax(self.policy(x), dim=1), self.value(x).squeeze(1)


class Pendulums:
    """Many linear systems at once, which an action pushes."""

    def __init__(self, count: int, random: torch.Generator) -> None:
        self.random = random
        self.motion, self.pushes = torch.randn(24, 24, generator=random) / 6, torch.randn(6, 24, generator=random)
        self.state = torch.randn(count, 24, generator=random)

    def step(self, actions: Tensor) -> Tensor:
        self.state = torch.addmm(self.pushes.index_select(0, actions), self.state, self.motion)
        return -self.state.square().mean(1)


def policy(steps: int) -> list[Tensor]:
    """Clipped policy gradients: sixteen moves in 128 worlds, then two passes over them."""
    random = seeded()
    worlds, actor = Pendulums(128, random), Actor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, fused=True)
    for _ in range(steps):
        states, actions, chances, rewards = [], [], [], []
        with torch.no_grad():
            for _ in range(16):
                chance, _ = actor(worlds.state)
                action = torch.multinomial(chance.exp(), 1, generator=random).squeeze(1)
                states.append(worlds.state)
                actions.append(action)
                chances.append(chance.gather(1, action.unsqueeze(1)))
                rewards.append(worlds.step(action))
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0).flatten()
        seen, done, before = torch.cat(states), torch.cat(actions).unsqueeze(1), torch.cat(chances)
        for _ in range(2):
            chance, value = actor(seen)
            advantage = (returns - value.detach()).unsqueeze(1)
            ratio = (chance.gather(1, done) - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = F.mse_loss(value, returns) - gain
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(actor)


class Pixels(nn.Module):
    """Makes images twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 5, padding=2), nn.Conv2d(32, 32, 3, padding=1)
        self.third, self.last = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return F.pixel_shuffle(self.last(x), 2)


def enlarging(steps: int) -> list[Tensor]:
    random = seeded()
    model = Pixels().eval()
    with torch.inference_mode():
        return [model(torch.rand(2, 3, 96, 96, generator=random)).mean((1, 2, 3)) for _ in range(steps)]


class Translator(nn.Module):
    """Reads in two directions, and attends to what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(800, 96), nn.Embedding(800, 96)
        self.forth, self.back = nn.GRU(96, 96, batch_first=True), nn.GRU(96, 96, batch_first=True)
        self.decode, self.head = nn.GRU(96, 192, batch_first=True), nn.Linear(384, 800)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        words = self.source(source)
        forth, state = self.forth(words)
        back, other = self.back(words.flip(1))
        read = torch.cat([forth, back.flip(1)], 2)
        written, _ = self.decode(self.target(target), torch.cat([state, other], 2))
        attended = F.scaled_dot_product_attention(written, read, read)
        return self.head(torch.cat([written, attended], 2))


def translation(steps: int) -> list[Tensor]:
    random = seeded()
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        source, target = torch.randint(0, 800, (2, 24, 25), generator=random)
        scores = model(source, target[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def transfer(steps: int) -> list[Tensor]:
    """A new head for features that stay; a sampler gives whole batches."""
    random = seeded()
    images = TensorDataset(torch.randn(192, 3, 48, 48, generator=random), torch.arange(192) % 7)
    backbone, head, last = Photographs().eval().requires_grad_(False), nn.Linear(144, 128), nn.Linear(128, 7)
    trained = nn.ModuleList([head, last])
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9, fused=True)
    sampler = RandomSampler(images, replacement=True, num_samples=48 * steps, generator=random)
    for batch, labels in DataLoader(images, None, sampler=BatchSampler(sampler, 48, True)):
        with torch.no_grad():
            features = torch.cat([backbone(batch), backbone(batch.flip(3)), backbone(batch.flip(2))], 1)
        loss = F.cross_entropy(last(F.relu(head(features))), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(trained)


class ImageCoder(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.code, self.spread = nn.Linear(784, 256), nn.Linear(256, 32), nn.Linear(256, 32)
        self.widen, self.inner, self.up = nn.Linear(32, 256), nn.Linear(256, 256), nn.Linear(256, 784)

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.down(images))
        mean, log_variance = self.code(hidden), self.spread(hidden)
        hidden = F.relu(self.widen(torch.addcmul(mean, noise, (log_variance / 2).exp())))
        hidden = F.relu(self.inner(hidden))
        return self.up(hidden), mean, log_variance


def variational(steps: int) -> list[Tensor]:
    random = seeded()
    model = ImageCoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        images = torch.rand(256, 784, generator=random)
        pixels, mean, log_variance = model(images, torch.randn(256, 32, generator=random))
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
        loss = F.binary_cross_entropy_with_logits(pixels, images, reduction="sum") + divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


@cache
def compiled_reviewer() -> tuple[Reviewer, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A model, and compiled parts of it that take texts of any length."""
    seeded()
    model = Reviewer().eval()
    short, long = (
        torch.compile(part, backend="eager", dynamic=True) for part in (model.short_features, model.long_features)
    )
    return model, short, long


def opinions(steps: int) -> list[Tensor]:
    """Requests of different lengths to a model that was compiled for them."""
    random = seeded()
    model, short_features, long_features = compiled_reviewer()
    found = []
    with torch.no_grad():
        for number in range(steps):
            x = model.embed(torch.randint(0, 3000, (48, 60 + number % 20), generator=random)).mT
            short = short_features(x)
            long = long_features(x)
            found.append(model.classify(short, long))
    return found


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (channels_last, 50),
        (generation, 100),
        (evaluation, 15),
        (ensemble, 80),
        (policy, 12),
        (enlarging, 70),
        (translation, 12),
        (transfer, 30),
        (opinions, 160),
        (variational, 50),
    )
]
