"""Renders images of roads with known lane markings: the markings' geometry and wear, and disturbances such as rain.

A marking starts below the vanishing point and widens towards the camera. Wear removes paint in runs of rows, where a
trace of the paint remains. All random choices come from the given generator, so a seed determines an image.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d

HEIGHT, WIDTH = 180, 320
TAUGHT = ("clean", "shadow", "rain")
"""Kinds of disturbance for training a network: none; three shadows; rain streaks on a wet, grainy road."""
UNTAUGHT = ("fog", "glare", "night", "seams")
"""Kinds of disturbance that a network has not seen in training: fog that thickens with distance; a low sun and its
reflection; a dark road with camera noise; tar seams, scratches and patches of newer asphalt."""
KINDS = (*TAUGHT, "storm", *UNTAUGHT)
"""All kinds of disturbance; a storm combines shadows and rain."""
TRACE = 0.12
"""Contrast of worn paint, as a fraction of the contrast of fresh paint."""
_PAINT = 110.0
_NOISE = {"fog": 7.0, "glare": 7.0, "night": 8.0}
"""Standard deviation of the camera noise in images with low contrast, in grey levels."""
_ROWS, _COLUMNS = np.arange(HEIGHT, dtype=float), np.arange(WIDTH, dtype=float)


class Scene(NamedTuple):
    """An image of a road, with its true lanes and their wear."""

    image: np.ndarray
    """Grey image, uint8 (HEIGHT, WIDTH)."""
    lanes: np.ndarray
    """Column of each marking's middle in each row, (lanes, HEIGHT). The column may lie outside the image; it is NaN
    above the marking's start."""
    wear: np.ndarray
    """Fraction of each marking's rows without fresh paint, (lanes,)."""


def render(rng: np.random.Generator, wear: float, kind: str) -> Scene:
    """Render one image with two or three markings, whose wear is 0.5 to 1.5 times `wear`, but at most 0.97."""
    return film(rng, wear, kind, 1)[0]


def film(rng: np.random.Generator, wear: float, kind: str, frames: int) -> list[Scene]:
    """Render successive images of one road, from a camera that sways by about a pixel."""
    vanishing = np.array([WIDTH / 2 + rng.normal(0, 15), 60 + rng.normal(0, 5)])
    count = 2 + int(rng.random() < 0.5)
    bottoms = WIDTH / 2 * (1 + np.array([-0.55, 0.45, 1.4])[:count] * rng.uniform(0.85, 1.15, count))
    curves = rng.normal(0, 12, count)
    wears = np.minimum(wear * rng.uniform(0.5, 1.5, count), 0.97)
    surface = gaussian_filter1d(rng.normal(size=(count, HEIGHT)), 3, axis=1)
    scenes = []
    for frame in range(frames):
        point = vanishing + (rng.normal(0, 1, 2) if frame else 0)
        start = int(point[1]) + 12
        t = (_ROWS - point[1]) / (HEIGHT - point[1])
        lanes = point[0] + (bottoms - point[0])[:, None] * t + curves[:, None] * (t - 1) * t
        lanes[:, :start] = np.nan
        painted = fresh_paint(np.roll(surface, 9 * frame, 1)[:, start:], wears)
        scenes.append(Scene(_picture(rng, lanes, painted, point, kind), lanes, wears))
    return scenes


def fresh_paint(surface: np.ndarray, wears: np.ndarray) -> np.ndarray:
    """Return whether the paint in each row is fresh, (lanes, rows): the random `surface` must exceed the quantile given
    by the marking's wear."""
    worn = np.array([np.quantile(row, wear) for row, wear in zip(surface, wears, strict=True)])
    return surface > worn[:, None]


def _picture(
    rng: np.random.Generator, lanes: np.ndarray, painted: np.ndarray, vanishing: np.ndarray, kind: str
) -> np.ndarray:
    grain = 40.0 if kind in ("rain", "storm") else 20.0
    image = 90 + grain * gaussian_filter(rng.normal(size=(HEIGHT, WIDTH)), 1)
    image[: int(vanishing[1])] = 160  # the sky
    if kind == "seams":
        image = _with_seams(rng, image, vanishing)
    start = HEIGHT - painted.shape[1]
    half = 0.5 + 3.5 * (_ROWS[start:] - vanishing[1]) / (HEIGHT - vanishing[1])
    inside = np.abs(_COLUMNS - lanes[:, start:, None]) <= half[:, None] + 0.5
    image[start:] += (inside * np.where(painted, _PAINT, TRACE * _PAINT)[:, :, None]).sum(0)
    if kind in ("shadow", "storm"):
        rows, columns = rng.uniform(70, HEIGHT, (3, 1, 1)), rng.uniform(0, WIDTH, (3, 1, 1))
        distance = ((_ROWS[:, None] - rows) / 25) ** 2 + ((_COLUMNS - columns) / 60) ** 2
        image = image * 0.55 ** (distance < 1).sum(0)
    if kind in ("rain", "storm"):
        tops, lengths = rng.integers(0, HEIGHT - 20, (60, 1)), rng.integers(6, 18, (60, 1))
        struck = rng.integers(0, WIDTH, 60)  # column of each streak
        streaks, down = np.zeros_like(image), _ROWS - tops
        np.add.at(streaks.T, struck, 35.0 * ((down >= 0) & (down < lengths)))
        image = image + streaks
    if kind == "fog":
        density = rng.uniform(0.6, 0.9) * np.exp(-np.maximum(_ROWS - vanishing[1], 0) / rng.uniform(60, 140))
        image = image + density[:, None] * (185 - image)
    if kind == "glare":
        across, below = _COLUMNS - rng.uniform(0, WIDTH), _ROWS[:, None] - rng.uniform(80, 150)
        sun = 150 * np.exp(-((across / 70) ** 2) - (below / 40) ** 2)
        reflection = 60 * np.exp(-((across / 22) ** 2)) * gaussian_filter1d((_ROWS > 60).astype(float), 8)[:, None]
        image = 40 + 0.7 * image + sun + reflection
    if kind == "night":
        image = image * 0.3
    image = gaussian_filter(image.clip(0, 255), 0.7)
    if kind in _NOISE:
        image = image + rng.normal(0, _NOISE[kind], image.shape)
    return image.clip(0, 255).round().astype(np.uint8)


def _with_seams(rng: np.random.Generator, image: np.ndarray, vanishing: np.ndarray) -> np.ndarray:
    """Add four patches of darker asphalt, six dark seams and five bright scratches in any direction."""
    image = image.copy()
    for _ in range(4):
        top, left = int(rng.uniform(vanishing[1] + 20, HEIGHT - 20)), int(rng.uniform(0, WIDTH - 60))
        image[top : top + int(rng.uniform(12, 40)), left : left + int(rng.uniform(30, 120))] -= 25
    below = np.arange(int(vanishing[1]) + 12, HEIGHT)
    for depth, (top, bottom) in zip([-45] * 6 + [40] * 5, rng.uniform(0, WIDTH, (11, 2)), strict=True):
        middle = np.linspace(top, bottom, len(below))
        image[below] += depth * (np.abs(_COLUMNS - middle[:, None]) < 1.5)
    return image
