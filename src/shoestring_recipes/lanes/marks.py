"""Turns a network's marks into edges for the Hough transform, and draws lanes over an image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.nn.functional as F
from scipy.ndimage import maximum_filter1d
from torch import Tensor

from shoestring_recipes.lanes.hough import HOUGH, Lanes
from shoestring_recipes.lanes.roads import HEIGHT, WIDTH

MARK = 0.2
"""Minimum value of a mark, from 0 to 1, that counts as an edge."""
RIDGE = 0.8
"""Minimum value of a mark on a ridge, as a fraction of the ridge's maximum in the same row."""
MARKED = replace(HOUGH, evidence=0.0)
"""Settings for a network's marks, which need no further evidence. These settings and `MARK` were chosen from a few
candidates, by the network's agreement with the Hough transform on the same images without added degradation."""


def edges_of(output: Tensor, least: float = MARK) -> np.ndarray:
    """Return the edges, (N, HEIGHT, WIDTH), in a network's marks, given as logits (N, rows, columns). Edges are pixels
    whose mark is at least `least` and not much below the maximum in the neighbourhood. Ridges stay several columns
    wide; otherwise the ridge of a flat lane, which spans several columns per row, would break up."""
    marks = F.interpolate(output[:, None].float().sigmoid(), (HEIGHT, WIDTH), mode="bilinear")[:, 0].cpu().numpy()
    return (marks >= least) & (marks >= RIDGE * maximum_filter1d(marks, 9, axis=2))


def overlay(image: np.ndarray, lanes: Lanes) -> np.ndarray:
    """Draw lanes over an image, in colours from red (quality 0) to green (quality 1); returns uint8 (HEIGHT, WIDTH,
    3)."""
    drawn = np.repeat(image[:, :, None], 3, 2)
    distance = np.abs(np.arange(WIDTH) - lanes.columns[:, :, None]) < 1.5
    for lane, quality in zip(distance[::-1], lanes.quality[::-1], strict=True):
        drawn[lane] = (255 * (1 - quality), 255 * quality, 0)
    return drawn
