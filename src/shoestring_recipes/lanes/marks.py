"""What a network marks, as edges for the Hough transform; and lanes drawn over a picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.nn.functional as F
from scipy.ndimage import maximum_filter1d
from torch import Tensor

from shoestring_recipes.lanes.hough import HOUGH, Lanes
from shoestring_recipes.lanes.roads import HEIGHT, WIDTH

MARK = 0.2
"""Least mark, from 0 to 1, that counts as an edge."""
RIDGE = 0.8
"""Least mark of a ridge, as a fraction of its highest in the same row."""
MARKED = replace(HOUGH, evidence=0.0)
"""Settings for a network's marks, which are evidence in themselves. Like `MARK`, they are those of a few with which the
network agrees best with what the Hough transform finds on the same pictures before they are spoilt."""


def edges_of(output: Tensor, least: float = MARK) -> np.ndarray:
    """Edges (N, HEIGHT, WIDTH): where the marks of a network, logits (N, rows, columns), are at least so high, and not
    much lower than the highest in their neighbourhood. Ridges stay several columns wide: those of a flat lane, which
    crosses several columns in a row, would fall apart otherwise."""
    marks = F.interpolate(output[:, None].float().sigmoid(), (HEIGHT, WIDTH), mode="bilinear")[:, 0].cpu().numpy()
    return (marks >= least) & (marks >= RIDGE * maximum_filter1d(marks, 9, axis=2))


def overlay(image: np.ndarray, lanes: Lanes) -> np.ndarray:
    """The picture as uint8 (HEIGHT, WIDTH, 3) with each lane from red (quality 0) to green (1)."""
    drawn = np.repeat(image[:, :, None], 3, 2)
    distance = np.abs(np.arange(WIDTH) - lanes.columns[:, :, None]) < 1.5
    for lane, quality in zip(distance[::-1], lanes.quality[::-1], strict=True):
        drawn[lane] = (255 * (1 - quality), 255 * quality, 0)
    return drawn
