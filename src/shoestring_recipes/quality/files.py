"""Predicts the quality of the user's own images, and the places of low quality, for `shoestring predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

import shoestring as ss
from shoestring.data.pictures import read_picture
from shoestring_recipes.quality.photos import grid

GRID = 4
"""Number of rows and columns of the grid of crops by which an image is scored."""


def read(path: Path) -> dict[str, Tensor]:
    """Read crops of an image on an even grid, uint8 (GRID², H, W), in place of the distortion levels of one crop."""
    return {"inputs": grid(read_picture(path, 1)[0], GRID**2)}


def describe(output: Tensor, batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return for each image its quality, the lowest quality of its crops, and a map of the crops' qualities (bright is
    good)."""
    grids = output.float().unflatten(1, (GRID, GRID)).cpu()
    maps = interpolate(grids[:, None].clamp(0, 1), scale_factor=16)
    return [
        {"quality": scores.mean(), "lowest": scores.min(), "map": ss.Picture(pixels=picture)}
        for scores, picture in zip(grids, maps, strict=True)
    ]
