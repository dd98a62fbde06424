"""Measures of quality with a reference, and how well scores agree with them and with the order of levels."""

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
    """Gradient magnitude similarity deviation (Xue et al., 2014, arXiv 1308.3052) of grey pictures; 0 means equal.

    Args:
        reference: grey values from 0 to 255, (N, H, W), both sides at least 6.
        distorted: the same shape.

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
    """The share of pairs of each ladder that are in the right order: the weaker distortion has the higher score.

    Equal scores count as half a pair, so constant scores have 0.5.

    Args:
        scores: (N, L), from the weakest to the strongest distortion.

    Returns:
        (N,).

    Raises:
        DataError: a score is no number.
    """
    if not np.isfinite(scores).all():
        raise DataError("a score is infinite or not a number", hint="lower the learning rate")
    weaker, stronger = np.triu_indices(scores.shape[1], 1)
    return (1 + np.sign(scores[:, weaker] - scores[:, stronger])).mean(1) / 2


def agreement(scores: Scores, quality: Scores) -> dict[str, float]:
    """How well scores agree with measured quality, both (N,): `srcc` (Spearman), `krcc` (Kendall), and `plcc` (Pearson
    after a monotone logistic function of four parameters, as VQEG has it).

    Scores that are all the same, or fewer than five, agree with nothing: 0.
    """
    if len(scores) < 5 or any(np.ptp(values) == 0 or values.std() == 0 for values in (scores, quality)):
        return {"srcc": 0.0, "plcc": 0.0, "krcc": 0.0}
    return {
        "srcc": float(spearmanr(scores, quality).statistic),
        "plcc": float(pearsonr(_logistic(scores, quality), quality).statistic),
        "krcc": float(kendalltau(scores, quality).statistic),
    }


def _logistic(scores: Scores, quality: Scores) -> Scores:
    """The scores mapped to quality by the logistic function that fits best, or as they are if none fits."""
    standard = (scores - scores.mean()) / scores.std()
    low, high = quality.min(), quality.max()

    def curve(x: Scores, bottom: float, top: float, middle: float, slope: float) -> Scores:
        return bottom + (top - bottom) * expit(slope * (x - middle))

    try:
        with warnings.catch_warnings(action="ignore"):  # of a covariance that nobody asked for
            fitted, _ = curve_fit(curve, standard, quality, (low, high, 0.0, 1.0), maxfev=5000)
    except RuntimeError:
        return standard
    mapped = curve(standard, *fitted)
    return mapped if np.isfinite(mapped).all() and np.ptp(mapped) > 0 else standard


def report(scores: Scores, kinds: Scores, seen: Scores, quality: Scores, names: Sequence[str]) -> dict[str, Any]:
    """The measures of scores of ladders, of kinds that were taught and of others; with a table of each kind.

    Args:
        scores: (N, L). kinds: place of each ladder's kind in `names`, (N,). seen: whether it was taught, (N,).
        quality: measured with the reference, (N, L).
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
