"""Settings of replicas that train on their own and are merged every few steps."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring.comm.settings.base import check_types, refuse_sparse
from shoestring.comm.settings.calls import parse_exchange
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, Feature, Reduction, Seam

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from shoestring.comm.codecs.codec import Codec
    from shoestring.comm.settings.per_step import Exchange
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.core.world import World

__all__ = ["DiLoCo", "LocalSGD", "LocalSteps", "SparseLoCo"]

PLAIN = {
    "fp32": "dense",
    "bf16": "bf16",
    "8bit": "quantize(bits=8, rounding='nearest', feedback=True)",
    "4bit": "quantize(bits=4, rounding='nearest', feedback=True)",
}
"""Short names of encodings of every entry."""


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Feature):
    """Settings that all ways of merging replicas every few steps share.

    The last of `job.progress.total` steps merges all weights, whatever its number. A training loop of your own that
    does not set this total ends with equal replicas only on a multiple of `every`, and with `fragments` or `delay` on
    no step at all.
    """

    every: int = 100
    """Number of steps that each replica trains on its own between two merges of the same weights. A larger value sends
    less, and lets the replicas drift further apart."""
    final_every: int = 0
    """Number of steps between two merges at the end of the run, to which it grows linearly from `every`; 0 keeps
    `every`. A larger value sends less while the loss falls slowly, and lets the replicas drift further apart then. In a
    run without a known end the number stays `every`."""
    start: int = 0
    """Number of steps at the beginning that average gradients, as DDP does, and not weights (post-local SGD). More of
    these steps learn more while the loss falls fast, and each of them sends as much as a merge."""
    fragments: int = 1
    """Number of groups of layers that are merged one after the other (streaming). More groups spread the bytes more
    evenly over time."""
    layout: Literal["strided", "sequential"] = "strided"
    """Assignment of layers to fragments: "strided" deals them out in turn, "sequential" groups neighbouring layers."""
    delay: int = 0
    """Number of steps that training continues while an exchange is on the wire, before its result is merged. A larger
    value overlaps slower exchanges, and merges older weights."""
    late_merge: Literal["move", "mix"] = "move"
    """Merge of what was sent `delay` steps ago: "move" moves a replica by what the merge changes about the weights that
    it had sent, and keeps all steps made since; "mix" mixes its parameters with the merged ones, as Streaming DiLoCo
    does, and loses a part of those steps."""
    alpha: float = 0.5
    """Weight of a replica's own parameters where `late_merge` is "mix", between 0 and 1. A larger value keeps more of
    the steps made during the exchange, and lets the replicas agree less."""
    second_moment: Literal["own", "global"] = "own"
    """Second moment that each replica's Adam divides by: "own" is computed from the replica's gradients, and "global"
    estimates the second moment of all replicas' mean gradient, with which a step learns more where periods are short.
    Neither sends anything, and other optimizers than Adam are not changed."""
    replica: Literal["auto", "host", "rank"] = "auto"
    """Unit that trains on its own: a host with all its ranks, or every rank. "auto" takes hosts where there are
    several."""

    seams: ClassVar = (Seam.SHARD, Seam.STEP)

    @abstractmethod
    def make_codec(self) -> Codec:
        """Make a new codec for the exchanges between replicas."""

    def make_gradient_codec(self) -> Codec:
        """Make a new codec for the gradients of the first `start` steps: 4 bits, which lose next to nothing."""
        from shoestring.comm.codecs.quantize import QuantizeCodec

        return QuantizeCodec(4, rounding="nearest", feedback=True)

    @property
    def outer(self) -> tuple[float, float, bool]:
        """Learning rate and momentum of the outer optimizer, and whether the momentum is Nesterov's."""
        return 1.0, 0.0, False

    @property
    def over(self) -> tuple[str, ...]:
        return (HOSTS,) if self.replica == "host" else DATA

    @property
    def leaves_one_replica_alone(self) -> bool:
        """Whether a single replica trains exactly as it would without the feature."""
        return False

    def resolve(self, world: World) -> Self:
        if self.replica != "auto":
            return self
        return replace(self, replica="host" if world.ranks_over([HOSTS]) > 1 else "rank")

    def check(self, job: Job) -> None:
        check_types(self, job)
        self._check_numbers()
        if set(self.over) & set(job.replicas):
            raise ConfigError(
                f"`{self.name}` cannot use a model in DDP, which averages the gradients of all ranks at every step",
                hint='pass the bare model, with parallel.DDP(hosts="leave") where hosts have several ranks',
            )
        if job.engine == "zero":
            raise ConfigError(
                f"`{self.name}` merges parameters, and `memory.zero` lets the optimizer step shards of them",
                hint='inside hosts use parallel.FSDP(hosts="leave") or parallel.DDP(hosts="leave")',
            )
        if (wire := self._find_exchange(job)) is not None:
            raise ConfigError(
                f"`{wire.name}` exchanges gradients at every step, and `{self.name}` is meant to avoid that",
                hint=f"remove [{wire.name}] or [{self.name}]",
            )
        from shoestring.comm.local.fragments import group_parameters

        if self.fragments > (most := len(group_parameters(job.module))):
            raise ConfigError(
                f"`{self.name}.fragments` must be at most {most}, the groups of this model, got {self.fragments}"
            )

    def _check_numbers(self) -> None:
        def require(name: str, holds: bool, what: str) -> None:
            if not holds:
                raise ConfigError(f"`{self.name}.{name}` must {what}, got {getattr(self, name)}")

        require("every", self.every >= 1, "be at least 1")
        longer = f"be 0 or at least `every` ({self.every})"
        require("final_every", self.final_every == 0 or self.final_every >= self.every, longer)
        require("start", self.start >= 0, "not be negative")
        require("fragments", 1 <= self.fragments <= self.every, f"lie between 1 and `every` ({self.every})")
        require("delay", 0 <= self.delay < self.every, f"lie between 0 and `every` - 1 ({self.every - 1})")
        require("alpha", 0 <= self.alpha <= 1, "lie between 0 and 1")
        mixes = self.late_merge == "mix" or self.alpha == type(self).alpha
        require("alpha", mixes, 'be left out without late_merge = "mix"')
        lr, momentum, _ = self.outer
        if not (lr > 0 and 0 <= momentum < 1):
            raise ConfigError(f"`{self.name}` needs an outer_lr above 0 and an outer_momentum in [0, 1)")

    def check_scaler(self, scaler: GradScaler, world: World) -> None:
        """Raise ConfigError for a loss scaler: replicas that skip different steps no longer merge at the same ones."""
        if scaler.is_enabled() and world.ranks_over(self.over) > 1:
            raise ConfigError(
                f"`{self.name}` cannot use a loss scaler, which lets one replica alone skip a step",
                hint='train in bf16, which needs none: precision.autocast.dtype = "bf16"',
            )

    def _find_exchange(self, job: Job) -> Feature | None:
        """The feature that exchanges gradients between replicas; inside a replica under DDP an exchange is allowed."""
        inside = self.replica == "host" and job.engine == "ddp"
        return next((feature for feature in job.features if Seam.WIRE in feature.seams and not inside), None)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.comm.exchange.replicas import broadcast_weights
        from shoestring.comm.local.outer_state import install

        if seam is Seam.SHARD:
            broadcast_weights([*job.module.parameters(), *job.module.buffers()], job.world.group(self.over))
        elif job.world.ranks_over(self.over) > 1 or not self.leaves_one_replica_alone:
            install(job, self)

    def explain(self, job: Job) -> str:
        replicas = job.world.ranks_over(self.over)
        starting = f", gradients averaged in the first {self.start} steps" if self.start else ""
        growing = f" to {self.final_every}" if self.final_every > self.every else ""
        streamed = f", in {self.fragments} fragments" if self.fragments > 1 else ""
        overlapped = f", {self.delay} steps after they were sent" if self.delay else ""
        merged = f"merged every {self.every}{growing} steps{streamed}{overlapped}{starting}"
        return f"{replicas} replica{'s' * (replicas > 1)}, {merged}"

    def reduction(self, trace: Trace) -> Reduction | None:
        facts = trace.facts
        if not facts.get("outer_syncs"):
            return None
        steps, syncs = facts["outer_steps"], facts["outer_syncs"]
        megabytes, exposed = facts["outer_bytes"] / syncs / 1e6, facts["outer_exposed"] / syncs
        return Reduction(
            unit="MB sent a rank and step",
            used=facts["outer_bytes"] / steps / 1e6,
            without=facts["outer_without"] / 1e6,
            measured=True,
            cost=(
                f"replicas differ between merges; {syncs:.0f} merges, each of {megabytes:.3g} MB and "
                f"{exposed:.3g} s of exposed communication"
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalSteps):
    """Local steps whose exchanges are encoded by any codec."""

    codec: str = "fp32"
    """Encoding of what replicas send each other: "fp32", "bf16", "8bit", "4bit", or a codec of exchanges at every step,
    written as a call: "powersgd(rank=4)", "sign". Fewer bits send less; what 8 and 4 bits, signs, low rank and sparse
    entries lose is added to the next exchange (error feedback)."""

    @property
    def leaves_one_replica_alone(self) -> bool:
        return self.codec == "fp32" and self.outer[:2] == (1.0, 0.0)

    def check(self, job: Job) -> None:
        super().check(job)
        refuse_sparse(self.name, job.model)
        self._find_codec().check(job)

    def make_codec(self) -> Codec:
        return self._find_codec().make_codec()

    def make_gradient_codec(self) -> Codec:
        return self.make_codec() if self.codec in PLAIN else super().make_gradient_codec()

    def _find_codec(self) -> Exchange:
        return parse_exchange(PLAIN.get(self.codec, self.codec), f"{self.name}.codec", PLAIN)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaging):
    """Replicas train on their own, and their weights are averaged every few steps (Stich 2019)."""

    every: int = 8
    """Number of steps that each replica trains on its own between two averages of the same weights. A larger value
    sends less, and lets the replicas drift further apart."""
    second_moment: Literal["own", "global"] = "global"
    """Second moment that each replica's Adam divides by: "own" is computed from the replica's gradients, and "global"
    estimates the second moment of all replicas' mean gradient, with which a step learns more where periods are short.
    Neither sends anything, and other optimizers than Adam are not changed."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Averaging):
    """Replicas train on their own, and an outer optimizer with Nesterov momentum steps along their mean change.

    Douillard et al. 2023 (arXiv 2311.08105); with `fragments` and `delay`, Streaming DiLoCo (arXiv 2501.18512).
    """

    outer_lr: float = 0.7
    """Learning rate of the outer optimizer. Without momentum, 1 moves the weights to the mean of the replicas."""
    outer_momentum: float = 0.9
    """Decay of the outer optimizer's velocity. A larger value averages over more merges and reacts more slowly."""
    nesterov: bool = True
    """Whether the outer optimizer's momentum is Nesterov's."""

    @property
    def outer(self) -> tuple[float, float, bool]:
        return self.outer_lr, self.outer_momentum, self.nesterov


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(LocalSteps):
    """Local steps whose exchanges send only the top k entries of each chunk, at 2 bits, with error feedback.

    Sarfi et al. 2025 (arXiv 2508.15706). By default one of 64 entries is sent, in 10.5 bits: 195 times less than all
    entries in fp32.
    """

    every: int = 30
    """Number of steps that each replica trains on its own between two merges of the same weights. A larger value sends
    less, and lets the replicas drift further apart."""
    k: int = 64
    """Number of entries sent of each chunk of 4,096 entries. A larger value is more accurate and sends more bytes, in
    proportion."""
    beta: float = 0.95
    """Decay of the residual at every exchange, between 0 and 1. With 1 every change is sent sooner or later; a smaller
    value forgets older ones."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer. Without momentum, 1 moves the weights by the mean change that was sent."""
    outer_momentum: float = 0.0
    """Decay of the outer optimizer's Nesterov velocity. It is 0 by default because the residual already acts like
    momentum."""

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
        from shoestring.comm.codecs.sparseloco import SparseLoCoCodec

        return SparseLoCoCodec(self.k, self.beta)
