"""Settings of the memory budget: a limit on peak memory, which a run meets at the lowest cost in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace

Knob = Literal["accumulate", "recompute", "zero", "fsdp", "offload", "activations", "8bit"]


@dataclass(frozen=True, kw_only=True)
class BudgetChoice:
    """The techniques chosen for a run with [memory.budget]; this class is an output, and never part of a run file."""

    chosen: str
    """Description of the chosen techniques."""
    accumulate: int
    """Number of micro-batches per step."""
    replaced: tuple[str, ...] = ()
    """Names of the run's features that the added features replace."""
    added_features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of the added features, by the feature's name."""
    rounded: bool = False
    """Whether the optimizer state of AdamW is stored in 8 bits."""
    predicted_gib: float
    """Predicted peak memory in GiB."""
    without_gib: float
    """Predicted peak memory in GiB without the chosen techniques."""
    added: float
    """Predicted additional time of a step, as a fraction of the step time without the chosen techniques."""


@dataclass(frozen=True, kw_only=True)
class Budget(Feature):
    """Keep peak memory below a limit: before training, choose techniques that reduce it at the least cost in time."""

    gib: float
    """Maximum peak memory of a rank in GiB, as counted by torch's allocator."""
    allow: tuple[Knob, ...] = ("accumulate", "recompute", "zero", "fsdp", "offload", "activations", "8bit")
    """Techniques that may be chosen: smaller micro-batches, selective recomputation, [memory.zero], [parallel.fsdp],
    [memory.offload], [memory.offloadactivations], and [optim.adamw8bit], which rounds optimizer state and is chosen
    only if nothing else fits."""

    seams: ClassVar = (Seam.MODEL,)
    retired: ClassVar = ("chosen", "predicted_gib", "without_gib", "added")

    def check(self, attachments: Attachments) -> None:
        self.check_limit()
        raise ConfigError(
            f"`{self.name}` works only in run files, because it chooses features before a job is built",
            hint="attach the features that `shoestring check run.toml` shows as chosen",
        )

    def check_limit(self) -> None:
        if self.gib <= 0:
            raise ConfigError(f"`{self.name}.gib` must be positive, got {self.gib}")

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class SettledBudget(Budget):
    """A budget together with the techniques chosen for it, as a feature of a job."""

    choice: BudgetChoice

    @property
    def name(self) -> str:
        return Budget(gib=self.gib).name

    @property
    def requested(self) -> Budget:
        """The budget as written in the run file."""
        return Budget(gib=self.gib, allow=self.allow)

    def check(self, attachments: Attachments) -> None:
        self.check_limit()

    def explain(self, attachments: Attachments) -> str:
        choice = self.choice
        peaks = f"{choice.predicted_gib:.3g} GiB predicted of {self.gib:.3g}, {choice.without_gib:.3g} without"
        longer = f"; a step takes {figures.percent(choice.added)} longer" if choice.added >= 0.005 else ""
        return f"{choice.chosen}; {peaks}{longer}"

    def reduction(self, trace: Trace) -> Reduction | None:
        return Reduction(
            unit="GiB at the peak of a rank",
            used=self.choice.predicted_gib,
            without=self.choice.without_gib,
            measured=False,
            cost=f"{self.choice.chosen}: {figures.percent(self.choice.added)} of a step's time, predicted",
        )
