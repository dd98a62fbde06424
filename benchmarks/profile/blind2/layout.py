"""Layouts and data types that are converted back and forth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class NextBlock(nn.Module):
    """A block of ConvNeXt, which copies its activations into either layout or only looks at them otherwise."""

    def __init__(self, channels: int, copies: bool) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        if self.copies:
            y = y.contiguous()  # fault: copied-channels-last
        y = self.down(F.gelu(self.up(self.norm(y)))).permute(0, 3, 1, 2)
        if self.copies:
            y = y.contiguous()  # fault: copied-channels-last
        return x + y


@torch.no_grad()
def tagging_photos(steps: int, copies: bool) -> list[Tensor]:
    random = seeded()
    stem, blocks = nn.Conv2d(3, 32, 4, stride=4), nn.Sequential(*[NextBlock(32, copies) for _ in range(3)])
    nn.ModuleList([stem, blocks]).to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    head = nn.Linear(32, 20)
    tags = []
    for _ in range(steps):
        photos = torch.rand(4, 3, 128, 128, generator=random)
        features = stem(photos if copies else photos.contiguous(memory_format=torch.channels_last))
        if copies:
            features = features.contiguous()
        tags.append(head(blocks(features).mean(dim=(2, 3))).sigmoid())
    return tags


class CrossAttention(nn.Module):
    """Attends to a memory; in double precision, if the weights shall be exact."""

    def __init__(self, width: int, heads: int, double: bool) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.heads, self.exact = nn.Linear(width, width), heads, double

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.memory(memory).view(batch, -1, self.heads, 2 * width // self.heads).transpose(1, 2).chunk(2, dim=-1)
        scores = q @ k.transpose(2, 3) / (width // self.heads) ** 0.5
        if self.exact:
            scores = scores.double()  # fault: softmax-in-double
            weight = scores.softmax(dim=-1)
            weight = weight.float()  # fault: softmax-in-double
        else:
            weight = scores.softmax(dim=-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(batch, length, width))


def captioning(steps: int, double: bool) -> list[Tensor]:
    """Words attend to the patches of a picture."""
    random = seeded()
    layers = nn.ModuleList([CrossAttention(64, 8, double) for _ in range(2)])
    head = nn.Linear(64, 50)
    parameters = [*layers.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for _ in range(steps):
        words = torch.randn(4, 48, 64, generator=random)
        patches = torch.randn(4, 196, 64, generator=random)
        targets = torch.randint(0, 50, (4, 48), generator=random)
        for layer in layers:
            words = layer(words, patches)
        loss = F.cross_entropy(head(words).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


class TimeLayer(nn.Module):
    """A dilated causal convolution over time, whose callers have time first or last."""

    def __init__(self, channels: int, dilation: int, time_last: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(channels, channels, 3, dilation=dilation, groups=channels)
        self.padding, self.time_last = 2 * dilation, time_last

    def forward(self, x: Tensor) -> Tensor:
        if not self.time_last:
            x = x.transpose(1, 2).contiguous()  # fault: time-first-each-layer
        x = x + F.relu(self.convolution(F.pad(x, (self.padding, 0))))
        if not self.time_last:
            x = x.transpose(1, 2).contiguous()  # fault: time-first-each-layer
        return x


def causal_network(steps: int, time_last: bool) -> list[Tensor]:
    """A temporal convolutional network that predicts the next values of a set of sensors."""
    random = seeded()
    layers = nn.Sequential(*[TimeLayer(48, 2**number, time_last) for number in range(4)])
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        readings = torch.randn(16, 257, 48, generator=random)
        x, target = readings[:, :-1], readings[:, 1:]
        if time_last:
            x, target = x.transpose(1, 2), target.transpose(1, 2)
        loss = F.mse_loss(layers(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(layers)


PROGRAMS = [
    Planted(
        "copied-channels-last",
        "layout",
        lambda steps: tagging_photos(steps, True),
        lambda steps: tagging_photos(steps, False),
        steps=40,
        module=__name__,
    ),
    Planted(
        "softmax-in-double",
        "layout",
        lambda steps: captioning(steps, True),
        lambda steps: captioning(steps, False),
        steps=25,
        module=__name__,
    ),
    Planted(
        "time-first-each-layer",
        "layout",
        lambda steps: causal_network(steps, False),
        lambda steps: causal_network(steps, True),
        steps=25,
        module=__name__,
    ),
]
