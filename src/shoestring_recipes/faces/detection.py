"""Faces in photos: where they are, where their eyes are, and each of them aligned.

scikit-image's cascade finds faces, and the mean face finds their eyes. Where dlib is installed, its detector finds the
faces; where the package `face_recognition_models` is as well, dlib's landmarks find the eyes.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from skimage.data import lbp_frontal_face_cascade_filename
from skimage.feature import Cascade
from skimage.transform import rescale

from shoestring_recipes.faces.crops import aligned, locate

Values = NDArray[Any]
SMALLEST, LARGEST = 160, 720
"""Shortest side that smaller photos are enlarged to, and longest that larger ones are reduced to, in pixels."""
_FACE = 48
"""Side of the smallest face that is looked for, in pixels of the enlarged or reduced photo."""
_LIKE = 0.35
"""Least likeness of what the cascade takes for a face; a covered lower half does not lower it."""
LANDMARKS = "models/shape_predictor_68_face_landmarks.dat"
"""dlib's landmarks in `face_recognition_models`; they were learnt from data for non-commercial use (iBUG 300-W)."""
_EYES = (slice(36, 42), slice(42, 48))
"""Their numbers of the left and of the right eye, as seen in the photo."""


Box = tuple[float, float, float, float]
"""Top, left, height and width."""


class Face(NamedTuple):
    """A face in a photo."""

    picture: Values
    """Aligned, (SIZE, SIZE), from 0 to 1."""
    box: Box
    """Where it is, in pixels of the photo."""
    likeness: float
    """How well its upper half agrees with the mean face, up to 1."""


def find(photo: NDArray[np.uint8]) -> list[Face]:
    """The faces in a photo, uint8 (H, W), the largest first."""
    scale = max(1.0, SMALLEST / min(photo.shape))
    scale *= min(1.0, LARGEST / (scale * max(photo.shape)))
    scaled = photo / 255 if scale == 1 else rescale(photo / 255, scale, order=3, anti_aliasing=scale < 1).clip(0, 1)
    sure = _dlib_boxes(scaled) if find_spec("dlib") else []
    candidates = [(box, *locate(scaled, box)) for box in [*sure, *_cascade_boxes(scaled)]]
    likely = [entry for number, entry in enumerate(candidates) if number < len(sure) or entry[2] >= _LIKE]
    faces = []
    for box, eyes, likeness in apart(likely):
        eyes = _dlib_eyes(scaled, box) if _landmarks() else eyes
        top, left, height, width = (float(side) / scale for side in box)
        faces.append(Face(aligned(scaled, eyes), (top, left, height, width), likeness))
    return sorted(faces, key=lambda face: -face.box[2])


def apart(candidates: list[tuple[Box, Values, float]]) -> list[tuple[Box, Values, float]]:
    """Boxes of which none has its middle in another: of those that do, the one that is most like a face."""
    chosen: list[tuple[Box, Values, float]] = []
    for entry in sorted(candidates, key=lambda entry: -entry[2]):
        if not any(_within(entry[0], box) or _within(box, entry[0]) for box, *_ in chosen):
            chosen.append(entry)
    return chosen


def _within(inner: Box, outer: Box) -> bool:
    """Whether the middle of a box lies in another."""
    return all(0 <= inner[axis] + inner[axis + 2] / 2 - outer[axis] < outer[axis + 2] for axis in (0, 1))


@cache
def _cascade() -> Any:
    return Cascade(lbp_frontal_face_cascade_filename())


def _cascade_boxes(photo: Values) -> list[Box]:
    most = min(photo.shape)
    if most < _FACE:
        return []
    detections = _cascade().detect_multi_scale(photo, 1.15, 1, (_FACE, _FACE), (most, most), min_neighbor_number=3)
    return [(box["r"], box["c"], box["height"], box["width"]) for box in detections]


# -- dlib --------------------------------------------------------------------------------------------------------------


@cache
def _detector() -> Any:
    return import_module("dlib").get_frontal_face_detector()


def _dlib_boxes(photo: Values) -> list[Box]:
    detections = _detector()((255 * photo).astype(np.uint8), 1)
    return [(box.top(), box.left(), box.height(), box.width()) for box in detections]


@cache
def _landmarks() -> Any:
    """dlib's landmarks, or None if they or dlib are not installed."""
    package = find_spec("face_recognition_models")
    if not find_spec("dlib") or not package or not package.origin:
        return None
    return import_module("dlib").shape_predictor(str(Path(package.origin).parent / LANDMARKS))


def _dlib_eyes(photo: Values, box: Box) -> Values:
    top, left, height, width = map(int, box)
    place = import_module("dlib").rectangle(left, top, left + width, top + height)
    shape = _landmarks()((255 * photo).astype(np.uint8), place)
    points = np.array([(shape.part(number).x, shape.part(number).y) for number in range(68)], float)
    return np.stack([points[eye].mean(0) for eye in _EYES])
