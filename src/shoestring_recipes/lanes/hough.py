"""Detects lanes from edges in a region, by the probabilistic Hough transform and clustering, and rates each marking.

The edges come from Canny's filter or from a network (`task.py`); all later steps are the same for both.
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
    """Settings of all steps, for images of 320 × 180 pixels; lengths are in pixels, contrasts in 256 grey levels."""

    region: int = 75
    """First image row of the region that is searched for lanes."""
    sigma: float = 2.5
    """Standard deviation of the smoothing in Canny's filter."""
    thresholds: tuple[float, float] = (4.5, 15.0)
    """Low and high threshold of Canny's filter."""
    votes: int = 6
    """Minimum number of edge pixels on a line."""
    length: int = 10
    """Minimum length of a segment."""
    gap: int = 6
    """Maximum gap within a segment."""
    steepness: float = 6.0
    """Minimum height of a segment."""
    slope: float = 4.0
    """Maximum slope of a segment, in columns per row."""
    bottom_scale: float = 18.0
    """Scale of distances between segments in the bottom row; segments less than about one scale apart form a
    cluster."""
    slope_scale: float = 0.35
    """Scale of differences in slope between segments; segments less than about one scale apart form a cluster."""
    total: float = 40.0
    """Minimum total length of the segments of a lane."""
    bend: float = 30.0
    """Strength of the regularisation that keeps a lane straight, in rows of evidence."""
    reach: int = 20
    """Number of columns to each side in which paint is searched for, in the last row; fewer in rows farther away."""
    narrow: float = 0.3
    """Minimum of the reach in distant rows, as a fraction of `reach`."""
    half_widths: tuple[float, float] = (1.0, 4.0)
    """Half the width of a marking in the first row of the region and in the last row."""
    evidence: float = 6.0
    """Minimum ratio of a lane's contrast to the standard error of the contrast."""
    paint: float = 40.0
    """Contrast that counts as one row of evidence when a lane is moved to the nearby paint."""
    fresh: float = 0.35
    """Contrast above which paint counts as fresh, as a fraction of the strongest contrast of all lanes in the image."""
    least: float = 4.0
    """Contrast below which paint never counts as fresh, as a multiple of the image's noise."""
    apart: float = 14.0
    """Mean distance below which two lanes count as the same lane."""
    vanishing: float = 15.0
    """Distance from the common vanishing point, in columns, at which the parallelism of a lane is 0.5."""
    stray: float = 20.0
    """Distance from the common vanishing point, in columns, at and above which a candidate is not a lane."""
    sway: float = 6.0
    """Mean movement between images at which the steadiness of a lane is 0.5."""
    weights: tuple[float, float, float, float, float] = (0.1, 0.1, 0.6, 0.1, 0.1)
    """Weights of `PARTS` in the quality of a lane."""


HOUGH = HoughSettings()


class Lanes(NamedTuple):
    """The detected lanes of an image, the best lane first."""

    columns: np.ndarray
    """Column of each lane in each row, (n, HEIGHT); NaN above the region."""
    quality: np.ndarray
    """Quality of each lane, (n,), from 0 without paint to 1 with fresh paint; the weighted geometric mean of
    `parts`."""
    parts: np.ndarray
    """Values of `PARTS` for each lane, (n, 5), from 0 to 1."""


PARTS = ("support", "continuity", "contrast", "parallelism", "steadiness")

_ROWS = np.arange(HEIGHT, dtype=float)


def detect(
    image: np.ndarray,
    edges: np.ndarray | None = None,
    before: list[Lanes] | None = None,
    settings: HoughSettings = HOUGH,
) -> Lanes:
    """Detect the lanes in an image.

    Args:
        image: grey levels from 0 to 255, (HEIGHT, WIDTH).
        edges: map of the pixels at which lines may be, (HEIGHT, WIDTH); None takes the edges by Canny's filter.
        before: lanes of the previous images, from which the steadiness is computed.

    Raises:
        DataError: the image does not have the shape (HEIGHT, WIDTH).
    """
    image = np.asarray(image, dtype=float)
    if image.shape != (HEIGHT, WIDTH):
        hint = "`files.read` converts photos to this size"
        raise DataError(f"a picture has the shape {image.shape}, not ({HEIGHT}, {WIDTH})", hint=hint)
    edges = canny(image, settings.sigma, *settings.thresholds) if edges is None else edges.copy()
    edges[: settings.region] = False
    curves = _clustered(_segments(edges, settings), settings)
    contrast = _contrast(image, settings)
    noise = 1.4826 * np.median(np.abs(contrast[settings.region :] - np.median(contrast[settings.region :])))
    curves = _refined(curves, contrast, max(noise, 1.0), settings)
    return _chosen(curves, edges, contrast, max(noise, 1.0), before or [], settings)


