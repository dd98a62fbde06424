"""Searches for the decay factor of masked weights during the first steps of the run.

In the paper (Hu et al., 2024), the factor is chosen so that masks flip a little less often than in dense training: the
ratio of the two flip rates should lie in [0.60, 0.95]. The authors measure the ratio of flip rates with short runs, one
per factor and one dense run. However, whether a weight's mask flips depends only on the gradient and decay of that
weight. One run can therefore measure all factors at once, at the same learning rate: each row of 4×4 tiles is assigned
to one factor or to dense training.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Self

import torch
from torch import Tensor

from shoestring.sparse.product import unpack

log = logging.getLogger("shoestring")

LOWEST, HIGHEST = 0.60, 0.95
"""Range in which the ratio of flip rates should lie (Hu et al., 2024)."""
AIM = 0.80
"""Ratio of flip rates that the search aims at."""
STEPS_OF_TEN = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
"""Exponents of ten: the search tries the start factor times 10 to each of these powers."""
LOOKS = 16
"""Number of times that masks are compared during the search."""


class Search:
    """Counts the mask flips of each cohort of rows: cohort 0 trains dense, cohort k trains with `factors[k - 1]`.

    Args:
        steps: duration of the search in steps.
        start: decay factor around which the search tries other factors.
    """

    def __init__(self, steps: int, start: float) -> None:
        self.steps, self.start = steps, start
        self.interval = max(1, steps // LOOKS)
        self.factors = [start * 10**power for power in STEPS_OF_TEN]
        self.before: dict[str, Tensor] = {}
        self.flips = torch.zeros(1 + len(self.factors), dtype=torch.float64)
        self.seen = torch.zeros_like(self.flips)

    @classmethod
    def over(cls, total: int, share: float, start: float) -> Self | None:
        """Create a search over a share of the run's `total` steps; None if `share` or `start` is 0, or `total` is 0
        (unknown)."""
        steps = math.ceil(share * total)
        return cls(steps, start) if steps and start else None

    def cohorts(self, rows: int, device: torch.device) -> Tensor:
        """The cohort of each row of a weight, the same for the four rows of a tile; int64 (rows,)."""
        return torch.arange(rows, device=device) // 4 % (1 + len(self.factors))

    def factors_of_rows(self, rows: int, device: torch.device) -> Tensor:
        """The decay factor of each row, 0 in the dense cohort; fp64 (rows,)."""
        return torch.tensor([0.0, *self.factors], dtype=torch.float64, device=device)[self.cohorts(rows, device)]

    def see(self, name: str, wanted: Tensor, step: int) -> Tensor:
        """Count the flips of a layer's packed mask since the last call.

        Returns:
            The mask to train with; rows of the dense cohort are all ones.
        """
        cohorts = self.cohorts(len(wanted), wanted.device)
        if name in self.before and step > self.steps // 4:  # flip rates adapt slowly to the factors
            changed = unpack(wanted ^ self.before[name], 8 * wanted.shape[1]).sum(1).double()
            self.flips.index_add_(0, cohorts.cpu(), changed.cpu())
            self.seen.index_add_(0, cohorts.cpu(), torch.full_like(changed, 8 * wanted.shape[1]).cpu())
        self.before[name] = wanted
        return wanted.masked_fill((cohorts == 0)[:, None], 255)

    def ratios(self) -> list[float]:
        """Flip rate with each factor, divided by the flip rate of the dense cohort; empty if no mask of that cohort
        flipped."""
        rates = self.flips / self.seen.clamp_min(1)
        return (rates[1:] / rates[0]).tolist() if rates[0] > 0 else []

    def found(self) -> float:
        """Return and log the decay factor at which the flip-rate ratio is AIM, interpolated between the factors
        tried."""
        ratios = self.ratios()
        if not ratios:
            log.warning("sparse: no mask changed while the decay factor was searched; it stays %.2g", self.start)
            return self.start
        factor, ratio = interpolated(self.factors, ratios)
        level = logging.INFO if LOWEST <= ratio <= HIGHEST else logging.WARNING
        log.log(
            level, "sparse: decay factor %.2g, where masks flip %.2f times as often as in dense training", factor, ratio
        )
        return factor

    def state_dict(self) -> dict[str, Any]:
        return {"before": dict(self.before), "flips": self.flips, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = {name: mask.clone() for name, mask in state_dict["before"].items()}
        self.flips.copy_(state_dict["flips"])
        self.seen.copy_(state_dict["seen"])


def interpolated(factors: list[float], ratios: list[float], aim: float = AIM) -> tuple[float, float]:
    """Interpolate the factor at which the ratio falls to `aim`, linearly in log(factor); return (factor, ratio).

    If all ratios are above `aim`, return the largest factor; if all are below, return the smallest.

    Args:
        factors: ascending.
        ratios: one per factor. Ratios should fall as the factor grows; a rise is treated as noise and replaced by the
            lowest earlier ratio.
    """
    falling = [min(ratios[: index + 1]) for index in range(len(ratios))]
    if falling[0] <= aim:
        return factors[0], falling[0]
    for index in range(1, len(factors)):
        if falling[index] <= aim:
            part = (falling[index - 1] - aim) / (falling[index - 1] - falling[index])
            return factors[index - 1] * (factors[index] / factors[index - 1]) ** part, aim
    return factors[-1], falling[-1]
