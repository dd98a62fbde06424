"""Chains of small operators that one operator replaces."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class HardSwish(nn.Module):
    """The activation of MobileNetV3, as its paper writes it."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            gate = x + 3.0  # fault: hard-swish-as-published
            gate = gate.clamp(0.0, 6.0)  # fault: hard-swish-as-published
            return x * gate / 6.0  # fault: hard-swish-as-published
        return F.hardswish(x)


class Bottleneck(nn.Module):
    def __init__(self, width: int, by_hand: bool) -> None:
        super().__init__()
        self.expand, self.act = nn.Conv2d(width, 3 * width, 1), HardSwish(by_hand)
        self.spread = nn.Conv2d(3 * width, 3 * width, 3, padding=1, groups=3 * width)
        self.project = nn.Conv2d(3 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.expand(x))
        inner = self.act(self.spread(inner))
        return x + self.project(inner)


class Mobile(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([Bottleneck(32, by_hand) for _ in range(3)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def on_a_phone(steps: int, by_hand: bool) -> list[Tensor]:
    random = seeded()
    model = Mobile(by_hand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)
    for _ in range(steps):
        images, labels = torch.rand(16, 3, 32, 32, generator=random), torch.randint(0, 10, (16,), generator=random)
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class SelfAttention(nn.Module):
    """Attention of a small GPT; a position sees those before it."""

    def __init__(self, width: int, heads: int, length: int, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length) == 0)
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.project(x).chunk(3, 2))
        if self.by_hand:
            hidden = self.mask[:, :, :length, :length]
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # fault: attention-of-a-small-gpt
            att = att.masked_fill(hidden, float("-inf"))  # fault: attention-of-a-small-gpt
            att = F.softmax(att, dim=-1)  # fault: attention-of-a-small-gpt
            y = att @ v  # fault: attention-of-a-small-gpt
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Writer(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(96, 64), nn.Embedding(192, 64)
        self.before, self.attend = nn.LayerNorm(64), SelfAttention(64, 4, 192, by_hand)
        self.between, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.decode = nn.Linear(64, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        x = x + self.attend(self.before(x))
        x = x + self.narrow(F.gelu(self.wide(self.between(x))))
        return self.decode(x)


def writing(steps: int, by_hand: bool) -> list[Tensor]:
    random = seeded()
    text = torch.randint(0, 96, (20000,), generator=random)
    model = Writer(by_hand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    losses = []
    for number in range(steps):
        starts = torch.randint(0, len(text) - 193, (8,), generator=random)
        batch = torch.stack([text[start : start + 193] for start in starts.tolist()])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if number % 20 == 19:
            losses.append(loss.detach())
    return [*losses, *weights(model)]


class Normalized(nn.Module):
    """A convolution whose outputs have mean zero and variance one over a batch."""

    def __init__(self, inputs: int, outputs: int, stride: int, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.convolve = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.gamma, self.beta = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolve(x)
        if not self.by_hand:
            return F.batch_norm(x, None, None, self.gamma, self.beta, training=True, eps=1e-5)
        mean = x.mean((0, 2, 3), keepdim=True)  # fault: batch-norm-from-the-book
        variance = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)  # fault: batch-norm-from-the-book
        x = (x - mean) / torch.sqrt(variance + 1e-5)  # fault: batch-norm-from-the-book
        return self.gamma.view(1, -1, 1, 1) * x + self.beta.view(1, -1, 1, 1)  # fault: batch-norm-from-the-book


class FromTheBook(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.first, self.second = Normalized(3, 32, 1, by_hand), Normalized(32, 48, 2, by_hand)
        self.third, self.head = Normalized(48, 64, 2, by_hand), nn.Linear(64, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.head(x.mean((2, 3)))


def by_the_book(steps: int, by_hand: bool) -> list[Tensor]:
    random = seeded()
    model = FromTheBook(by_hand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, fused=True)
    for _ in range(steps):
        images, labels = torch.rand(24, 3, 24, 24, generator=random), torch.randint(0, 20, (24,), generator=random)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class NextItem(nn.Module):
    """What somebody looks at next in a shop, from what they looked at before."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.items, self.recent = nn.Embedding(1500, 64), nn.Linear(5 * 64, 192)
        self.taste, self.offers = nn.Linear(192, 64), nn.Linear(64, 1500)

    def forward(self, history: Tensor) -> Tensor:
        x = F.relu(self.recent(self.items(history).flatten(1)))
        scores = self.offers(F.relu(self.taste(x)))
        if self.by_hand:
            scores = scores - scores.max(1, keepdim=True).values  # fault: log-chances-by-formula
            total = torch.exp(scores).sum(1, keepdim=True)  # fault: log-chances-by-formula
            return scores - torch.log(total)  # fault: log-chances-by-formula
        return F.log_softmax(scores, dim=1)


def next_item(steps: int, by_hand: bool) -> list[Tensor]:
    random = seeded()
    model = NextItem(by_hand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    for _ in range(steps):
        history = torch.randint(0, 1500, (256, 5), generator=random)
        bought = (history[:, 0] + torch.randint(0, 3, (256,), generator=random)) % 1500
        loss = F.nll_loss(model(history), bought)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "fusible", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("hard-swish-as-published", lambda n: on_a_phone(n, True), lambda n: on_a_phone(n, False), 40),
        ("attention-of-a-small-gpt", lambda n: writing(n, True), lambda n: writing(n, False), 60),
        ("batch-norm-from-the-book", lambda n: by_the_book(n, True), lambda n: by_the_book(n, False), 60),
        ("log-chances-by-formula", lambda n: next_item(n, True), lambda n: next_item(n, False), 160),
    )
]
