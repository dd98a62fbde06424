"""What differential checkpoints ask of whoever exchanges gradients, and which features' steps they can replay."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Seam

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.feature import Feature
    from shoestring.core.job import Job

REPLAYED = frozenset(
    {
        "precision.autocast",
        "memory.broker",
        "memory.chunkedloss",
        "memory.lora",
        "memory.recompute",
        "memory.tracing",
        "graph.compile",
        "parallel.ddp",
        "optim.adamw",
        "optim.clip",
        "optim.ema",
        "optim.lamb",
        "optim.lars",
        "optim.lawa",
        "optim.muon",
        "optim.schedule",
        "optim.schedulefree",
        "optim.sgd",
        "checkpoint.tiered",
        "profile.callpaths",
    }
)
"""Features whose work around the optimizer's step follows from weights, averaged gradients and progress alone. One that
is not listed says so itself: `why_not_replayed(job)` gives the reason with what to do, or nothing."""


@runtime_checkable
class KeptAverages(Protocol):
    """What is kept under `Job.kept` by an exchange whose averages can be kept and replayed."""

    @property
    def averages_form(self) -> str:
        """What kept averages depend on: they are replayed only where it is the same."""
        ...

    def keep_averages(self) -> None:
        """Keep what the averages of each step from now on are decoded from, until the next step."""
        ...

    def averages(self) -> list[list[Tensor]] | None:
        """What the averages of the newest step were decoded from, equal on all ranks; None if not finite."""
        ...

    def replayed(self, averages: Sequence[Sequence[Tensor]]) -> AbstractContextManager[None]:
        """Give every trained parameter its gradient from kept averages; the optimizer's step inside exchanges none."""
        ...


def check(job: Job, name: str) -> None:
    """Raise ConfigError where steps of this job cannot be replayed from what its ranks exchange.

    Args:
        name: the setting's, for the error.
    """
    if job.world.ranks_over(DATA) == 1:
        return
    for feature in job.features:
        if reason := _refusal(feature, job):
            raise ConfigError(f"`{name}` cannot replay the steps of `{feature.name}`", hint=reason)
    if not any(Seam.WIRE in feature.seams for feature in job.features):
        hint = "add [comm.quantize], or [comm.dense] for exact gradients"
        raise ConfigError(f"`{name}` keeps what a codec exchanges, and no codec is on", hint=hint)


def _refusal(feature: Feature, job: Job) -> str:
    says = getattr(feature, "why_not_replayed", None)
    if says is not None:
        return str(says(job))
    return "" if feature.name in REPLAYED else "remove one of the two"
