"""Image classifiers: a small residual network for small images, and ResNet-50.

The classifiers take uint8 images. Normalization, random shifts and mirroring are part of the forward pass, on the
device and for a whole batch at once. In evaluation the logits of an image and its mirror image are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.task import known_targets


class Classifier(nn.Module):
    """A classifier of uint8 images: (N, C, H, W) to logits (N, classes).

    Args:
        network: network that takes normalised images.
        mean: mean of each channel. deviation: standard deviation of each channel.
        shift: largest random shift in training, in pixels; the border is filled with the mean.
        mirror: whether training mirrors images at random, and evaluation averages the logits of an image and its mirror
            image.
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
    """Shift each image of a batch (N, C, H, W) by up to `most` random pixels in each direction; the border is filled
    with 0."""
    count, _, height, width = x.shape
    padded = F.pad(x, (most, most, most, most))
    by = torch.randint(2 * most + 1, (2, count, 1), device=x.device)
    rows = by[0] + torch.arange(height, device=x.device)
    columns = by[1] + torch.arange(width, device=x.device)
    image = torch.arange(count, device=x.device).view(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def mirrored(x: Tensor) -> Tensor:
    """Mirror each image of a batch (N, C, H, W) horizontally with probability 1/2."""
    flips = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
    return torch.where(flips, x.flip(-1), x)


def smoothed(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy with label smoothing of 0.1 (Szegedy et al., 2016), for use as `run.loss`; returns the sum over the
    batch and the count."""
    with known_targets(output, batch["targets"]):
        total = F.cross_entropy(output, batch["targets"], label_smoothing=0.1, reduction="sum")
    return total, torch.tensor(len(output), device=output.device)


# -- networks ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """relu(x + branch(x)), or relu(shortcut(x) + branch(x)) where the shape changes."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, *, zero: bool = False) -> list[nn.Module]:
    """A convolution without bias, followed by a batch norm.

    With `zero`, the norm's weight starts at 0; for the last convolution of a branch, so that the block starts as the
    identity (Goyal et al., 2017).
    """
    norm = nn.BatchNorm2d(outputs)
    if zero:
        nn.init.zeros_(norm.weight)
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), norm]


def small(classes: int = 10, widths: tuple[int, ...] = (16, 32, 64), channels: int = 1, stride: int = 2) -> Classifier:
    """A residual network for images of about 28 x 28, similar to airbench: each stage has two convolutions and one
    pooling layer.

    With the default widths and stride, the network has 121,000 parameters and performs 4.3 million multiplications per
    image.

    Args:
        classes: number of classes.
        widths: channels of each stage.
        channels: channels of an image.
        stride: stride of the first convolution.
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
    """ResNet-50 (He et al., 2016) for images of 224 x 224, with strides in the 3 x 3 convolutions (v1.5)."""
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
    """Convert the weights of a network's convolutions to channels-last order, which kernels for channels-last inputs
    expect."""
    to: Callable[..., Any] = network.to
    return to(memory_format=torch.channels_last)
