"""Lanes by edges, a region, the probabilistic Hough transform and clustering; and how good each marking is.

The edges are Canny's, or a network's (`task.py`); what follows is the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.ndimage import gaussian_filter

from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.lanes.roads import HEIGHT, WIDTH

try:
    from skimage.feature import canny
    from skimage.transform import probabilistic_hough_line
except ImportError as error:
    raise ConfigError("the recipe `lanes` needs scikit-image", hint='pip install "shoestring[lanes]"') from error


@dataclass(frozen=True)
class HoughSettings:
    """Settings of the whole path, for pictures of 320 × 180; lengths in pixels, contrasts in grey levels of 256."""

    region: int = 75
    """First row that is searched."""
    sigma: float = 2.5
    """Smoothing before edges are found."""
    thresholds: tuple[float, float] = (4.5, 15.0)
    """Canny's thresholds."""
    votes: int = 6
    """Least number of edge pixels on a line."""
    length: int = 10
    """Shortest segment."""
    gap: int = 6
    """Longest gap within a segment."""
    steepness: float = 6.0
    """Least height of a segment."""
    slope: float = 4.0
    """Largest slope, in columns a row."""
    bottom_scale: float = 18.0
    """Distance in the bottom row up to which segments belong together."""
    slope_scale: float = 0.35
    """Difference in slope up to which segments belong together."""
    total: float = 40.0
    """Least length of all segments of a lane."""
    bend: float = 30.0
    """How much a lane resists being bent, as rows of evidence."""
    reach: int = 20
    """Columns to each side in which the paint of a lane is looked for, in the last row."""
    narrow: float = 0.3
    """Least fraction of the reach, in the distance."""
    half_widths: tuple[float, float] = (1.0, 4.0)
    """Half the width of a marking in the region's first row and in the last."""
    evidence: float = 6.0
    """Least contrast of a lane over its standard error."""
    paint: float = 40.0
    """Contrast that counts as one row of evidence when a lane is moved to its paint."""
    fresh: float = 0.35
    """Fraction of the strongest contrast of any lane in the picture above which paint counts as fresh."""
    least: float = 4.0
    """Contrast below which paint is never fresh, in units of the picture's noise."""
    apart: float = 14.0
    """Mean distance below which two lanes are one."""
    vanishing: float = 15.0
    """Columns from the common vanishing point at which parallelism is a half."""
    stray: float = 20.0
    """Columns from the common vanishing point from which on something is no lane."""
    sway: float = 6.0
    """Mean movement between pictures at which steadiness is a half."""
    weights: tuple[float, float, float, float, float] = (0.1, 0.1, 0.6, 0.1, 0.1)
    """Weights of `PARTS` in the quality."""


HOUGH = HoughSettings()


class Lanes(NamedTuple):
    """Lanes that were found in a picture, the best first."""

    columns: np.ndarray
    """(n, HEIGHT): column in each row, NaN above the region."""
    quality: np.ndarray
    """(n,): from 0 for a lane without paint to 1 for a fresh one; the weighted geometric mean of the parts."""
    parts: np.ndarray
    """(n, 5): `PARTS`, each from 0 to 1."""


PARTS = ("support", "continuity", "contrast", "parallelism", "steadiness")

_ROWS = np.arange(HEIGHT, dtype=float)


def detect(
    image: np.ndarray,
    edges: np.ndarray | None = None,
    before: list[Lanes] | None = None,
    settings: HoughSettings = HOUGH,
) -> Lanes:
    """Find the lanes of a picture.

    Args:
        image: (HEIGHT, WIDTH), grey levels from 0 to 255.
        edges: (HEIGHT, WIDTH), true where a line may be; by default Canny's edges.
        before: the lanes of the pictures before, for steadiness.

    Raises:
        DataError: the picture has another size.
    """
    image = np.asarray(image, dtype=float)
    if image.shape != (HEIGHT, WIDTH):
        hint = "files.read makes pictures of that size of photos"
        raise DataError(f"a picture has the shape {image.shape}, not ({HEIGHT}, {WIDTH})", hint=hint)
    edges = canny(image, settings.sigma, *settings.thresholds) if edges is None else edges.copy()
    edges[: settings.region] = False
    curves = _clustered(_segments(edges, settings), settings)
    contrast = _contrast(image, settings)
    noise = 1.4826 * np.median(np.abs(contrast[settings.region :] - np.median(contrast[settings.region :])))
    curves = _refined(curves, contrast, max(noise, 1.0), settings)
    return _chosen(curves, edges, contrast, max(noise, 1.0), before or [], settings)


