"""Distance of generated images from real images, without a trained network; and sheets of images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def _filters(channels: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(32, channels, 5, 5, generator=draw) / (25 * channels) ** 0.5
    return first, torch.randn(16, 32, 3, 3, generator=draw) / 288**0.5


def features(pictures: Tensor) -> Tensor:
    """Compute features (N, 64) of images (N, C, H, W) with values from 0 to 1 by a fixed random network. Such a network
    distinguishes distributions of images without training (Naeem et al., 2020)."""
    first, second = (one.to(pictures.device) for one in _filters(pictures.shape[1]))
    x = F.conv2d(F.relu(F.conv2d(pictures.float() - 0.5, first, stride=2, padding=2)), second, stride=2, padding=1)
    return F.adaptive_avg_pool2d(F.relu(x), 2).flatten(1).double()


def frechet(first: Tensor, second: Tensor) -> Tensor:
    """Compute the Fréchet distance of normal distributions with the moments of two sets of features, (n, F) and (m, F).

    The distance is |µ₁ - µ₂|² + tr(Σ₁ + Σ₂ - 2 (Σ₁ Σ₂)^½) (Heusel et al., 2017), or NaN if a set is empty.
    """
    if not len(first) or not len(second):
        return first.new_tensor(torch.nan)
    mean = (first.double().mean(0) - second.double().mean(0)).square().sum()
    covariances = [torch.cov(one.double().T, correction=0).reshape(one.shape[1], -1) for one in (first, second)]
    values, vectors = torch.linalg.eigh(covariances[0])
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    both = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp(min=0).sqrt().sum()
    return (mean + sum(one.trace() for one in covariances) - 2 * both).clamp(min=0)


def sheet(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Arrange rows of images in one image, uint8 (3, H, W), with cells twice as large as the last image of a row. The
    images may have any size, one or three channels, and be uint8 or have values from 0 to 1."""
    height, width = (2 * side for side in rows[0][-1].shape[-2:])
    arranged = []
    for row in rows:
        cells = []
        for picture in row:
            pixels = picture if picture.dtype is torch.uint8 else (255 * picture.float()).round().clamp(0, 255)
            large = F.interpolate(pixels[None].float(), (height - 2, width - 2), mode="nearest")[0]
            cells.append(F.pad(large.expand(3, -1, -1), (1, 1, 1, 1), value=128).to(torch.uint8))
        arranged.append(torch.cat(cells, 2))
    return torch.cat(arranged, 1)
