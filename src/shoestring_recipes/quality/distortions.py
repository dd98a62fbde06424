"""Ten kinds of distortion of grey images at five levels each, similar to those in KADID-10k and TID2013."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter, uniform_filter1d

Grey = NDArray[np.float64]
"""An image of grey values from 0 to 255, (H, W)."""
LEVELS = 5
_BLOCK = 12


def _encoded(picture: Grey, form: str, quality: float) -> Grey:
    content = BytesIO()
    Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(content, form, quality=int(quality))
    return np.asarray(Image.open(content).convert("L"), float)  # own file: encoded here


def _scaled(picture: Grey, factor: float) -> Grey:
    """Reduce an image by a factor, and enlarge the result to the original size."""
    height, width = picture.shape
    image = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
    small = image.resize((round(width / factor), round(height / factor)), Image.Resampling.BICUBIC)
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), float)


def _repeated(picture: Grey, count: float, draws: np.random.Generator) -> Grey:
    """Replace random blocks by repetitions of their first row, as after packet loss."""
    damaged = picture.copy()
    for _ in range(int(count)):
        top, left = (int(draws.integers(side - _BLOCK)) for side in picture.shape)
        damaged[top : top + _BLOCK, left : left + _BLOCK] = damaged[top, left : left + _BLOCK]
    return damaged


Distortion = Callable[[Grey, float, np.random.Generator], Grey]
KINDS: dict[str, tuple[Distortion, tuple[float, float, float, float, float]]] = {
    "jpeg": (lambda picture, quality, _: _encoded(picture, "JPEG", quality), (60, 35, 20, 10, 5)),
    "webp": (lambda picture, quality, _: _encoded(picture, "WEBP", quality), (50, 25, 10, 4, 0)),
    "blur": (lambda picture, sigma, _: gaussian_filter(picture, sigma), (0.6, 1, 1.6, 2.5, 4)),
    "down": (lambda picture, factor, _: _scaled(picture, factor), (1.5, 2, 3, 4, 6)),
    "motion": (
        lambda picture, length, draws: uniform_filter1d(picture, int(length), axis=int(draws.integers(2))),
        (3, 5, 9, 15, 23),
    ),
    "band": (lambda picture, width, _: np.floor(picture / width) * width + width / 2, (24, 32, 48, 64, 96)),
    "noise": (
        lambda picture, sigma, draws: picture + draws.normal(0, sigma, picture.shape),
        (5, 10, 18, 30, 50),
    ),
    "blocks": (_repeated, (2, 5, 10, 18, 30)),
    "contrast": (
        lambda picture, share, _: picture.mean() + share * (picture - picture.mean()),
        (0.8, 0.6, 0.45, 0.3, 0.15),
    ),
    "bright": (lambda picture, shift, _: picture + shift, (20, 35, 55, 75, 100)),
}
"""Maps each kind to its function of an image, a strength and a random generator, and to the strengths of its five
levels."""
FAMILIES = (("jpeg", "webp"), ("blur", "down"), ("motion", "band"), ("noise", "blocks"), ("contrast", "bright"))
"""Pairs of similar kinds, which are left out of training together."""


def ladder(crop: NDArray[np.uint8], kind: str, seed: int) -> NDArray[np.uint8]:
    """Return a crop (H, W) and its five levels of one kind of distortion, from the weakest to the strongest, as (6, H,
    W).

    All levels use the same random choices, such as the direction of a motion blur and the places of blocks.
    """
    distort, strengths = KINDS[kind]
    grey = crop.astype(float)
    levels = [distort(grey, strength, np.random.default_rng(seed)) for strength in strengths]
    return np.stack([grey, *levels]).clip(0, 255).round().astype(np.uint8)
