"""Random augmentation of digits: small affine maps, which preserve the style of the strokes, and changes of style."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ANGLE, SCALE, SHEAR = 0.25, 0.15, 0.2
"""Maximum rotation in radians, relative change of size, and shear."""


def moved(images: Tensor) -> Tensor:
    """Rotate, scale and shear images (N, 1, S, S) at random."""
    angle, scale, shear = ((2 * _draws(images) - 1) * most for most in (ANGLE, SCALE, SHEAR))
    zero, size = torch.zeros_like(angle), 1 + scale
    rows = [size * angle.cos(), shear - angle.sin(), zero, angle.sin(), size * angle.cos(), zero]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def restroked(images: Tensor, always: bool = False) -> Tensor:
    """Make the strokes of each image thicker, thinner or softer, with a random strength; a quarter of the images stays
    unchanged, unless `always` is set."""
    thicker, softer = F.max_pool2d(images, 3, 1, 1), F.avg_pool2d(images, 3, 1, 1)
    thinner = -F.max_pool2d(-images, 3, 1, 1)
    strength = _draws(images).view(-1, 1, 1, 1)
    strength = 0.5 + strength / 2 if always else strength
    kind = (_draws(images) * (3 if always else 4)).long().view(-1, 1, 1, 1)
    changed = torch.where(kind == 0, thicker, torch.where(kind == 1, softer, thinner))
    return torch.where(kind == 3, images, images.lerp(changed, strength))


def _draws(images: Tensor) -> Tensor:
    return torch.rand(len(images), device=images.device, dtype=images.dtype)
