"""Settings of replicas that train on their own and merge now and then."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, Feature, Saving, Seam

if TYPE_CHECKING:
    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.core.world import World

__all__ = ["DiLoCo", "LocalSGD", "LocalSteps", "SparseLoCo"]


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Feature):
    """What all ways of merging replicas every so many steps have in common.

    The last of `job.progress.total` steps merges everything, whatever the step is. A loop of one's own that does not
    set it ends with equal models only on a multiple of `every`.
    """

    every: int = 100
    """Steps that each replica makes on its own between two merges of the same weights."""
    start: int = 0
    """Steps at the beginning after each of which the replicas are averaged (post-local SGD)."""
    fragments: int = 1
    """Groups of layers that are merged one after the other, so that the link is used evenly (streaming)."""
    layout: Literal["strided", "sequential"] = "strided"
    """Which layers a group takes: every so-manyth one, or neighbours."""
    delay: int = 0
    """Steps that go on while an exchange travels, before its result is merged."""
    alpha: float = 0.5
    """Share of a replica's own weights that is left in a merge, where `delay` is not 0."""
    replica: Literal["auto", "host", "rank"] = "auto"
    """What trains on its own: a host or every rank; "auto" is hosts where there are several."""

    seams: ClassVar = (Seam.SHARD, Seam.STEP)

    @abstractmethod
    def make_codec(self) -> Codec:
        """A new codec, for what replicas tell each other."""

    @property
    def outer(self) -> tuple[float, float, bool]:
        """Learning rate, momentum, and whether that is Nesterov's, of the outer optimizer."""
        return 1.0, 0.0, False

    @property
    def over(self) -> tuple[str, ...]:
        return (HOSTS,) if self.replica == "host" else DATA

    @property
    def idle(self) -> bool:
        """Whether a single replica is left exactly as it would be without the feature."""
        return False

    def resolve(self, world: World) -> Self:
        if self.replica != "auto":
            return self
        return replace(self, replica="host" if world.ranks_over([HOSTS]) > 1 else "rank")

    def check(self, job: Job) -> None:
        self._check_numbers()
        if set(self.over) & set(job.replicas):
            raise ConfigError(
                f"`{self.name}`: the model is wrapped in DDP, which averages gradients of all ranks at every step",
                hint='give the bare model, with parallel.DDP(hosts="leave") where hosts have several ranks',
            )
        if (wire := self._exchanging(job)) is not None:
            raise ConfigError(
                f"`{wire.name}` exchanges gradients at every step, which `{self.name}` is there to avoid",
                hint=f"remove [{wire.name}] or [{self.name}]",
            )
        from shoestring.comm.local.fragments import units

        if self.fragments > (most := len(units(job.module))):
            raise ConfigError(
                f"`{self.name}.fragments` is {self.fragments}, and the model has {most} parts to share out"
            )

    def _check_numbers(self) -> None:
        def require(name: str, holds: bool, what: str) -> None:
            if not holds:
                raise ConfigError(f"`{self.name}.{name}` must {what}, got {getattr(self, name)}")

        require("every", self.every >= 1, "be at least 1")
        require("start", self.start >= 0, "not be negative")
        require("fragments", 1 <= self.fragments <= self.every, f"lie between 1 and `every` ({self.every})")
        require("delay", 0 <= self.delay < self.every, f"lie between 0 and `every` - 1 ({self.every - 1})")
        require("alpha", 0 <= self.alpha <= 1, "be a share")
        lr, momentum, _ = self.outer
        if not (lr > 0 and 0 <= momentum < 1):
            raise ConfigError(f"`{self.name}` needs an outer_lr above 0 and an outer_momentum in [0, 1)")

    def _exchanging(self, job: Job) -> Feature | None:
        """Who exchanges gradients over the dimensions that are to be left alone; inside DDP's it may."""
        inside = self.replica == "host" and job.engine == "ddp"
        return next((each for each in job.features if Seam.WIRE in each.seams and not inside), None)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.comm.exchange.replicas import begin_equal
        from shoestring.comm.local.outer_state import install

        if seam is Seam.SHARD:
            begin_equal([*job.module.parameters(), *job.module.buffers()], job.world.group(self.over))
        elif job.world.ranks_over(self.over) > 1 or not self.idle:
            install(job, self)

    def explain(self, job: Job) -> str:
        replicas = job.world.ranks_over(self.over)
        streamed = f", in {self.fragments} parts" if self.fragments > 1 else ""
        hidden = f", merged {self.delay} steps after they were sent" if self.delay else ""
        return f"{replicas} replica{'s' * (replicas > 1)}, merged every {self.every} steps{streamed}{hidden}"

    def saving(self, trace: Trace) -> Saving | None:
        facts = trace.facts
        if not facts.get("outer_syncs"):
            return None
        steps, syncs = facts["outer_steps"], facts["outer_syncs"]
        each = (
            f"{facts['outer_bytes'] / syncs / 1e6:.3g} MB and {facts['outer_exposed'] / syncs:.3g} s that nothing hid"
        )
        return Saving(
            unit="MB sent a rank and step",
            used=facts["outer_bytes"] / steps / 1e6,
            without=facts["outer_without"] / 1e6,
            measured=True,
            cost=f"replicas differ between merges; {syncs:.0f} merges, of {each} each",
        )


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalSteps):
    """Local steps whose exchanges are dense, or quantised."""

    codec: Literal["fp32", "bf16", "8bit", "4bit"] = "fp32"
    """What travels; with 8 and 4 bits, what rounding left out is added to the next exchange."""

    @property
    def idle(self) -> bool:
        return self.codec == "fp32" and self.outer[:2] == (1.0, 0.0)

    def make_codec(self) -> Codec:
        import torch

        if self.codec in ("8bit", "4bit"):
            from shoestring.comm.codecs.quantize import Quantize

            return Quantize(8 if self.codec == "8bit" else 4, rounding="nearest", feedback=True)
        from shoestring.comm.codecs.dense import Dense

        return Dense(torch.bfloat16 if self.codec == "bf16" else None)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaging):
    """Replicas train on their own, and their weights are averaged every so many steps (Stich 2019)."""

    every: int = 8
    """Steps that each replica makes on its own between two averages of the same weights."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Averaging):
    """Replicas train on their own; an outer optimizer with Nesterov's momentum follows the mean of how far they came.

    Douillard et al. 2023 (arXiv 2311.08105); with `fragments` and `delay`, Streaming DiLoCo (arXiv 2501.18512).
    """

    outer_lr: float = 0.7
    """Learning rate of the outer optimizer; 1 goes to the mean of the replicas."""
    outer_momentum: float = 0.9
    """Decay of the outer optimizer's velocity."""
    nesterov: bool = True
    """Look ahead along that velocity."""

    @property
    def outer(self) -> tuple[float, float, bool]:
        return self.outer_lr, self.outer_momentum, self.nesterov


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(LocalSteps):
    """Local steps whose mean is of the largest entries of each chunk only, at 2 bits, with error feedback.

    Sarfi et al. 2025 (arXiv 2508.15706). One of 64 entries travels, in 10.5 bits: 195 times less than in fp32.
    """

    every: int = 30
    """Steps that each replica makes on its own between two merges of the same weights."""
    k: int = 64
    """Entries that are sent of each chunk of 4096."""
    beta: float = 0.95
    """Decay of what has not been sent yet, at every exchange."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer."""
    outer_momentum: float = 0.0
    """Decay of the outer optimizer's velocity (Nesterov's); the error feedback is a momentum of its own."""

    @property
    def outer(self) -> tuple[float, float, bool]:
        return self.outer_lr, self.outer_momentum, True

    def check(self, job: Job) -> None:
        super().check(job)
        if not 1 <= self.k <= 4096:
            raise ConfigError(f"`{self.name}.k` must lie between 1 and 4096, got {self.k}")
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"`{self.name}.beta` must lie in [0, 1], got {self.beta}")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.sparseloco import ChunkedTopK

        return ChunkedTopK(self.k, self.beta)
