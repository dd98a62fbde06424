"""Draws what covers a face onto its landmarks: masks of four kinds, and five things that resemble masks.

Each is drawn on a flat sheet, which is laid over the lower face. The sheet's column u goes from 0 to 1 from cheek to
cheek, and its row v from the bridge of the nose to the chin. A homography maps the sheet onto the landmarks of a
slightly turned face (Anwar and Raychowdhury, 2020, arXiv 2008.11104). The kinds were fixed before any training; a test
checks that they stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from skimage.transform import ProjectiveTransform, SimilarityTransform, warp

from shoestring_recipes.faces.crops import LANDMARKS, SIZE

Values = NDArray[Any]
Draws = np.random.Generator
_ANCHORS = ("left cheek", "bridge", "right cheek", "right jaw", "chin", "left jaw")
"""Landmarks to which the sheet is attached; `_DEPTHS` is each landmark's distance in front of the cheeks, as a fraction
of the face's size."""
_DEPTHS = np.array([0.0, 0.25, 0.0, 0.05, 0.2, 0.05])
_PLACES = np.array([LANDMARKS[name] for name in _ANCHORS])
_LEFT, _TOP = LANDMARKS["left cheek"][0], LANDMARKS["bridge"][1]
_EXTENT = np.array([LANDMARKS["right cheek"][0] - _LEFT, LANDMARKS["chin"][1] - _TOP])
_SHEET = (_PLACES - (_LEFT, _TOP)) / _EXTENT
_PIXELS = np.stack(np.meshgrid(np.arange(SIZE), np.arange(SIZE)), -1).reshape(-1, 2)
_EDGE = 0.6
"""Standard deviation of the Gaussian that softens the edge of a cover, in pixels."""


class Covered(NamedTuple):
    """An image of a face, and the map of its covered pixels."""

    picture: Values
    """Grey values of the face with its cover, (SIZE, SIZE), from 0 to 1."""
    cover: Values
    """Covered fraction of each pixel, (SIZE, SIZE), from 0 to 1."""


# -- shapes: which places (u, v) of the sheet are covered --------------------------------------------------------------


def _surgical(u: Values, v: Values, draws: Draws) -> Values:
    top = draws.normal(0.04, 0.03) + 0.22 * np.abs(u - 0.5)
    return (v > top) & (v < 1.0) & (np.abs(u - 0.5) < draws.normal(0.5, 0.03))


def _n95(u: Values, v: Values, draws: Draws) -> Values:
    return ((u - 0.5) / 0.44) ** 2 + ((v - 0.5 - draws.normal(0, 0.03)) / 0.5) ** 2 < 1


def _cloth(u: Values, v: Values, draws: Draws) -> Values:
    taper = 0.56 - 0.45 * np.clip(v - 0.5, 0, 1)
    return (v > draws.normal(0.02, 0.03)) & (v < 1.06) & (np.abs(u - 0.5) < taper)


def _bandana(u: Values, v: Values, draws: Draws) -> Values:
    return (v > draws.normal(0.02, 0.03) + 0.2 * np.abs(u - 0.5)) & (np.abs(u - 0.5) < 0.62)


def _glasses(u: Values, v: Values, draws: Draws) -> Values:
    middle = -0.17 + draws.normal(0, 0.02)
    return ((np.abs(u - 0.5) - 0.26) / 0.2) ** 2 + ((v - middle) / 0.16) ** 2 < 1


def _hand(u: Values, v: Values, draws: Draws) -> Values:
    lean, beside = draws.uniform(-0.9, 0.9), draws.normal(0, 0.08)
    return (np.abs(u - 0.5 - beside - lean * (v - 0.75)) < 0.2) & (v > draws.uniform(0.15, 0.5))


def _scarf(u: Values, v: Values, draws: Draws) -> Values:
    return v > draws.normal(0.72, 0.04) + 0.1 * np.abs(u - 0.5)


def _box(u: Values, v: Values, draws: Draws) -> Values:
    width, height = draws.uniform(0.3, 0.8), draws.uniform(0.25, 0.42)
    return (np.abs(u - draws.uniform(0, 1)) < width / 2) & (np.abs(v - draws.uniform(-0.6, 0.85)) < height / 2)


# -- fills: the grey values of what covers -----------------------------------------------------------------------------


def _plain(u: Values, v: Values, grey: float, draws: Draws) -> Values:
    return np.full_like(u, grey)


def _pleated(u: Values, v: Values, grey: float, draws: Draws) -> Values:
    return grey - 0.1 * (np.sin(draws.uniform(14, 24) * v + draws.uniform(0, 6)) > 0.6)


def _shaded(u: Values, v: Values, grey: float, draws: Draws) -> Values:
    return grey * (1 - 0.6 * np.abs(u - 0.5))


def _woven(u: Values, v: Values, grey: float, draws: Draws) -> Values:
    noise = gaussian_filter(draws.normal(size=u.shape), draws.uniform(0.7, 2.5))
    return grey + 0.15 * noise / noise.std()


