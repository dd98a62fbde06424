"""Pictures of one's own, for `shoestring predict`: the quality of each, and where it is low."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

import shoestring as ss
from shoestring.data.pictures import read_picture
from shoestring_recipes.quality.photos import grid

GRID = 4
"""Rows and columns of crops that a picture is scored by."""


def read(path: Path) -> dict[str, Tensor]:
    """Crops of a picture on an even grid, in the place of a ladder's levels: uint8 (GRID², H, W)."""
    return {"inputs": grid(read_picture(path, 1)[0], GRID**2)}


def describe(output: Tensor, batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The quality of each picture, the lowest of its crops, and a map of them (bright is good)."""
    grids = output.float().unflatten(1, (GRID, GRID)).cpu()
    maps = interpolate(grids[:, None].clamp(0, 1), scale_factor=16)
    return [
        {"quality": scores.mean(), "lowest": scores.min(), "map": ss.Picture(pixels=picture)}
        for scores, picture in zip(grids, maps, strict=True)
    ]
