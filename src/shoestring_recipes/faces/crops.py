"""Aligns grey images of faces by the eyes, so that landmarks have known places; provides faces of a hundred people."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from shoestring.core.errors import ConfigError

try:
    from skimage.data import lfw_subset
    from skimage.feature import match_template
    from skimage.transform import SimilarityTransform, warp
except ImportError as error:
    raise ConfigError("the recipe `faces` needs scikit-image", hint='pip install "shoestring[faces]"') from error

Values = NDArray[Any]
SIZE = 48
"""Height and width of an aligned face in pixels."""
PEOPLE = 100
"""Number of people in scikit-image's part of LFW, each with one photo of 25×25 pixels."""
LANDMARKS: dict[str, tuple[float, float]] = {
    "left brow": (0.31, 0.25),
    "right brow": (0.69, 0.25),
    "left eye": (0.33, 0.335),
    "right eye": (0.67, 0.335),
    "bridge": (0.5, 0.42),
    "left cheek": (0.17, 0.5),
    "right cheek": (0.83, 0.5),
    "nose": (0.5, 0.57),
    "left mouth": (0.36, 0.7),
    "right mouth": (0.64, 0.7),
    "left jaw": (0.24, 0.78),
    "right jaw": (0.76, 0.78),
    "chin": (0.5, 0.93),
}
"""Column and row of each landmark in an aligned face, as fractions of the face's size; averages over LFW's faces."""
_OFF_CENTRE = 0.06
"""Distance by which the faces in LFW's crops lie left of the middle, as a fraction of the width."""
_SCALES = (0.85, 0.92, 1.0, 1.08, 1.17)
_ANGLES = (-0.2, -0.1, 0.0, 0.1, 0.2)
_MARGIN = 8
"""Maximum distance of the eyes from their expected places, in pixels along each axis."""
_SURROUNDINGS = 4.0
"""Standard deviation of the Gaussian that averages a pixel's surroundings, in pixels."""
_STRAY = 0.005
"""Penalty on the correlation per squared pixel of distance from the expected place, because a moustache also resembles
eyes."""
_BAND = (slice(7, 27), slice(4, 44))
"""Rows and columns of an aligned face that are used to locate the eyes; masks do not cover this band."""


def eyes() -> Values:
    """Return the places of the eyes in an aligned face, in pixels; shape (2, 2), a column and a row for each eye."""
    return np.array([LANDMARKS["left eye"], LANDMARKS["right eye"]]) * SIZE - 0.5


@cache
def faces() -> NDArray[np.float32]:
    """Return the aligned faces of a hundred people, with shape (PEOPLE, SIZE, SIZE) and values from 0 to 1."""
    people = [aligned(crop, locate(crop, (0, 0, *crop.shape))[0]) for crop in lfw_subset()[:PEOPLE]]
    return np.stack(people).astype(np.float32)


@cache
def _mean_face() -> Values:
    """Return the mean of LFW's crops as an aligned face, with shape (SIZE, SIZE)."""
    crop = lfw_subset()[:PEOPLE].mean(0)
    return aligned(crop, _expected((0, 0, *crop.shape)).inverse(eyes()))


def _details(picture: Values) -> Values:
    """Subtract from each pixel the mean of its surroundings, so that light from a side and the background have little
    effect."""
    return picture - gaussian_filter(picture, _SURROUNDINGS, mode="nearest")


def _expected(box: tuple[float, float, float, float]) -> SimilarityTransform:
    """Return the transform from a photo to the aligned face that is expected in a box (top, left, height, width)."""
    top, left, height, _ = box
    scale = SIZE / height
    shift = (_OFF_CENTRE * SIZE - scale * left - 0.5 + 0.5 * scale, -scale * top - 0.5 + 0.5 * scale)
    return SimilarityTransform(scale=scale, translation=shift)


def aligned(photo: Values, pupils: Values) -> Values:
    """Rotate, scale and shift a photo so that the eyes lie at the common places of aligned faces; shape (SIZE, SIZE).

    Args:
        photo: grey values (H, W). pupils: places of the eyes in pixels, (2, 2), a column and a row for each eye.
    """
    transform = SimilarityTransform.from_estimate(eyes(), pupils)  # pyrefly: ignore[missing-attribute]
    return warp(photo, transform, output_shape=(SIZE, SIZE), order=3, mode="edge").clip(0, 1)


def locate(photo: Values, box: tuple[float, float, float, float]) -> tuple[Values, float]:
    """Locate the eyes in a box: search over scales, angles and shifts for the best match of the photo with the upper
    half of the mean face. Returns the places of the eyes, (2, 2), with a column and a row for each eye, and the
    normalised correlation of the match, at most 1.

    Args:
        photo: grey values (H, W), from 0 to 1. box: top, left, height and width of a face.
    """
    expected, middle = _expected(box), eyes().mean(0)
    rows, columns = _BAND
    beside = np.arange(-_MARGIN, _MARGIN + 1.0)
    stray = _STRAY * (beside[:, None] ** 2 + beside**2)
    best, place = -np.inf, eyes()
    for scale, angle in product(_SCALES, _ANGLES):
        about = SimilarityTransform(scale=scale, rotation=angle)
        about = SimilarityTransform(translation=-middle) + about + SimilarityTransform(translation=middle)
        shifted = SimilarityTransform(translation=(-_MARGIN, -_MARGIN)) + about + expected.inverse
        view = warp(photo, shifted, output_shape=(SIZE + 2 * _MARGIN,) * 2, order=1, mode="edge")
        view = view[rows.start : rows.stop + 2 * _MARGIN, columns.start : columns.stop + 2 * _MARGIN]
        scores = np.asarray(match_template(_details(view), _details(_mean_face())[_BAND])) - stray
        if scores.max() > best:
            row, column = np.unravel_index(scores.argmax(), scores.shape)
            best, place = float(scores.max()), shifted(eyes() + np.array([column, row]))
    return place, best
