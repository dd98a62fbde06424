"""Faces as the recipe has them: grey, aligned by the eyes, with landmarks at known places; and a hundred free ones."""

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
"""Column and row of each landmark in an aligned face, as shares of its size: the mean of LFW's faces."""
_OFF_CENTRE = 0.06
"""How far left of the middle the faces of LFW's crops are, as a share of the width."""
_SCALES = (0.85, 0.92, 1.0, 1.08, 1.17)
_ANGLES = (-0.2, -0.1, 0.0, 0.1, 0.2)
_MARGIN = 8
"""Pixels that the eyes may lie beside their expected places."""
_SURROUNDINGS = 4.0
"""Standard deviation in pixels of what counts as surroundings."""
_STRAY = 0.005
"""Correlation that is taken off for each squared pixel beside the expected place: a moustache looks like eyes too."""
_BAND = (slice(7, 27), slice(4, 44))
"""Rows and columns of an aligned face by which eyes are found; a mask covers none of them."""


def eyes() -> Values:
    """Where an aligned face has its eyes, in pixels: (2, 2), each column and row."""
    return np.array([LANDMARKS["left eye"], LANDMARKS["right eye"]]) * SIZE - 0.5


@cache
def faces() -> NDArray[np.float32]:
    """The faces of a hundred people, aligned: (PEOPLE, SIZE, SIZE), from 0 to 1."""
    people = [aligned(crop, locate(crop, (0, 0, *crop.shape))[0]) for crop in lfw_subset()[:PEOPLE]]
    return np.stack(people).astype(np.float32)


@cache
def _mean_face() -> Values:
    """The mean of LFW's crops, as an aligned face: (SIZE, SIZE)."""
    crop = lfw_subset()[:PEOPLE].mean(0)
    return aligned(crop, _expected((0, 0, *crop.shape)).inverse(eyes()))


def _details(picture: Values) -> Values:
    """What differs from the surroundings, so that light from a side and what is behind the head matter little."""
    return picture - gaussian_filter(picture, _SURROUNDINGS, mode="nearest")


def _expected(box: tuple[float, float, float, float]) -> SimilarityTransform:
    """From a photo to the aligned face that is expected in a box (top, left, height, width)."""
    top, left, height, _ = box
    scale = SIZE / height
    shift = (_OFF_CENTRE * SIZE - scale * left - 0.5 + 0.5 * scale, -scale * top - 0.5 + 0.5 * scale)
    return SimilarityTransform(scale=scale, translation=shift)


def aligned(photo: Values, pupils: Values) -> Values:
    """A face turned, scaled and moved so that its eyes lie where all have them: (SIZE, SIZE).

    Args:
        photo: grey values (H, W). pupils: its eyes in pixels, (2, 2), each column and row.
    """
    transform = SimilarityTransform.from_estimate(eyes(), pupils)  # pyrefly: ignore[missing-attribute]
    return warp(photo, transform, output_shape=(SIZE, SIZE), order=3, mode="edge").clip(0, 1)


def locate(photo: Values, box: tuple[float, float, float, float]) -> tuple[Values, float]:
    """The eyes in a box, (2, 2), each column and row: where the photo agrees best with the upper half of the mean face,
    over scales, angles and shifts, by normalised correlation; and how well it agrees, up to 1.

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
