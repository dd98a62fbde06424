"""Photos in files, for `run.read_file`, and what is said of each face in them, for `run.predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shoestring as ss
from shoestring.core.errors import DataError
from shoestring.data.pictures import read_picture
from shoestring_recipes.faces.detection import find
from shoestring_recipes.faces.measures import overlay


def read(path: Path) -> dict[str, Tensor]:
    """The faces of a photo, the largest first: `inputs`, uint8 (faces, SIZE, SIZE), and `boxes`, (faces, 5), the top,
    left, height and width of each in pixels, and how much it looks like a face.

    Raises:
        DataError: no face is found.
    """
    faces = find(read_picture(path, 1)[0].numpy())
    if not faces:
        raise DataError(f"no face is found in `{path.name}`")
    pictures = np.stack([face.picture for face in faces])
    boxes = torch.tensor([(*face.box, face.likeness) for face in faces])
    return {"inputs": torch.from_numpy((255 * pictures).round().astype(np.uint8)), "boxes": boxes}


def describe(output: dict[str, Tensor], batch: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
    """A row for each face: the probability that it is masked, the share of it that is covered, and where it is; and the
    aligned face beside itself with what is covered in red."""
    masked, cover = (output[name].float().sigmoid().cpu() for name in ("masked", "cover"))
    photos = zip(batch["inputs"].cpu().numpy(), masked, cover, batch["boxes"].tolist(), strict=True)
    return [
        [
            {
                "face": number + 1,
                "masked": probability > 0.5,
                "probability": probability,
                "covered": cells.mean(),
                **dict(zip(("top", "left", "height", "width", "likeness"), box, strict=True)),
                "cover": ss.Picture(pixels=overlay(image, cells.numpy())),
            }
            for number, (image, probability, cells, box) in enumerate(zip(*faces, strict=True))
        ]
        for faces in photos
    ]


@torch.no_grad()
def embedded(model: nn.Module, path: Path) -> Tensor:
    """The embeddings of the faces in a photo, the largest first: (faces, dimensions), of length 1. Their products say
    how alike two faces are, from -1 to 1."""
    return model.eval()(read(path)["inputs"])["embedding"]
