"""Classifiers of images: a small residual network for small images, and ResNet-50.

They take bytes. Scaling, random crops and mirroring happen in the forward pass, on the device and for a whole batch at
once; in evaluation the logits of an image and of its mirror image are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """Bytes (N, C, H, W) to logits (N, classes).

    Args:
        network: of normalised images.
        mean: of all bytes, each channel's. deviation: their standard deviation.
        shift: most pixels by which training moves an image; what is missing is the mean.
        mirror: whether training mirrors every second image, and evaluation looks at both.
    """

    def __init__(
        self, network: nn.Module, mean: tuple[float, ...], deviation: tuple[float, ...], shift: int, mirror: bool
    ) -> None:
        super().__init__()
        self.network, self.shift, self.mirror = network, shift, mirror
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = (images.to(self.mean.dtype) - self.mean) / self.deviation
        if self.training:
            x = moved(x, self.shift) if self.shift else x
            x = mirrored(x) if self.mirror else x
        x = x.contiguous(memory_format=torch.channels_last)
        if self.training or not self.mirror:
            return self.network(x)
        both: Tensor = self.network(torch.cat([x, x.flip(-1)]))
        return both.view(2, len(x), -1).mean(0)


def moved(x: Tensor, most: int) -> Tensor:
    """Each image of (N, C, H, W) moved by up to `most` pixels to any side; 0 comes in."""
    count, _, height, width = x.shape
    padded = F.pad(x, (most, most, most, most))
    by = torch.randint(2 * most + 1, (2, count, 1), device=x.device)
    rows = by[0] + torch.arange(height, device=x.device)
    columns = by[1] + torch.arange(width, device=x.device)
    image = torch.arange(count, device=x.device).view(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def mirrored(x: Tensor) -> Tensor:
    """Every image of (N, C, H, W) as it is or mirrored, by chance."""
    flips = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
    return torch.where(flips, x.flip(-1), x)


def smoothed(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy with label smoothing of 0.1 (Szegedy et al., 2016), for `run.loss`; (sum, count)."""
    total = F.cross_entropy(output, batch["targets"], label_smoothing=0.1, reduction="sum")
    return total, torch.tensor(len(output), device=output.device)


# -- networks ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """x + branch(x), or shortcut(x) + branch(x) where shapes change, and a rectifier behind it."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, *, zero: bool = False) -> list[nn.Module]:
    """A convolution without bias and its batch norm, which begins as 0 where it ends a branch (Goyal et al., 2017)."""
    norm = nn.BatchNorm2d(outputs)
    if zero:
        nn.init.zeros_(norm.weight)
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), norm]


def small(classes: int = 10, widths: tuple[int, ...] = (16, 32, 64), channels: int = 1, stride: int = 2) -> Classifier:
    """A residual network for images of some 28 x 28 bytes, of airbench's kind: two convolutions and a pooling a stage.

    With the default widths and stride it has 121,000 parameters and takes 4.3 million multiplications an image.

    Args:
        classes: number of classes.
        widths: channels of each stage.
        channels: channels of an image.
        stride: pixels between two places of the first convolution.
    """
    layers: list[nn.Module] = [*convolution(channels, widths[0], 2 * stride - 1, stride), nn.ReLU()]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        if stage:
            layers += [*convolution(inputs, width, 3), nn.ReLU(), nn.MaxPool2d(2)]
        layers.append(
            Residual(nn.Sequential(*convolution(width, width, 3), nn.ReLU(), *convolution(width, width, 3, zero=True)))
        )
        inputs = width
    network = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return Classifier(channels_last(network), (72.9,) * channels, (90.0,) * channels, 2, True)


def resnet50(classes: int = 1000) -> Classifier:
    """ResNet-50 (He et al., 2016) with strides in the 3 x 3 convolutions, for images of 224 x 224."""
    layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            branch = nn.Sequential(
                *convolution(inputs, width, 1),
                nn.ReLU(),
                *convolution(width, width, 3, stride),
                nn.ReLU(),
                *convolution(width, 4 * width, 1, zero=True),
            )
            shortcut = None if block else nn.Sequential(*convolution(inputs, 4 * width, 1, stride))
            layers.append(Residual(branch, shortcut))
            inputs = 4 * width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return Classifier(channels_last(network), (123.7, 116.3, 103.5), (58.4, 57.1, 57.4), 0, True)


def channels_last(network: nn.Module) -> nn.Module:
    """The network with its convolutions' weights as their kernels read them."""
    to: Callable[..., Any] = network.to
    return to(memory_format=torch.channels_last)
