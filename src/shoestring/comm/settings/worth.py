"""Number of DDP steps that a step of each method is worth, measured by how far the loss falls, not by how long a step
takes.

The values were measured with GPTs of 0.6 million parameters, trained from scratch for 100 to 600 steps by four replicas
with AdamW, at learning rates tuned for each method. The values depend on the model, the batch and the length of the
run. They serve only as defaults, which `comm.auto.worth` overrides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from shoestring.comm.local.schedule import merges_per_step
from shoestring.comm.settings.base import Exchange
from shoestring.comm.settings.local_steps import PLAIN, LocalSGD, LocalSteps
from shoestring.comm.settings.per_step import BF16, Dense, PowerSGD, Quantize, Sign

LOW_RANK = 0.5
"""PowerSGD of rank 4 was worth 0.42 to 0.57; higher ranks are worth more."""
OWN = ((1, 0.85), (4, 0.77), (8, 0.7), (16, 0.61), (32, 0.46), (128, 0.3))
"""(period, worth) if each replica's Adam divides by its own second moment; the first and last entries are extrapolated.

The period is the number of steps between two averages, plus twice the delay of each average in steps."""
GLOBAL = ((4, 0.94), (8, 0.8), (16, 0.7), (32, 0.6), (128, 0.4))
"""(period, worth) if replicas estimate the second moment of their mean gradient; the last entry is extrapolated."""
SIGNS = 0.85
"""Maximum worth of averaging signs, even in short periods, if replicas estimate the second moment of their mean
gradient. Without the estimate, signs are worth as much as fp32."""
GRADIENT_SIGNS = ((64, 0.48), (512, 0.28))
"""(entries per scale, worth) of exchanging signs of gradients at every step; the first and last entries are
extrapolated."""


def estimate_worth(method: Exchange | LocalSteps, total: int) -> float | None:
    """Estimate how many DDP steps a step of `method` is worth, or None; `total` is the run's length (0 if unknown)."""
    if isinstance(method, Dense | BF16) or (isinstance(method, Quantize) and (method.feedback or method.bits == 8)):
        return 1.0
    if isinstance(method, PowerSGD):
        return LOW_RANK
    if isinstance(method, Sign):
        return _interpolate(GRADIENT_SIGNS, method.group_size)
    if isinstance(method, LocalSGD) and method.codec in (*PLAIN, "sign"):
        starting = min(1.0, method.start / total) if total else 0.0
        period = 1 / merges_per_step(method.every, method.final_every, total)
        estimated = method.second_moment == "global"
        most = SIGNS if estimated and method.codec == "sign" else 1.0
        worth = min(most, _interpolate(GLOBAL if estimated else OWN, period + 2 * method.delay))
        return starting + (1 - starting) * worth
    return None


def _interpolate(measured: Sequence[tuple[float, float]], period: float) -> float:
    """Interpolate in the logarithm of the period, or of the number of entries; constant beyond both ends."""
    period = min(max(period, measured[0][0]), measured[-1][0])
    (shorter, more), (longer, less) = next(pair for pair in pairwise(measured) if period <= pair[1][0])
    return more + (less - more) * math.log(period / shorter) / math.log(longer / shorter)
