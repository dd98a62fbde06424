"""Reads photos of roads from files, for `run.read_file`, and describes the lanes in them, for `run.predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

import shoestring as ss
from shoestring.core.errors import DataError
from shoestring.data.pictures import read_picture
from shoestring_recipes.lanes.hough import PARTS, Lanes, detect
from shoestring_recipes.lanes.marks import overlay
from shoestring_recipes.lanes.roads import HEIGHT, WIDTH
from shoestring_recipes.lanes.task import MOST, lanes_of

SMALLEST = 64
"""Minimum height and width of a photo, in pixels."""


def read(path: Path) -> dict[str, Tensor]:
    """Read a photo, cropped to its middle at an aspect ratio of 16 to 9, as uint8 (1, HEIGHT, WIDTH)."""
    picture = read_picture(path, 1).float()
    height, width = picture.shape[1:]
    if min(height, width) < SMALLEST:
        raise DataError(f"`{path.name}` has {width} × {height} pixels, but at least {SMALLEST} × {SMALLEST} are needed")
    scale = min(height / HEIGHT, width / WIDTH)
    tall, wide = round(HEIGHT * scale), round(WIDTH * scale)
    top, left = (height - tall) // 2, (width - wide) // 2
    middle = picture[None, :, top : top + tall, left : left + wide]
    small = interpolate(middle, (HEIGHT, WIDTH), mode="bilinear", antialias=True)[0]
    return {"inputs": small.round().clamp(0, 255).to(torch.uint8), "lanes": torch.full((MOST, HEIGHT), torch.nan)}


def describe(output: Tensor, batch: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
    """Return a row for each lane that the Hough transform detects, the best lane first. A row has the lane's column in
    the bottom row of 320 × 180 pixels, the lane's quality, and the parts of the quality; the first row also has the
    image. An image without lanes has one row."""
    images = batch["inputs"][:, 0].cpu().numpy()
    return [rows_of(image, detect(image)) for image in images]


def describe_marked(output: Tensor, batch: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
    """Like `describe`, but for the lanes that the network marks."""
    images = batch["inputs"][:, 0].cpu().numpy()
    return [rows_of(image, lanes) for image, lanes in zip(images, lanes_of(batch["inputs"], output), strict=True)]


def rows_of(image: np.ndarray, lanes: Lanes) -> list[dict[str, Any]]:
    """Return the rows of one image."""
    rows: list[dict[str, Any]] = [
        {"lane": number + 1, "bottom": columns[-1], "quality": quality, **dict(zip(PARTS, parts, strict=True))}
        for number, (columns, quality, parts) in enumerate(zip(*lanes, strict=True))
    ]
    rows = rows or [{"lane": 0}]
    rows[0]["drawn"] = ss.Picture(pixels=overlay(image, lanes))
    return rows
