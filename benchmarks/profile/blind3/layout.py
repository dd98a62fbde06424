"""Tensors that are converted in layout or data type, and soon converted back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class ChannelNorm(nn.Module):
    """Layer normalization over the channels of images."""

    def __init__(self, channels: int, moves: bool) -> None:
        super().__init__()
        self.norm, self.moves = nn.LayerNorm(channels), moves

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            x = x.permute(0, 2, 3, 1).contiguous()  # fault: norm-moves-channels
            x = self.norm(x)
            return x.permute(0, 3, 1, 2).contiguous()  # fault: norm-moves-channels
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvBlock(nn.Module):
    """A block of ConvNeXt, with convolutions of one pixel in place of linear layers."""

    def __init__(self, channels: int, moves: bool) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = ChannelNorm(channels, moves)
        self.expand, self.contract = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.depthwise(x))
        hidden = F.gelu(self.expand(hidden))
        return x + self.contract(hidden)


def features(steps: int, moves: bool) -> list[Tensor]:
    """A backbone computes features of images; its weights lie as the images do."""
    random = seeded()
    layout = torch.contiguous_format if moves else torch.channels_last
    model = nn.Sequential(nn.Conv2d(3, 48, 4, stride=4), *[ConvBlock(48, moves) for _ in range(3)])
    model = model.eval().to(memory_format=layout)  # pyrefly: ignore[no-matching-overload]
    found = []
    with torch.inference_mode():
        for _ in range(steps):
            images = torch.randn(8, 3, 128, 128, generator=random).to(memory_format=layout)
            found.append(model(images).mean((2, 3)))
    return found


class FeatureNorm(nn.BatchNorm1d):
    """Batch normalization of features that come last, over all frames."""

    def __init__(self, width: int, turns: bool) -> None:
        super().__init__(width)
        self.turns = turns

    def forward(self, input: Tensor) -> Tensor:
        if self.turns:
            by_feature = input.transpose(1, 2).contiguous()  # fault: norm-turns-frames
            normal = super().forward(by_feature)
            return normal.transpose(1, 2).contiguous()  # fault: norm-turns-frames
        return super().forward(input.flatten(0, 1)).view_as(input)


class FrameBlock(nn.Module):
    def __init__(self, width: int, turns: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = FeatureNorm(width, turns), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(self.norm(x)))
        return x + self.down(hidden)


def frames(steps: int, turns: bool) -> list[Tensor]:
    """Learns gestures from positions of joints, frame by frame."""
    random = seeded()
    read, head = nn.Linear(30, 64), nn.Linear(64, 10)
    model = nn.Sequential(read, *[FrameBlock(64, turns) for _ in range(4)])
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05, fused=True)
    for _ in range(steps):
        joints, labels = torch.randn(32, 120, 30, generator=random), torch.randint(0, 10, (32,), generator=random)
        loss = F.cross_entropy(head(model(joints).mean(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*weights(model), *weights(head)]


Augmentation = Callable[[Tensor], Tensor]


def in_float(augmentation: Augmentation) -> Augmentation:
    """Augmentations get floats, and what is stored are bytes."""

    def apply(images: Tensor) -> Tensor:
        values = images.float()  # fault: bytes-to-floats-to-bytes
        values = augmentation(values)
        return values.to(torch.uint8)  # fault: bytes-to-floats-to-bytes

    return apply


def invert(images: Tensor) -> Tensor:
    return 255 - images


def mirror(images: Tensor) -> Tensor:
    return images.flip(-1)


def shift(images: Tensor) -> Tensor:
    return images.roll((3, -5), (-2, -1))


def framed(images: Tensor) -> Tensor:
    return F.pad(images[..., 4:-4, 4:-4], (4, 4, 4, 4))


class Histogram(nn.Module):
    """Classifies pictures by small patches of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 32, 8, stride=8), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.patches(x)).mean((2, 3)))


def augmented(steps: int, wrap: Callable[[Augmentation], Augmentation]) -> list[Tensor]:
    random = seeded()
    pictures = torch.randint(0, 256, (64, 3, 64, 64), generator=random, dtype=torch.uint8)
    labels = torch.randint(0, 10, (64,), generator=random)
    pipeline: Sequence[Augmentation] = [wrap(each) for each in (mirror, invert, shift, framed)]
    model = Histogram()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for number in range(steps):
        batch = pictures[number % 2 * 32 :][:32]
        for augmentation in pipeline:
            batch = augmentation(batch)
        loss = F.cross_entropy(model(batch / 255), labels[number % 2 * 32 :][:32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Stream(nn.Module):
    """Blocks that add to a residual stream, which is kept in double precision between them."""

    def __init__(self, doubles: bool) -> None:
        super().__init__()
        self.doubles = doubles
        self.norms = nn.ModuleList([nn.LayerNorm(128) for _ in range(6)])
        self.downs = nn.ModuleList([nn.Linear(128, 32) for _ in range(6)])
        self.ups = nn.ModuleList([nn.Linear(32, 128) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, down, up in zip(self.norms, self.downs, self.ups, strict=True):
            hidden = F.relu(down(norm(x)))
            hidden = up(hidden)
            x = self.add(x, hidden)
        return x

    def add(self, stream: Tensor, change: Tensor) -> Tensor:
        if self.doubles:
            return (stream.double() + change.double()).float()  # fault: residuals-in-double
        return stream + change


def streaming(steps: int, doubles: bool) -> list[Tensor]:
    random = seeded()
    model = Stream(doubles)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(steps):
        x = torch.randn(1024, 128, generator=random)
        loss = F.mse_loss(model(x), x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "layout", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("norm-moves-channels", lambda n: features(n, True), lambda n: features(n, False), 30),
        ("norm-turns-frames", lambda n: frames(n, True), lambda n: frames(n, False), 25),
        (
            "bytes-to-floats-to-bytes",
            lambda n: augmented(n, in_float),
            lambda n: augmented(n, lambda augmentation: augmentation),
            150,
        ),
        ("residuals-in-double", lambda n: streaming(n, True), lambda n: streaming(n, False), 40),
    )
]