FILLS = (_plain, _pleated, _shaded, _woven)


class Kind(NamedTuple):
    """A kind of cover: its shape on the sheet, its fill, and its range of grey values."""

    shape: Callable[[Values, Values, Draws], Values]
    fill: Callable[[Values, Values, float, Draws], Values]
    greys: tuple[float, float]
    """Darkest and brightest grey value of the fill."""


MASKS = {
    "surgical": Kind(_surgical, _pleated, (0.6, 0.95)),
    "n95": Kind(_n95, _shaded, (0.75, 1.0)),
    "cloth": Kind(_cloth, _woven, (0.05, 0.6)),
    "bandana": Kind(_bandana, _plain, (0.0, 0.2)),
}
"""Kinds that cover nose and mouth."""
OTHERS = {
    "glasses": Kind(_glasses, _plain, (0.0, 0.2)),
    "hand": Kind(_hand, _shaded, (0.4, 0.8)),
    "scarf": Kind(_scarf, _woven, (0.0, 0.9)),
    "box": Kind(_box, _woven, (0.0, 1.0)),
}
"""Kinds that leave nose or mouth free. A beard is not listed here, because a beard covers nothing and is drawn by
darkening the face."""
KINDS = (*MASKS, "none", "beard", *OTHERS)
LOOK_ALIKES = ("hand", "scarf", "box")
"""Kinds similar to masks; one of these is left out of training together with a kind of mask."""


def cover(face: Values, kind: str, draws: Draws, any_fill: bool = False) -> Covered:
    """Draw a cover over an aligned face (SIZE, SIZE), on a head that is turned and tilted at random.

    Args:
        kind: one of `KINDS`.
        any_fill: whether to choose the fill and its grey value at random from all fills and greys instead of the kind's
            own fill and greys.
    """
    if kind == "none":
        return Covered(face, np.zeros_like(face))
    u, v = _sheet(draws)
    if kind == "beard":
        mouth = ((u - 0.5) / 0.17) ** 2 + ((v - 0.56) / 0.08) ** 2 < 1
        beard = (v > draws.normal(0.45, 0.03)) & (v < 1.05) & (np.abs(u - 0.5) < 0.5) & ~mouth
        hair = gaussian_filter(beard.astype(float), _EDGE)
        dark = draws.uniform(0.3, 0.6) + 0.1 * draws.normal(size=face.shape)
        return Covered((face * (1 - hair * (1 - dark))).clip(0, 1), np.zeros_like(face))
    drawn = (MASKS | OTHERS)[kind]
    covered = gaussian_filter(drawn.shape(u, v, draws).astype(float), _EDGE)
    if any_fill:
        filled = FILLS[draws.integers(len(FILLS))](u, v, draws.uniform(0, 1), draws)
    else:
        filled = drawn.fill(u, v, draws.uniform(*drawn.greys), draws)
    lit = filled * (1 + draws.normal(0, 0.15) * (u - 0.5))
    return Covered((face * (1 - covered) + lit.clip(0, 1) * covered), covered)


def _sheet(draws: Draws) -> tuple[Values, Values]:
    """Return the sheet coordinates u and v of all pixels of an aligned face, each with shape (SIZE, SIZE)."""
    yaw, pitch = draws.normal(0, 0.25, 2)
    moved = _PLACES + _DEPTHS[:, None] * (yaw, 0.4 * pitch) + draws.normal(0, 0.012, _PLACES.shape)
    homography = ProjectiveTransform.from_estimate(moved * SIZE - 0.5, _SHEET)  # pyrefly: ignore[missing-attribute]
    u, v = homography(_PIXELS).T.reshape(2, SIZE, SIZE)
    return u, v


def spoilt(covered: Covered, draws: Draws) -> Covered:
    """Vary a face as another camera would show it: rotated, scaled, shifted, possibly mirrored, blurred, lit from a
    side, and with noise."""
    middle = SIZE / 2 - 0.5
    about = SimilarityTransform(scale=draws.normal(1, 0.05), rotation=draws.normal(0, 0.08))
    about = SimilarityTransform(translation=(-middle,) * 2) + about
    about += SimilarityTransform(translation=middle + draws.normal(0, 1.5, 2))
    both = warp(np.stack(covered, -1), about, mode="edge")
    if draws.random() < 0.5:
        both = both[:, ::-1]
    picture = gaussian_filter(both[..., 0], abs(draws.normal(0, 0.6)))
    across = np.linspace(-0.5, 0.5, SIZE)
    light = draws.uniform(0.7, 1.2) + draws.normal(0, 0.15) * across
    noisy = picture * light + draws.uniform(-0.1, 0.1) + draws.normal(0, 0.03, picture.shape)
    return Covered(noisy.clip(0, 1), both[..., 1].clip(0, 1))
