"""Linear probes, which measure how well codes predict classes and domains, and sheets of images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def probe(codes: Tensor, targets: Tensor) -> float:
    """Balanced accuracy of a logistic regression from codes (N, D) to `targets` (N,), fitted on the samples with even
    numbers and evaluated on the others. NaN if the halves differ in their targets, or have only one target."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score

    values, answers = codes.float().cpu().numpy(), targets.cpu().numpy()
    first, second = (np.unique(answers[start::2]) for start in (0, 1))
    if len(first) < 2 or not np.array_equal(first, second):
        return math.nan
    values = (values - values[::2].mean(0)) / (values[::2].std(0) + 1e-6)
    regression = LogisticRegression(class_weight="balanced", max_iter=500).fit(values[::2], answers[::2])
    return float(balanced_accuracy_score(answers[1::2], regression.predict(values[1::2])))


def sheet(rows: Sequence[Tensor], scale: int = 3) -> Tensor:
    """Arrange rows of images (n, 1, S, S) with values from 0 to 1 in one image, uint8 (1, H, W), enlarged."""
    lines = [F.pad(row.float(), (1, 1, 1, 1), value=0.5).movedim(0, 2).flatten(2) for row in rows]
    large = F.interpolate(torch.cat(lines, 1)[None], scale_factor=scale, mode="nearest")[0]
    return (255 * large).round().clamp(0, 255).to(torch.uint8)
