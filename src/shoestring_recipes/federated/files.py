"""Reads pictures of digits from files, for `run.read_file`, and names the digits in them, for `run.predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import DataError
from shoestring.data.pictures import read_picture
from shoestring_recipes.federated.digits import normalised


def read(path: Path) -> dict[str, Tensor]:
    """Read a picture of one digit, as uint8 (1, SIDE, SIDE). A picture with a bright border is inverted, because it
    shows dark ink on paper."""
    pixels = read_picture(path, 1)[0]
    border = torch.cat([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).float()
    pixels = (255 - pixels if border.mean() > 127 else pixels).numpy()
    if int(pixels.max()) - int(pixels.min()) < 16:
        raise DataError(f"`{path.name}` shows no digit: it is of one colour")
    return {"inputs": torch.from_numpy(normalised(pixels - pixels.min()))[None]}


def describe(output: dict[str, Tensor], batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the most probable digit in each picture, and its probability."""
    best = output["logits"].float().softmax(-1).max(-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"digit": digit, "probability": probability} for digit, probability in pairs]
