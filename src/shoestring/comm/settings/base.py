"""What all exchanges of gradients at every step have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Feature, Saving, Seam

if TYPE_CHECKING:
    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Exchange(Feature):
    """An exchange of gradients at every step: a codec, and how its messages are cut and routed."""

    parts: int = 2
    """Exchanges a step; the first ones travel while the backward pass still computes."""
    channels: int = 1
    """Exchanges that may travel at once, each by a process group of its own."""
    torus: bool = True
    """With several ranks on several hosts: sum inside hosts first, and use the codec between hosts only."""
    budget_kb: float = 0.0
    """kB that may leave a rank in a step, on average: as many parameters are sent as that pays for, the others are
    owed. 0 sends all."""
    select: Literal["auto", "hypernetwork", "knapsack", "uniform"] = "auto"
    """The method that chooses the parameters to send within `budget_kb`; "auto" takes the one that measured best, the
    hypernetwork."""

    seams: ClassVar = (Seam.WIRE,)
    alone: ClassVar = False
    """Whether it does its part of the optimizer's work on one rank too, where nothing travels."""

    @abstractmethod
    def codec(self) -> Codec:
        """A new codec with these settings, for all parameters."""

    def selecting(self) -> Codec:
        """A new codec with these settings, for those parameters that are selected."""
        if not self.budget_kb:
            return self.codec()
        from shoestring.comm.selection.hypernetwork import Hypernetwork
        from shoestring.comm.selection.knapsack import Knapsack
        from shoestring.comm.selection.select import Selected, Uniform

        selectors = {"auto": Hypernetwork, "hypernetwork": Hypernetwork, "knapsack": Knapsack, "uniform": Uniform}
        return Selected(self.codec, selectors[self.select](), 1e3 * self.budget_kb)

    @property
    def cost(self) -> str:
        """What the saving costs, in words."""
        return "gradients are approximate; what is left out is added later"

    @property
    def together(self) -> bool:
        """Whether the codec must have all gradients of a step at once, so that `parts` does not apply."""
        return False

    @property
    def exchanges(self) -> int:
        """Exchanges a step."""
        return 1 if self.together else self.parts

    def check(self, job: Job) -> None:
        for name in ("parts", "channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{self.name}.{name}` must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.budget_kb < math.inf:
            raise ConfigError(f"`{self.name}.budget_kb` must be a number of kB, got {self.budget_kb}")
        if self.select != "auto" and not self.budget_kb:
            raise ConfigError(
                f'`{self.name}.select = "{self.select}"` has nothing to choose: all parameters are sent',
                hint="set `budget_kb` to the kB that a step may send",
            )
        if any(getattr(module, "sparse", False) is True for module in job.model.modules()):
            raise ConfigError(
                f"`{self.name}` does not exchange sparse gradients", hint="use nn.Embedding(sparse=False)"
            )

        from shoestring._torch import has_hook

        if has_hook(job.model):
            raise ConfigError(
                "DDP has a communication hook already, and takes only one",
                hint=f"register none, or leave `{self.name}` out",
            )
        sharded = {each for feature in job.features if feature.engine == "fsdp" for each in feature.over}
        if job.world.ranks_over(DATA) > 1 and sharded.issuperset(DATA):
            raise ConfigError(
                f"`{self.name}` has nothing to exchange: the model is sharded over all ranks",
                hint='shard inside hosts only, with parallel.fsdp.hosts = "leave"',
            )

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.comm.exchange.attached import install

        install(job, self)

    def explain(self, job: Job) -> str:
        hosts, local = job.world.ranks_over([HOSTS]), job.world.ranks_over([LOCAL])
        if hosts * local == 1:
            return "one rank: nothing travels" if self.alone else "off: one rank"
        by_rows = self.torus and hosts > 1 and local > 1
        between = f"{hosts} hosts, of sums inside each" if by_rows else f"{hosts * local} ranks"
        select = "hypernetwork" if self.select == "auto" else self.select
        parts = f"{select} within {self.budget_kb:g} kB a step, " if self.budget_kb else ""
        parts += f"in {self.exchanges} parts " if self.exchanges > 1 else ""
        return f"between {between}, {parts}{'during the backward pass' if job.engine == 'ddp' else 'before the step'}"

    def saving(self, trace: Trace) -> Saving | None:
        facts = trace.facts
        if not facts.get("wire_steps"):
            return None
        exposed = facts["wire_exposed"] / facts["wire_steps"]
        return Saving(
            unit="MB sent a rank and step",
            used=facts["wire_bytes"] / facts["wire_steps"] / 1e6,
            without=facts["wire_without"] / 1e6,
            measured=True,
            cost=f"{self.cost}; {1e3 * exposed:.0f} ms a step that nothing hid",
        )
