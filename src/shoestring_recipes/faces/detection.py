"""Detects faces in photos, locates their eyes, and aligns the faces.

scikit-image's cascade detects faces, and the eyes are located by comparison with the mean face. If dlib is installed,
its detector adds faces. If the package `face_recognition_models` is installed too, dlib's landmarks locate the eyes.
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

from shoestring.naming import installed
from shoestring_recipes.faces.crops import aligned, locate

Values = NDArray[Any]
SMALLEST, LARGEST = 160, 720
"""Smaller photos are enlarged until the shorter side has SMALLEST pixels; larger photos are reduced until the longer
side has LARGEST pixels."""
_FACE = 48
"""Side of the smallest face that the cascade searches for, in pixels of the enlarged or reduced photo."""
_LIKE = 0.35
"""Minimum `likeness` of a detection of the cascade; a covered lower half of the face does not reduce the likeness."""
LANDMARKS = "models/shape_predictor_68_face_landmarks.dat"
"""Path of dlib's landmark model in `face_recognition_models`; trained on data for non-commercial use (iBUG 300-W)."""
_EYES = (slice(36, 42), slice(42, 48))
"""Numbers of dlib's landmarks on the left eye and on the right eye, as seen in the photo."""


Box = tuple[float, float, float, float]
"""Top, left, height and width of a box."""


class Face(NamedTuple):
    """A face in a photo."""

    picture: Values
    """The aligned face, (SIZE, SIZE), with values from 0 to 1."""
    box: Box
    """Place of the face in the photo, in pixels."""
    likeness: float
    """Normalised correlation of the face's upper half with the mean face, at most 1."""


def find(photo: NDArray[np.uint8]) -> list[Face]:
    """Detect the faces in a photo, uint8 (H, W); the largest face comes first."""
    scale = max(1.0, SMALLEST / min(photo.shape))
    scale *= min(1.0, LARGEST / (scale * max(photo.shape)))
    scaled = photo / 255 if scale == 1 else rescale(photo / 255, scale, order=3, anti_aliasing=scale < 1).clip(0, 1)
    sure: list[Box] = []
    if installed("dlib"):
        rectangles = _detector()((255 * scaled).astype(np.uint8), 1)
        sure = [(box.top(), box.left(), box.height(), box.width()) for box in rectangles]
    candidates = [(box, *locate(scaled, box)) for box in [*sure, *_cascade_boxes(scaled)]]
    likely = [entry for number, entry in enumerate(candidates) if number < len(sure) or entry[2] >= _LIKE]
    faces = []
    for box, eyes, likeness in apart(likely):
        eyes = _dlib_eyes(scaled, box) if _landmarks() else eyes
        top, left, height, width = (float(side) / scale for side in box)
        faces.append(Face(aligned(scaled, eyes), (top, left, height, width), likeness))
    return sorted(faces, key=lambda face: -face.box[2])


def apart(candidates: list[tuple[Box, Values, float]]) -> list[tuple[Box, Values, float]]:
    """Drop overlapping candidates: if the middle of one box lies in another box, the box with the higher likeness
    stays."""
    chosen: list[tuple[Box, Values, float]] = []
    for entry in sorted(candidates, key=lambda entry: -entry[2]):
        if not any(_within(entry[0], box) or _within(box, entry[0]) for box, *_ in chosen):
            chosen.append(entry)
    return chosen


def _within(inner: Box, outer: Box) -> bool:
    """Whether the middle of the box `inner` lies in the box `outer`."""
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


@cache
def _landmarks() -> Any:
    """Load dlib's landmark model; returns None if the model or dlib is not installed."""
    package = find_spec("face_recognition_models")
    if not installed("dlib") or not package or not package.origin:
        return None
    return import_module("dlib").shape_predictor(str(Path(package.origin).parent / LANDMARKS))


def _dlib_eyes(photo: Values, box: Box) -> Values:
    top, left, height, width = map(int, box)
    place = import_module("dlib").rectangle(left, top, left + width, top + height)
    shape = _landmarks()((255 * photo).astype(np.uint8), place)
    points = np.array([(shape.part(number).x, shape.part(number).y) for number in range(68)], float)
    return np.stack([points[eye].mean(0) for eye in _EYES])