def _segments(edges: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """Return the segments in an edge map that may belong to lanes, (n, 4): column and row of the upper end, then of the
    lower end."""
    least = settings.votes, settings.length, settings.gap
    lines = probabilistic_hough_line(edges, *least, rng=0)  # pyrefly: ignore[unexpected-keyword]
    ends = np.array(lines, dtype=float).reshape(-1, 2, 2)
    ends = np.take_along_axis(ends, ends[:, :, 1].argsort(1)[:, :, None], 1).reshape(-1, 4)
    across, down = ends[:, 2] - ends[:, 0], ends[:, 3] - ends[:, 1]
    return ends[(down > settings.steepness) & (np.abs(across) < settings.slope * down)]


def _clustered(segments: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """Cluster segments whose lines nearly agree; returns one polynomial in the row for each cluster, (n, 3)."""
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
    """Fit polynomials (n, 3) of degree two to weighted points by ridge regression, which keeps the curves nearly
    straight.

    Args:
        rows: rows of the points, (points,). columns: columns of the points, (points,) or (n, points). weights: weights
            of the points, (n, points).
    """
    t = (rows - HEIGHT) / (HEIGHT - settings.region)
    powers = np.stack([t**2, t, np.ones_like(t)])
    moments = np.einsum("ip,np,jp->nij", powers, weights, powers) + np.diag([settings.bend, 1e-3, 1e-3])
    targets = np.einsum("ip,np->ni", powers, weights * columns)
    return np.linalg.solve(moments, targets[:, :, None])[:, :, 0]


def _depth(settings: HoughSettings) -> np.ndarray:
    """Return the nearness of each row to the camera, (HEIGHT,): 0 in the first row of the region, 1 just below the last
    row."""
    return (_ROWS - settings.region) / (HEIGHT - settings.region)


def _columns(curves: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """Evaluate polynomials: returns their columns in all rows, (n, HEIGHT)."""
    t = _depth(settings) - 1
    return curves @ np.stack([t**2, t, np.ones_like(t)])


def _contrast(image: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """Subtract from each pixel the brighter of two pixels to its left and right, at a distance of about a marking's
    width."""
    smooth = gaussian_filter(image, 1)
    near, far = settings.half_widths
    aside = np.rint(near + (far - near) * np.clip(_depth(settings), 0, 1) + 4).astype(int)[:, None]
    columns, rows = np.arange(WIDTH), np.arange(HEIGHT)[:, None]
    left, right = (smooth[rows, np.clip(columns + step, 0, WIDTH - 1)] for step in (-aside, aside))
    return smooth - np.maximum(left, right)


def _sampled(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Sample a map at one column per row, given as (..., HEIGHT); NaN outside the image."""
    nearest = np.rint(columns)
    inside = (nearest >= 0) & (nearest < WIDTH)
    sampled = values[np.arange(HEIGHT), np.where(inside, nearest, 0).astype(int)]
    return np.where(inside, sampled, np.nan)


def _refined(curves: np.ndarray, contrast: np.ndarray, noise: float, settings: HoughSettings) -> np.ndarray:
    """Fit polynomials again, to the paint within `settings.reach`."""
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
    """Drop candidates without paint, duplicates, and candidates that miss the vanishing point; rate the remaining
    lanes."""
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
    # Steadiness is near 1 for a lane that has moved little since the previous images, and 1 without previous images.
    moved = [np.abs(columns[order, None] - old.columns)[:, :, settings.region + 30 :].mean(-1) for old in before]
    nearest = np.stack([row.min(1, initial=settings.apart) for row in moved]) if before else np.zeros((1, len(order)))
    steadiness = 1 / (1 + (nearest.mean(0) / settings.sway) ** 2)
    parts = np.stack(
        [
            np.nanmean(near_edges[:, settings.region :], 1) if len(order) else np.empty(0),
            1 - _longest_gap(fresh) / np.maximum(rows[order], 1),
            np.nanmean(fresh, 1) if len(order) else np.empty(0),
            1 / (1 + (off / settings.vanishing) ** 2),
            steadiness,
        ],
        1,
    )
    quality = np.exp((np.log(np.maximum(parts, 1e-6)) * settings.weights).sum(1))
    best = quality.argsort()[::-1]
    return Lanes(columns[order][best], quality[best], parts[best])


def _first_of_doubles(double: np.ndarray) -> np.ndarray:
    """Choose entries in order so that no two chosen entries are duplicates, given as a matrix (n, n); returns bool,
    (n,)."""
    keep = np.zeros(len(double), bool)
    for entry, others in enumerate(double):
        keep[entry] = not (others & keep).any()
    return keep


def _off_vanishing_point(columns: np.ndarray, evidence: np.ndarray, settings: HoughSettings) -> np.ndarray:
    """Return each lane's distance, in columns, from the point at which lanes with the most evidence meet; 0 if no lanes
    meet."""
    upper, lower = settings.region + 10, HEIGHT - 30
    slope = (columns[:, lower] - columns[:, upper]) / (lower - upper)
    start = columns[:, upper] - slope * upper
    with np.errstate(divide="ignore", invalid="ignore"):
        row = (start - start[:, None]) / (slope[:, None] - slope)  # row in which each pair of lanes meets
    row = np.where((row > 0) & (row < settings.region), row, np.nan)
    passes = start + slope * row[:, :, None]  # (n, n, n): column at which each lane crosses each pair's row
    off = np.abs(passes - (start + slope * row)[:, :, None])
    agreeing = ((off < settings.vanishing) * evidence).sum(-1)
    if not len(columns) or not agreeing.max():
        return np.zeros(len(columns))
    return off[np.unravel_index(agreeing.argmax(), agreeing.shape)]


def _longest_gap(fresh: np.ndarray) -> np.ndarray:
    """Return the length of each lane's longest run of rows without fresh paint, (n,). In `fresh`, (n, rows), 1 means
    fresh paint, 0 no fresh paint, and NaN outside the image."""
    worn = fresh == 0
    count = worn.cumsum(1)
    since = count - np.maximum.accumulate(np.where(worn, 0, count), 1)
    return since.max(1, initial=0)
