"""Tensors that are converted to another layout or data type and back, again and again."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class ConvNet(nn.Module):
    """Convolutions like one memory format, and somebody thought that what follows likes the other."""

    def __init__(self, converts: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, stride=2), nn.Linear(32, 5)
        self.layers = nn.ModuleList([nn.Conv2d(32, 32, 1) for _ in range(4)])
        self.converts = converts

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            if self.converts:
                x = x.contiguous()  # fault: formats-to-and-fro
                x = F.avg_pool2d(x, 3, stride=1, padding=1)
                x = x.contiguous(memory_format=torch.channels_last)  # fault: formats-to-and-fro
            else:
                x = F.avg_pool2d(x, 3, stride=1, padding=1)
            x = F.relu(layer(x))
        return self.head(x.mean((2, 3)))


def images(steps: int, converts: bool) -> list[Tensor]:
    random = seeded()
    model = ConvNet(converts).to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    x, y = torch.randn(16, 3, 64, 64, generator=random), torch.randint(0, 5, (16,), generator=random)
    x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def stable_gate(x: Tensor) -> Tensor:
    wide = x.double()  # fault: double-and-float
    gate = torch.sigmoid(wide)  # fault: double-and-float
    return (wide * gate).float()  # fault: double-and-float


def gated_network(steps: int, careful: bool) -> list[Tensor]:
    """A gated network, one of whose authors did not trust single precision."""
    random = seeded()
    activation = stable_gate if careful else F.silu
    layers = nn.ModuleList([nn.Linear(96, 96) for _ in range(4)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, fused=True)
    x, y = torch.randn(512, 96, generator=random), torch.randn(512, 96, generator=random)
    for _ in range(steps):
        h = x
        for layer in layers:
            h = activation(layer(h))
        loss = F.mse_loss(h, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(layers)


class Spectrogram(nn.Module):
    """Mixes features over time and then over bands, each in its own layout."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.over_time = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.over_bands = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        for layer, bands in zip(self.over_time, self.over_bands, strict=True):
            time = cast(nn.Linear, layer)
            if self.copies:
                x = x.transpose(1, 2).contiguous()  # fault: transposed-copies
                x = torch.cat([F.relu(time(x[..., :64])), x[..., 64:]], dim=2)
                x = x.transpose(1, 2).contiguous()  # fault: transposed-copies
            else:
                mixed = F.relu(torch.einsum("btc,st->bsc", x[:, :64], time.weight) + time.bias[:, None])
                x = torch.cat([mixed, x[:, 64:]], dim=1)
            x = x + F.relu(bands(x))
        return x.mean((1, 2))


@torch.no_grad()
def scoring(steps: int, copies: bool) -> list[Tensor]:
    """Inference over many recordings."""
    random = seeded()
    model = Spectrogram(copies).eval()
    scores = []
    for _ in range(steps):
        recordings = torch.randn(8, 512, 64, generator=random)
        scores.append(model(recordings))
    return scores


def half_precision_cache(keys: Tensor, cache: list[Tensor], low: bool) -> Tensor:
    cache.append(keys.bfloat16() if low else keys.bfloat16().float())
    if low:
        return torch.cat([entry.float() for entry in cache], dim=1)  # fault: cast-of-a-cache
    return torch.cat(cache, dim=1)


@torch.no_grad()
def decoding(steps: int, low: bool) -> list[Tensor]:
    """Attention over a cache that is kept in bfloat16 and cast back whole at every token."""
    random = seeded()
    project, outputs = nn.Linear(64, 128), []
    cache: list[Tensor] = []
    x = torch.randn(8, 1, 64, generator=random)
    for _ in range(steps):
        query, keys = project(x).split(64, dim=2)
        everything = half_precision_cache(keys, cache, low)
        attended = F.scaled_dot_product_attention(query, everything, everything)
        x = F.layer_norm(x + attended, (64,))
        outputs.append(x.mean())
    return outputs


PROGRAMS = [
    Planted("formats-to-and-fro", "layout", lambda n: images(n, True), lambda n: images(n, False), 20, __name__),
    Planted(
        "double-and-float", "layout", lambda n: gated_network(n, True), lambda n: gated_network(n, False), 80, __name__
    ),
    Planted("transposed-copies", "layout", lambda n: scoring(n, True), lambda n: scoring(n, False), 40, __name__),
    Planted("cast-of-a-cache", "layout", lambda n: decoding(n, True), lambda n: decoding(n, False), 400, __name__),
]
