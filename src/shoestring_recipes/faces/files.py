"""Reads photos from files, for `run.read_file`, and describes the faces in them, for `run.predict`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import shoestring as ss
from shoestring.core.errors import DataError
from shoestring.data.pictures import read_picture
from shoestring_recipes.faces.classical import CLASSIFIERS, patterns
from shoestring_recipes.faces.contest import pictures
from shoestring_recipes.faces.crops import PEOPLE
from shoestring_recipes.faces.detection import find
from shoestring_recipes.faces.measures import overlay
from shoestring_recipes.faces.occluders import KINDS, MASKS
from shoestring_recipes.faces.people import CoveredFaces


def read(path: Path) -> dict[str, Tensor]:
    """Read the faces in a photo, the largest first: `inputs`, uint8 (faces, SIZE, SIZE), and `boxes`, (faces, 5). The
    columns of `boxes` are top, left, height and width in pixels, and the likeness to the mean face.

    Raises:
        DataError: the photo shows no face.
    """
    faces = find(read_picture(path, 1)[0].numpy())
    if not faces:
        raise DataError(f"no face is found in `{path.name}`")
    pictures = np.stack([face.picture for face in faces])
    boxes = torch.tensor([(*face.box, face.likeness) for face in faces])
    return {"inputs": torch.from_numpy((255 * pictures).round().astype(np.uint8)), "boxes": boxes}


def describe(output: dict[str, Tensor], batch: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
    """Return a row for each face: whether the face is masked, how much of the face is covered, and the face's place.
    Nearest neighbours by local binary patterns decide whether a face is masked, with the fraction of masked neighbours
    as the probability; the network predicts the cover. The page shows the aligned face, and beside it the same face
    with the cover in red."""
    faces = batch["inputs"].flatten(0, 1).cpu().numpy()
    shares = _by_patterns().predict_proba(patterns(faces))[:, 1]
    return _rows(torch.from_numpy(shares).view(batch["inputs"].shape[:2]), output, batch)


def describe_by_network(output: dict[str, Tensor], batch: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
    """Like `describe`, but the network predicts the probability that a face is masked."""
    return _rows(output["masked"].float().sigmoid().cpu(), output, batch)


@cache
def _by_patterns() -> Any:
    """Fit the nearest-neighbour classifier on local binary patterns of all people with all kinds of cover."""
    taught = CoveredFaces(list(range(PEOPLE)), KINDS, views=20, seed=0)
    masked = [taught.kind(index) in MASKS for index in range(len(taught))]
    neighbours = make_pipeline(StandardScaler(), CLASSIFIERS["kNN"](0))
    return neighbours.fit(patterns(pictures(taught, len(taught))), masked)


def _rows(masked: Tensor, output: dict[str, Tensor], batch: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
    """Return the rows of each photo; `masked` is the probability that a face is masked, (photos, faces)."""
    cover = output["cover"].float().sigmoid().cpu()
    photos = zip(batch["inputs"].cpu().numpy(), masked, cover, batch["boxes"].tolist(), strict=True)
    return [
        [
            {
                "face": number + 1,
                "masked": bool(probability > 0.5),
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
    """Return the embeddings of the faces in a photo, with norm 1 and shape (faces, dimensions); the largest face comes
    first. The dot product of two embeddings is the similarity of the faces, from -1 to 1."""
    return model.eval()(read(path)["inputs"])["embedding"]
