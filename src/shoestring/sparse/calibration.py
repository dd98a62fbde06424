"""The decay factor, found while the run begins: rows train with different factors, dense rows among them.

Hu et al. (2024) choose the factor so that masks flip a little less often than they would in dense training: the ratio
of the two flip rates is to lie in [0.60, 0.95]. They measure it by short runs, one for each factor and a dense one.
Flips depend on a weight's own gradient and decay, so here one run measures all at once, at the same learning rate: the
rows of 4×4 tiles are dealt out in turn to the factors tried and to dense training.
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
AIM = 0.80
STEPS_OF_TEN = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
"""Powers of ten that the given factor is tried with."""
LOOKS = 16
"""How often masks are compared during the search."""


class Search:
    """The flips of each cohort of rows: cohort 0 is dense, cohort k trains with factor k - 1.

    Args:
        steps: how long the search takes.
        start: the factor around which others are tried.
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
        """A search over a share of a run; None where there is none, or the run's end is open."""
        steps = math.ceil(share * total)
        return cls(steps, start) if steps and start else None

    def cohorts(self, rows: int, device: torch.device) -> Tensor:
        """The cohort of each row of a weight: four rows after each other are in one; int64 (rows,)."""
        return torch.arange(rows, device=device) // 4 % (1 + len(self.factors))

    def factors_of_rows(self, rows: int, device: torch.device) -> Tensor:
        """fp64 (rows,)."""
        return torch.tensor([0.0, *self.factors], dtype=torch.float64, device=device)[self.cohorts(rows, device)]

    def see(self, name: str, wanted: Tensor, step: int) -> Tensor:
        """Count how many entries of a packed mask changed since it was last seen.

        Returns:
            The mask to train with: dense in the rows of the dense cohort.
        """
        cohorts = self.cohorts(len(wanted), wanted.device)
        if name in self.before and step > self.steps // 4:
            changed = unpack(wanted ^ self.before[name], 8 * wanted.shape[1]).sum(1).double()
            self.flips.index_add_(0, cohorts.cpu(), changed.cpu())
            self.seen.index_add_(0, cohorts.cpu(), torch.full_like(changed, 8 * wanted.shape[1]).cpu())
        self.before[name] = wanted
        return wanted.masked_fill((cohorts == 0)[:, None], 255)

    def ratios(self) -> list[float]:
        """The flip rate of each factor over that of dense training; empty where nothing flipped."""
        rates = self.flips / self.seen.clamp_min(1)
        return (rates[1:] / rates[0]).tolist() if rates[0] > 0 else []

    def found(self) -> float:
        """The factor whose ratio is the aim, between those tried; logged."""
        ratios = self.ratios()
        if not ratios:
            log.warning("sparse: no mask changed while the decay factor was searched; it stays %.2g", self.start)
            return self.start
        factor, ratio = interpolated(self.factors, ratios)
        said = log.info if LOWEST <= ratio <= HIGHEST else log.warning
        said("sparse: decay factor %.2g, where masks flip %.2f times as often as in dense training", factor, ratio)
        return factor

    def state_dict(self) -> dict[str, Any]:
        return {"before": dict(self.before), "flips": self.flips, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = {name: mask.clone() for name, mask in state_dict["before"].items()}
        self.flips.copy_(state_dict["flips"])
        self.seen.copy_(state_dict["seen"])


def interpolated(factors: list[float], ratios: list[float], aim: float = AIM) -> tuple[float, float]:
    """The factor at which the ratio falls to the aim, on a line over the factor's logarithm, and the ratio there.

    Args:
        factors: ascending. ratios: of each; taken to fall, so that one above its predecessor counts as that.
    """
    falling = [min(ratios[: index + 1]) for index in range(len(ratios))]
    if falling[0] <= aim:
        return factors[0], falling[0]
    for index in range(1, len(factors)):
        if falling[index] <= aim:
            part = (falling[index - 1] - aim) / (falling[index - 1] - falling[index])
            return factors[index - 1] * (factors[index] / factors[index - 1]) ** part, aim
    return factors[-1], falling[-1]
