"""Layers of the network: local contrast, modules that are added to a backbone, and stages of backbones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WINDOW, DEVIATION = 7, 7 / 6
"""Side and standard deviation of the Gaussian window for local means, in pixels, as in BRISQUE."""


class LocalContrast(nn.Module):
    """Splits grey pictures, uint8 (N, H, W), into grey value, normalised contrast and local deviation: (N, 3, H, W).

    With local mean and deviation, (x − mean) / (deviation + 1) has nearly the same distribution in all natural images,
    and distortions change this distribution (Mittal et al., 2012). A network that sees these changes generalises
    to kinds of distortion outside the training data; a network that sees only grey values does not.
    """

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        window = torch.exp(-0.5 * ((torch.arange(WINDOW) - WINDOW // 2) / DEVIATION) ** 2)
        self.register_buffer("window", torch.outer(window, window) / window.sum() ** 2, persistent=False)

    def _smooth(self, pictures: Tensor) -> Tensor:
        count, reach = len(pictures), WINDOW // 2
        padded = F.pad(pictures[None], (reach, reach, reach, reach), mode="replicate")
        return F.conv2d(padded, self.window.expand(count, 1, -1, -1), groups=count)[0]  # 20 times as fast as (N, 1, …)

    def forward(self, pictures: Tensor) -> Tensor:
        with torch.autocast(pictures.device.type, enabled=False):  # the variance is a difference of large numbers
            x = pictures.to(self.window.dtype)
            mean = self._smooth(x)
            deviation = (self._smooth(x.square()) - mean.square()).clamp(min=0).sqrt()
            channels = [(x - 128) / 64, (x - mean) / (deviation + 1), deviation.log1p() - 2]
        return torch.stack(channels, -1).movedim(-1, 1)  # channels last: convolutions take 2/3 of the time


class LocalGlobalGate(nn.Module):
    """Strengthens or weakens each place of a feature map (N, C, H, W), depending on its neighbourhood and the whole
    image.

    The output is x · (1 + strength · tanh(local(x) + global(x))). Here `local` is a depthwise convolution, and `global`
    consists of two linear layers on the mean and deviation of each channel. `strength` starts at 0, so the module
    begins as the identity.
    """

    def __init__(self, channels: int, reduction: int = 24) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.local = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.over_all = nn.Sequential(nn.Linear(2 * channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))
        self.strength = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        deviation, mean = torch.std_mean(x, (2, 3), correction=0)
        gate = torch.tanh(self.local(x) + self.over_all(torch.cat([mean, deviation], 1))[..., None, None])
        return x * (1 + self.strength * gate)


class Bottleneck(nn.Module):
    """Baseline for `LocalGlobalGate` with about as many parameters: adds to x the output of two 1×1 convolutions,
    initially 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, round(_size(LocalGlobalGate(channels)) / (2 * channels + 1)))
        self.inner, self.outer = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)
        for parameter in self.outer.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.relu(self.inner(x)))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class HalvingResidual(nn.Module):
    """Halves a feature map by a residual block: a strided 1×1 convolution, plus two 3×3 convolutions, the second
    initialised to 0."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2)
        first, second = nn.Conv2d(inputs, outputs, 3, 2, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        nn.init.zeros_(second.weight)
        self.branch = nn.Sequential(first, nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


def plain(inputs: int, outputs: int) -> nn.Module:
    """Build a stage that halves a feature map by a strided convolution, without normalization, so that absolute
    contrast is preserved."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.ReLU())
