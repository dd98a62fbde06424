"""How many steps of DDP a step of a method is worth: what the loss falls by, not what the step takes.

The values were measured with GPTs of 0.6 million parameters, trained from scratch for 100 to 600 steps by four replicas
with AdamW, at learning rates tuned for each. They depend on the model, the batch and the length of the run. So they are
a start, and `comm.auto.worth` is for values of one's own.
"""

from __future__ import annotations

import math
from itertools import pairwise

from shoestring.comm.local.schedule import merges_per_step
from shoestring.comm.settings.local_steps import PLAIN, LocalSGD, LocalSteps
from shoestring.comm.settings.per_step import BF16, Dense, Exchange, PowerSGD, Quantize

LOW_RANK = 0.5
"""PowerSGD of rank 4 was worth 0.42 to 0.57; higher ranks are worth more."""
AVERAGED = ((1, 0.85), (4, 0.77), (8, 0.7), (16, 0.61), (32, 0.46), (128, 0.3))
"""(steps between two averages and twice the steps that each is late, worth); the ends are extrapolated."""
LOSSLESS = {*PLAIN, "sign"}
"""Codecs of weights' changes that cost nothing that could be measured."""


def estimate_worth(method: Exchange | LocalSteps, total: int) -> float | None:
    """Steps of DDP that a step is worth in a run of `total` steps, 0 where that is open; None if nothing is known."""
    if isinstance(method, Dense | BF16) or (isinstance(method, Quantize) and (method.feedback or method.bits == 8)):
        return 1.0
    if isinstance(method, PowerSGD):
        return LOW_RANK
    if isinstance(method, LocalSGD) and method.codec in LOSSLESS:
        starting = min(1.0, method.start / total) if total else 0.0
        period = 1 / merges_per_step(method.every, method.final_every, total)
        return starting + (1 - starting) * _averaged(period + 2 * method.delay)
    return None


def _averaged(period: float) -> float:
    """Interpolated in the logarithm of the period."""
    for (shorter, more), (longer, less) in pairwise(AVERAGED):
        if period <= longer:
            return more + (less - more) * math.log(period / shorter) / math.log(longer / shorter)
    return AVERAGED[-1][1]
