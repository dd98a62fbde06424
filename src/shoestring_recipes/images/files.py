"""Reads images of clothes from files, for `run.read_file`, and names their classes, for `run.predict`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from shoestring.data.pictures import read_picture

NAMES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SIZE = 28


def read(path: Path) -> dict[str, Tensor]:
    """Read an image in the form of Fashion-MNIST's images: uint8 (1, 28, 28), bright on black. An image with a bright
    border is inverted, because its background is probably white."""
    picture = read_picture(path, 1).float()
    small = interpolate(picture[None], (SIZE, SIZE), mode="bilinear", antialias=True)[0].round()
    border = torch.cat([small[0, 0], small[0, -1], small[0, :, 0], small[0, :, -1]])
    return {"inputs": (255 - small if border.mean() > 127 else small).to(torch.uint8)}


def name(output: Tensor, batch: dict[str, Tensor]) -> list[dict[str, str | float]]:
    """Return the most probable kind of clothes in each image, and its probability."""
    best = output.float().softmax(-1).max(-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"kind": NAMES[index], "probability": probability} for index, probability in pairs]
