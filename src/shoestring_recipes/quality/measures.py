"""Computes a measure of quality with a reference, and measures how well scores agree with that quality and with the
order of levels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import curve_fit
from scipy.special import expit
from scipy.stats import kendalltau, pearsonr, spearmanr
from torch import Tensor

from shoestring.core.errors import DataError
from shoestring.core.feature import Table

Scores = NDArray[Any]


def gmsd(reference: Tensor, distorted: Tensor) -> Tensor:
    """Compute the gradient magnitude similarity deviation (Xue et al., 2014, arXiv 1308.3052) of grey images; 0 means
    equal.

    Args:
        reference: undistorted images with grey values from 0 to 255, (N, H, W); H and W are at least 6.
        distorted: distorted images, with the same shape.

    Returns:
        (N,) float32.
    """
    prewitt = torch.tensor([[1.0, 0.0, -1.0]] * 3) / 3
    kernels = torch.stack([prewitt, prewitt.T])[:, None]
    small = F.avg_pool2d(torch.cat([reference, distorted])[:, None].float(), 2)
    first, second = F.conv2d(small, kernels).norm(dim=1).chunk(2)
    similarity = (2 * first * second + 170) / (first.square() + second.square() + 170)
    return similarity.flatten(1).std(1, correction=0)


def ordered_pairs(scores: Scores) -> Scores:
    """Return for each ladder (the distortion levels of one crop) the fraction of pairs of levels in the right order:
    the weaker distortion has the higher score.

    A pair with equal scores counts as half, so constant scores give 0.5.

    Args:
        scores: scores of N ladders, (N, L), from the weakest to the strongest distortion.

    Returns:
        (N,).

    Raises:
        DataError: a score is infinite or NaN.
    """
    if not np.isfinite(scores).all():
        raise DataError("a score is infinite or not a number", hint="lower the learning rate")
    weaker, stronger = np.triu_indices(scores.shape[1], 1)
    return (1 + np.sign(scores[:, weaker] - scores[:, stronger])).mean(1) / 2


def agreement(scores: Scores, quality: Scores) -> dict[str, float]:
    """Return the correlations of scores and measured quality, both (N,): `srcc` (Spearman), `krcc` (Kendall), and
    `plcc` (Pearson after a monotone logistic function with four parameters, as VQEG recommends).

    All correlations are 0 for constant scores or qualities, and for fewer than five scores.
    """
    if len(scores) < 5 or any(np.ptp(values) == 0 or values.std() == 0 for values in (scores, quality)):
        return {"srcc": 0.0, "plcc": 0.0, "krcc": 0.0}
    return {
        "srcc": float(spearmanr(scores, quality).statistic),
        "plcc": float(pearsonr(_logistic(scores, quality), quality).statistic),
        "krcc": float(kendalltau(scores, quality).statistic),
    }


def _logistic(scores: Scores, quality: Scores) -> Scores:
    """Map scores to quality by the best-fitting logistic function; if the fit fails, only standardise the scores."""
    standard = (scores - scores.mean()) / scores.std()
    low, high = quality.min(), quality.max()

    def curve(x: Scores, bottom: float, top: float, middle: float, slope: float) -> Scores:
        return bottom + (top - bottom) * expit(slope * (x - middle))

    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about the covariance, which is not used
            fitted, _ = curve_fit(curve, standard, quality, (low, high, 0.0, 1.0), maxfev=5000)
    except RuntimeError:
        return standard
    mapped = curve(standard, *fitted)
    return mapped if np.isfinite(mapped).all() and np.ptp(mapped) > 0 else standard


def report(scores: Scores, kinds: Scores, seen: Scores, quality: Scores, names: Sequence[str]) -> dict[str, Any]:
    """Return the measures of ladders' scores, separately for kinds seen in training and for other kinds, with a table
    of all kinds.

    Args:
        scores: scores of the ladders, (N, L). kinds: index of each ladder's kind in `names`, (N,). seen: whether the
            kind was seen in training, (N,).
        quality: quality measured by comparison with the reference, (N, L).
    """
    right = ordered_pairs(scores)
    results: dict[str, Any] = {}
    for name, chosen in (("seen", seen), ("unseen", ~seen)):
        if chosen.any():
            results[f"pairs_{name}"] = right[chosen].mean()
            agreed = agreement(scores[chosen].ravel(), quality[chosen].ravel())
            results |= {f"{measure}_{name}": value for measure, value in agreed.items()}
    rows = []
    for number, name in enumerate(names):
        if (chosen := kinds == number).any():
            agreed = agreement(scores[chosen].ravel(), quality[chosen].ravel())
            rows.append((name, "yes" if seen[chosen].all() else "no", right[chosen].mean(), *agreed.values()))
    head = ("distortion", "taught", "pairs in order", "SRCC", "PLCC", "KRCC")
    return results | {"kinds": Table(title="Held-out photos, by distortion", head=head, rows=tuple(rows))}