def _segments(edges: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """The segments (n, 4) of a map of edges that may belong to lanes: upper column and row, lower column and row."""
    least = settings.votes, settings.length, settings.gap
    lines = probabilistic_hough_line(edges, *least, rng=0)  # pyrefly: ignore[unexpected-keyword]
    ends = np.array(lines, dtype=float).reshape(-1, 2, 2)
    ends = np.take_along_axis(ends, ends[:, :, 1].argsort(1)[:, :, None], 1).reshape(-1, 4)
    across, down = ends[:, 2] - ends[:, 0], ends[:, 3] - ends[:, 1]
    return ends[(down > settings.steepness) & (np.abs(across) < settings.slope * down)]


def _clustered(segments: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """Polynomials (n, 3) in the row, one for each cluster of segments whose lines nearly agree."""
    if not len(segments):
        return np.empty((0, 3))
    x0, y0, x1, y1 = segments.T
    slope, lengths = (x1 - x0) / (y1 - y0), np.hypot(x1 - x0, y1 - y0)
    places = np.stack([(x0 + slope * (HEIGHT - 1 - y0)) / settings.bottom_scale, slope / settings.slope_scale], 1)
    cluster = fcluster(linkage(places, "average"), 1, "distance") - 1 if len(segments) > 1 else np.zeros(1, int)
    member = (cluster == np.arange(cluster.max() + 1)[:, None]) * lengths
    member = member[member.sum(1) > settings.total]
    along = np.linspace(0, 1, 5)
    rows, columns = y0 + np.outer(along, y1 - y0), x0 + np.outer(along, x1 - x0)
    return _fitted(rows.ravel(), columns.ravel(), np.tile(member, 5) / 5, settings)


def _fitted(rows: np.ndarray, columns: np.ndarray, weights: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """Fit polynomials (n, 3) of degree two to weighted points by ridge regression, which keeps them nearly straight.

    Args:
        rows: (points,). columns: (points,) or (n, points). weights: (n, points).
    """
    t = (rows - HEIGHT) / (HEIGHT - settings.region)
    powers = np.stack([t**2, t, np.ones_like(t)])
    moments = np.einsum("ip,np,jp->nij", powers, weights, powers) + np.diag([settings.bend, 1e-3, 1e-3])
    targets = np.einsum("ip,np->ni", powers, weights * columns)
    return np.linalg.solve(moments, targets[:, :, None])[:, :, 0]


def _depth(settings: HoughSettings) -> np.ndarray:
    """How near each row (HEIGHT,) is to the camera: from 0 in the region's first row to 1 below the last."""
    return (_ROWS - settings.region) / (HEIGHT - settings.region)


def _columns(curves: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """The columns (n, HEIGHT) of polynomials."""
    t = _depth(settings) - 1
    return curves @ np.stack([t**2, t, np.ones_like(t)])


def _contrast(image: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """How much brighter each pixel is than the brighter one of two beside it, a marking's width away."""
    smooth = gaussian_filter(image, 1)
    near, far = settings.half_widths
    aside = np.rint(near + (far - near) * np.clip(_depth(settings), 0, 1) + 4).astype(int)[:, None]
    columns, rows = np.arange(WIDTH), np.arange(HEIGHT)[:, None]
    left, right = (smooth[rows, np.clip(columns + step, 0, WIDTH - 1)] for step in (-aside, aside))
    return smooth - np.maximum(left, right)


def _sampled(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The values of a map at columns (..., HEIGHT), NaN outside of the picture."""
    nearest = np.rint(columns)
    inside = (nearest >= 0) & (nearest < WIDTH)
    sampled = values[np.arange(HEIGHT), np.where(inside, nearest, 0).astype(int)]
    return np.where(inside, sampled, np.nan)


def _refined(curves: np.ndarray, contrast: np.ndarray, noise: float, settings: HoughSettings) -> np.ndarray:
    """Move polynomials to the paint within reach."""
    offsets = np.arange(-settings.reach, settings.reach + 1)
    columns = _columns(curves, settings)[:, None] + offsets[:, None]
    paint = np.nan_to_num(np.clip(_sampled(contrast, columns) - noise, 0, 3 * settings.paint))
    paint[:, np.abs(offsets)[:, None] > settings.reach * np.clip(_depth(settings), settings.narrow, 1)] = 0
    paint[:, :, : settings.region] = 0
    weights = paint.sum(1)
    means = (paint * columns).sum(1) / np.maximum(weights, 1e-9)
    return _fitted(_ROWS, means, weights / settings.paint, settings)


def _chosen(
    curves: np.ndarray,
    edges: np.ndarray,
    contrast: np.ndarray,
    noise: float,
    before: list[Lanes],
    settings: HoughSettings,
) -> Lanes:
    """Drop what has no paint and what is another lane already, and score the rest."""
    columns = _columns(curves, settings)
    columns[:, : settings.region] = np.nan
    paint = np.stack([_sampled(contrast, columns + step) for step in (-1, 0, 1)])
    rows = np.isfinite(paint[1]).sum(1)
    evidence = np.nansum(paint.mean(0), 1) / np.sqrt(np.maximum(rows, 1)) / noise
    order = np.flatnonzero((evidence > settings.evidence) & (rows > 20))
    order = order[evidence[order].argsort()[::-1]]
    distance = np.nan_to_num(np.abs(columns[order, None] - columns[order])[:, :, settings.region + 30 :].mean(-1))
    order = order[_first_of_doubles(distance < settings.apart)]
    off = _off_vanishing_point(_columns(curves[order], settings), evidence[order], settings)
    keep = off < settings.stray
    order, off = order[keep], off[keep]
    near_edges = np.stack([_sampled(edges, columns[order] + step) for step in range(-6, 7)]).max(0)
    seen = paint[:, order].max(0)
    strongest = np.nanquantile(seen, 0.98) if len(order) else 0.0
    bright = seen > max(settings.fresh * strongest, settings.least * noise)
    fresh = np.where(np.isfinite(seen), bright, np.nan)[:, settings.region :]
    parts = np.stack(
        [
            np.nanmean(near_edges[:, settings.region :], 1) if len(order) else np.empty(0),
            1 - _longest_gap(fresh) / np.maximum(rows[order], 1),
            np.nanmean(fresh, 1) if len(order) else np.empty(0),
            1 / (1 + (off / settings.vanishing) ** 2),
            _steadiness(columns[order], before, settings),
        ],
        1,
    )
    quality = np.exp((np.log(np.maximum(parts, 1e-6)) * settings.weights).sum(1))
    best = quality.argsort()[::-1]
    return Lanes(columns[order][best], quality[best], parts[best])


def _first_of_doubles(double: np.ndarray) -> np.ndarray:
    """Which entries to keep, in their order, so that no two are doubles of each other: (n, n) to (n,)."""
    keep = np.zeros(len(double), bool)
    for entry, others in enumerate(double):
        keep[entry] = not (others & keep).any()
    return keep


def _off_vanishing_point(columns: np.ndarray, evidence: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """How many columns each lane (n, HEIGHT) passes beside the point where most evidence meets; 0 without one."""
    upper, lower = settings.region + 10, HEIGHT - 30
    slope = (columns[:, lower] - columns[:, upper]) / (lower - upper)
    start = columns[:, upper] - slope * upper
    with np.errstate(divide="ignore", invalid="ignore"):
        row = (start - start[:, None]) / (slope[:, None] - slope)  # where each pair meets
    row = np.where((row > 0) & (row < settings.region), row, np.nan)
    passes = start + slope * row[:, :, None]  # (n, n, n): where each lane crosses the row of each pair
    off = np.abs(passes - (start + slope * row)[:, :, None])
    agreeing = ((off < settings.vanishing) * evidence).sum(-1)
    if not len(columns) or not agreeing.max():
        return np.zeros(len(columns))
    return off[np.unravel_index(agreeing.argmax(), agreeing.shape)]


def _longest_gap(fresh: np.ndarray) -> np.ndarray:
    """The longest run of rows without fresh paint: (n, rows) of 0, 1 and NaN (outside of the picture) to (n,)."""
    worn = fresh == 0
    count = worn.cumsum(1)
    since = count - np.maximum.accumulate(np.where(worn, 0, count), 1)
    return since.max(1, initial=0)


def _steadiness(columns: np.ndarray, before: list[Lanes], settings: HoughSettings) -> np.ndarray:
    """How little each lane has moved against the same lane in each picture before; 1 without one."""
    moved = [np.abs(columns[:, None] - old.columns)[:, :, settings.region + 30 :].mean(-1) for old in before]
    nearest = np.stack([row.min(1, initial=settings.apart) for row in moved]) if before else np.zeros((1, len(columns)))
    return 1 / (1 + (nearest.mean(0) / settings.sway) ** 2)
