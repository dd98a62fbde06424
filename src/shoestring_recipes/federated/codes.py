"""Encoders of digits, with and without an information bottleneck, and a decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolutions(width: int, size: int) -> nn.Sequential:
    """Build three convolutions with group norms, and a linear layer over 2 × 2 places; encodes images (N, 1, S, S)."""
    layers: list[nn.Module] = []
    for before, after, shrink in ((1, width, True), (width, 2 * width, True), (2 * width, 2 * width, False)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2) if shrink else nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * width, size))


class DigitEncoder(nn.Module):
    """Encodes images (N, 1, S, S) without noise.

    Args:
        width: channels of the first convolution, a multiple of 4.
        size: length D of a code.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.layers = convolutions(width, size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the codes (N, D), their means (N, D), which equal the codes, and zeros (N,), as their information is
        unknown."""
        codes = F.relu(self.layers(x))
        return codes, codes, codes.new_zeros(len(codes))


class NoisyDigitEncoder(DigitEncoder):
    """Encodes images as samples from Gaussians, so that the information in a code is bounded and can be penalised
    (variational information bottleneck, Alemi et al., 2017).

    Args:
        spread: initial logarithm of the variance. If it is large, training never uses the code, because noise hides it
            from the start.
    """

    def __init__(self, width: int, size: int, spread: float = 0.0) -> None:
        super().__init__(width, 2 * size)
        self.spread = spread

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the codes (N, D), their means (N, D), and bounds of their information in nats (N,): the divergence
        from a standard normal distribution. Evaluations draw the same noise each time."""
        mean, spread = self.layers(x).float().chunk(2, 1)
        spread = (spread + self.spread).clamp(-6, 3)
        held = (mean.square() + spread.exp() - 1 - spread).sum(1) / 2
        fixed = None if self.training else torch.Generator(x.device).manual_seed(0)
        noise = torch.randn(mean.shape, generator=fixed, device=x.device)
        return mean + (spread / 2).exp() * noise, mean, held


def upsampling(size: int, width: int = 32) -> nn.Sequential:
    """Build a linear layer and two convolutions, which draw images (N, 1, 16, 16) from codes (N, size)."""
    first = nn.Linear(size, 16 * width), nn.Unflatten(1, (width, 4, 4)), nn.ReLU(), nn.Upsample(scale_factor=2)
    second = nn.Conv2d(width, width // 2, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)
    return nn.Sequential(*first, *second, nn.Conv2d(width // 2, 1, 3, padding=1), nn.Sigmoid())
