"""Draws textures with random angle, width, phase and grain, edge maps of images, and images in the style of a
texture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 32
"""Height and width of images in pixels; a swatch is twice as high and wide."""
SEEN, STRONG = 0.08, 1.2
"""Brightness above which a pixel belongs to the clothes, and gradient (Sobel's filter) above which a pixel is an
edge."""
DEPTH = 0.6
"""Maximum fraction of the brightness that a texture removes."""
BEHIND = 0.4
"""Brightness of the texture in the background."""
WIDTHS = 5.0, 9.0
"""Minimum and maximum period of a texture, in pixels."""
GRAIN = 0.15
"""Maximum standard deviation of a texture's noise."""

Pattern = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function of coordinates in the plane that is positive where the pattern is bright; one period is 2π."""


def _ripples(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Sum of waves in seven directions, which does not repeat."""
    turns = [math.pi * number / 7 for number in range(7)]
    waves = [np.cos(0.8 * (math.cos(turn) * u + math.sin(turn) * v) + 5 * turn) for turn in turns]
    return np.add.reduce(waves) / 2


def _bricks(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Bright bricks between dark lines; each row is shifted by half a brick."""
    row = np.floor(v / (2 * np.pi))
    return 0.75 - np.maximum(np.cos(v), np.cos(u / 2 + np.pi * row))


def _rings(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Rings around the points of a square lattice."""
    centred = (np.mod(axis + 2 * np.pi, 4 * np.pi) - 2 * np.pi for axis in (u, v))
    return np.cos(np.hypot(*centred) * 1.5)


PATTERNS: dict[str, Pattern] = {
    "stripes": lambda u, v: np.cos(u),
    "checks": lambda u, v: 2 * np.cos(u / 1.4) * np.cos(v / 1.4),
    "dots": lambda u, v: np.cos(u) + np.cos(v) - 0.8,
    "zigzag": lambda u, v: np.cos(u + 3.2 / np.pi * np.arcsin(np.sin(v / 1.4))),  # shifted by a triangle wave
    "ripples": _ripples,
    "plain": lambda u, v: np.full_like(u, 0.3),
    "bricks": _bricks,
    "rings": _rings,
}
STYLES = tuple(PATTERNS)
TAUGHT, UNTAUGHT = STYLES[:6], STYLES[6:]


def swatches(kinds: Sequence[int], draws: Sequence[np.random.Generator], side: int = 2 * SIDE) -> np.ndarray:
    """Draw swatches of textures.

    Args:
        kinds: index in `STYLES` for each swatch.
        draws: random generator for each swatch.

    Returns:
        The swatches, float32 (N, side, side), with values from 0 to 1.
    """
    angle, width, first, second, grain = np.array([one.random(5) for one in draws]).reshape(-1, 5).T[..., None, None]
    noise = np.array([one.standard_normal((side, side), np.float32) for one in draws]).reshape(-1, side, side)
    frequency = 2 * np.pi / (WIDTHS[0] + (WIDTHS[1] - WIDTHS[0]) * width)
    sin, cos = frequency * np.sin(np.pi * angle), frequency * np.cos(np.pi * angle)
    y, x = np.ogrid[:side, :side]
    u, v = x * cos - y * sin + 1000 * first, x * sin + y * cos + 1000 * second
    u, v = u.astype(np.float32), v.astype(np.float32)
    bright, of = np.empty(u.shape, np.float32), np.asarray(kinds)
    for number, pattern in enumerate(PATTERNS.values()):
        bright[of == number] = pattern(u[of == number], v[of == number])
    return (1 / (1 + np.exp(-6 * bright)) + GRAIN * grain * noise).clip(0, 1).astype(np.float32)


def dressed(images: Tensor, textures: Tensor) -> Tensor:
    """Apply textures (N, 1, H, W) to images (N, 1, H, W) with values from 0 to 1; the texture is darker in the
    background."""
    return torch.where(images > SEEN, images * (1 - DEPTH + DEPTH * textures), BEHIND * textures)


def edge_map(images: Tensor) -> Tensor:
    """Compute the edge maps of images (N, 1, H, W) with values from 0 to 1: uint8 of the same shape, with 85 inside the
    silhouette, plus 170 on a strong edge."""
    sobel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]], device=images.device)
    gradient = F.conv2d(images, torch.stack([sobel, sobel.T])[:, None], padding=1)
    return (85 * (images > SEEN) + 170 * (gradient.square().sum(1, keepdim=True) > STRONG**2)).to(torch.uint8)


def windows(pictures: Tensor, corners: Tensor, side: int) -> Tensor:
    """Crop a square from each image (N, C, H, W), with its upper left corner at `corners` (N, 2); returns (N, C, side,
    side)."""
    places = corners[..., None] + torch.arange(side, device=pictures.device)
    rows = pictures.gather(2, places[:, 0, None, :, None].expand(-1, pictures.shape[1], -1, pictures.shape[3]))
    return rows.gather(3, places[:, 1, None, None, :].expand(-1, pictures.shape[1], side, -1))
