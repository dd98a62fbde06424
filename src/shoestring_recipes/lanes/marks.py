"""What a network marks, as edges for the Hough transform; and lanes drawn over a picture."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from scipy.ndimage import maximum_filter1d
from torch import Tensor

from shoestring_recipes.lanes.hough import Lanes
from shoestring_recipes.lanes.roads import HEIGHT, WIDTH


def edges_of(output: Tensor, share: float = 0.5) -> np.ndarray:
    """Edges (N, HEIGHT, WIDTH): the columns in which the marks of a network (N, rows, columns) are highest in their
    neighbourhood, and above a share of the highest mark there can be."""
    marks = F.interpolate(output[:, None].float().sigmoid(), (HEIGHT, WIDTH), mode="bilinear")[:, 0].cpu().numpy()
    return (marks > share) & (marks >= maximum_filter1d(marks, 9, axis=2))


def overlay(image: np.ndarray, lanes: Lanes) -> np.ndarray:
    """The picture as uint8 (HEIGHT, WIDTH, 3) with each lane from red (quality 0) to green (1)."""
    drawn = np.repeat(image[:, :, None], 3, 2)
    distance = np.abs(np.arange(WIDTH) - lanes.columns[:, :, None]) < 1.5
    for lane, quality in zip(distance[::-1], lanes.quality[::-1], strict=True):
        drawn[lane] = (255 * (1 - quality), 255 * quality, 0)
    return drawn
