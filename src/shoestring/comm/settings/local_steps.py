"""Settings of local steps: replicas train independently and are merged every few steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring import figures
from shoestring.comm.settings.base import check_types, refuse_sparse
from shoestring.comm.settings.calls import parse_exchange
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Feature, Inexact, Reduction, Seam, splitting

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from shoestring.comm.codecs.codec import Codec
    from shoestring.comm.settings.base import Exchange
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.core.world import World

__all__ = ["DiLoCo", "LocalSGD", "LocalSteps", "SparseLoCo"]

PLAIN = {
    "fp32": "dense",
    "bf16": "bf16",
    "8bit": "quantize(bits=8, rounding='nearest', feedback=True)",
    "4bit": "quantize(bits=4, rounding='nearest', feedback=True)",
}
"""Maps short names of encodings to codecs; these encodings send every entry."""


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Feature):
    """Base class of the settings of local steps, where replicas are merged every few steps.

    The last of `job.progress.total` steps always merges all weights. If your own training loop does not set
    `job.progress.total`, replicas are equal at the end only if the number of steps is a multiple of `every`, and never
    with `fragments` or `delay`.
    """

    every: int = 100
    """Number of steps that each replica trains on its own between two merges of the same weights. A larger value sends
    less, and lets the replicas drift further apart."""
    final_every: int = 0
    """Number of steps between two merges at the end of the run. The number grows linearly from `every` to this value; 0
    uses `every` in the whole run. A larger value sends less towards the end, where the loss falls slowly, and lets the
    replicas drift further apart there. In a run without a known end the number stays `every`."""
    start: int = 0
    """Number of steps at the beginning that average gradients, as DDP does, instead of weights (post-local SGD). Such
    steps learn more while the loss falls fast, and each of them sends as many bytes as a merge."""
    fragments: int = 1
    """Number of groups of layers, which are merged one after the other (streaming). More groups spread the bytes more
    evenly over time."""
    layout: Literal["strided", "sequential"] = "strided"
    """Assignment of layers to fragments: "strided" assigns layers in turn, "sequential" groups neighbouring layers."""
    delay: int = 0
    """Number of steps that training continues during an exchange, before the result is merged. A larger value overlaps
    slower exchanges with training, and merges older weights."""
    late_merge: Literal["move", "mix"] = "move"
    """Method by which a replica adopts merged weights `delay` steps after it sent its own weights: "move" adds the
    difference between merged and sent weights, which keeps all steps made since; "mix" averages the replica's weights
    with the merged weights, as Streaming DiLoCo does, which loses a part of these steps."""
    own_weight: float = 0.5
    """Weight of a replica's own parameters if `late_merge` is "mix", between 0 and 1. A larger value keeps more of the
    steps made during the exchange, and leaves the replicas further apart."""
    second_moment: Literal["own", "global"] = "own"
    """Second moment that each replica's Adam divides by: "own" is computed from the replica's gradients, and "global"
    estimates the second moment of all replicas' mean gradient, with which a step learns more if `every` is small.
    Neither setting sends data, and optimizers other than Adam are not changed."""
    replica: Literal["auto", "host", "rank"] = "auto"
    """Unit that forms a replica: a host with all its ranks, or a single rank. "auto" means hosts if there are several
    hosts, or if another feature shards or replicates the model inside a host, so that such a run can continue on one
    host; else ranks."""

    seams: ClassVar = (Seam.SHARD, Seam.STEP)

    @abstractmethod
    def make_codec(self) -> Codec:
        """Make a new codec for the exchanges between replicas."""

    def make_gradient_codec(self) -> Codec:
        """Make a new codec for the gradients of the first `start` steps: 4 bits per entry, with almost no effect on the
        loss."""
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
    def inexact(self) -> Inexact:
        return "fragments" if self.fragments > 1 or self.delay else "replicas"

    @property
    def leaves_one_replica_alone(self) -> bool:
        """Whether a single replica trains exactly as it would without the feature."""
        return False

    def merges(self, name: str) -> bool:
        """Whether the parameter or buffer with this name is merged; others stay as they are on each replica."""
        return True

    def resolve(self, world: World) -> Self:
        if self.replica != "auto":
            return self
        return replace(self, replica="host") if world.ranks_over([HOSTS]) > 1 else self

    def beside(self, features: Sequence[Feature]) -> Self:
        if self.replica != "auto":
            return self
        spreads = [feature for feature in features if feature is not self and Seam.SHARD in feature.seams]
        inside = any(LOCAL in feature.over and HOSTS not in feature.over for feature in spreads)
        return replace(self, replica="host" if inside else "rank")

    def check(self, attachments: Attachments) -> None:
        check_types(self, attachments)

        def require(name: str, holds: bool, what: str) -> None:
            if not holds:
                raise ConfigError(f"`{self.name}.{name}` must {what}, got {getattr(self, name)}")

        require("every", self.every >= 1, "be at least 1")
        longer = f"be 0 or at least `every` ({self.every})"
        require("final_every", self.final_every == 0 or self.final_every >= self.every, longer)
        require("start", self.start >= 0, "not be negative")
        require("fragments", 1 <= self.fragments <= self.every, f"lie between 1 and `every` ({self.every})")
        require("delay", 0 <= self.delay < self.every, f"lie between 0 and `every` - 1 ({self.every - 1})")
        require("own_weight", 0 <= self.own_weight <= 1, "lie between 0 and 1")
        mixes = self.late_merge == "mix" or self.own_weight == type(self).own_weight
        require("own_weight", mixes, 'be left out without late_merge = "mix"')
        lr, momentum, _ = self.outer
        if not (lr > 0 and 0 <= momentum < 1):
            raise ConfigError(f"`{self.name}` needs an outer_lr above 0 and an outer_momentum in [0, 1)")
        self.check_scaler(attachments.scaler, attachments.world)  # the loss scaler of the user's training loop
        if set(self.over) & set(attachments.replicas):
            raise ConfigError(
                f"`{self.name}` cannot use a model in DDP, which averages the gradients of all ranks at every step",
                hint='pass the bare model, with parallel.DDP(hosts="leave") where hosts have several ranks',
            )
        if attachments.divided == "optimizer":
            raise ConfigError(
                f"`{self.name}` merges parameters, and with `memory.zero` the optimizer updates shards of them",
                hint='inside hosts use parallel.FSDP(hosts="leave") or parallel.DDP(hosts="leave")',
            )
        # If a replica is a host with DDP inside, the exchange stays within the replica.
        apart = splitting(attachments.features, attachments.world)
        inside = self.replica == "host" and attachments.averages_in_backward and not apart
        exchanges = [feature for feature in attachments.features if Seam.WIRE in feature.seams]
        if exchanges and not inside:
            raise ConfigError(
                f"`{exchanges[0].name}` exchanges gradients at every step, and `{self.name}` is meant to avoid that",
                hint=f"remove [{exchanges[0].name}] or [{self.name}]",
            )
        self._check_fragments(attachments)
        self._check_scaled(any(feature.scales_loss for feature in attachments.features), attachments.world)

    def _check_fragments(self, attachments: Attachments) -> None:
        from shoestring.comm.local.fragments import group_parameters

        if self.fragments > (most := len(group_parameters(attachments.module))):
            raise ConfigError(
                f"`{self.name}.fragments` must be at most {most}, the groups of this model, got {self.fragments}"
            )

    def check_scaler(self, scaler: GradScaler, world: World) -> None:
        """Raise ConfigError for a loss scaler: replicas that skip different steps would no longer merge at the same
        steps."""
        self._check_scaled(scaler.is_enabled(), world)

    def _check_scaled(self, scaled: bool, world: World) -> None:
        if scaled and world.ranks_over(self.over) > 1:
            raise ConfigError(
                f"`{self.name}` cannot use a loss scaler, which may let a single replica skip a step",
                hint='train in bf16, which needs none: precision.autocast.dtype = "bf16"',
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.comm.exchange.replicas import broadcast_weights
        from shoestring.comm.local.outer_state import average_former_replicas, install

        if seam is Seam.SHARD:
            self._check_fragments(attachments)  # checked again, because adapters may have frozen layers
            for axis in self.over:
                attachments.own(f"SHARD over {axis}", Seam.SHARD)
            broadcast_weights(
                [*attachments.module.parameters(), *attachments.module.buffers()], attachments.world.group(self.over)
            )
        elif attachments.world.ranks_over(self.over) > 1 or not self.leaves_one_replica_alone:
            install(attachments, self)
        else:
            average_former_replicas(attachments)

    def explain(self, attachments: Attachments) -> str:
        replicas = attachments.world.ranks_over(self.over)
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
        nbytes, exposed = facts["outer_bytes"] / syncs, facts["outer_exposed"] / syncs
        return Reduction(
            unit="MB sent a rank and step",
            used=facts["outer_bytes"] / steps / 1e6,
            without=facts["outer_without"] / 1e6,
            measured=True,
            cost=(
                f"replicas differ between merges; {syncs:.0f} merges, each of {figures.size(nbytes)} and "
                f"{figures.seconds(exposed)} of exposed communication"
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalSteps):
    """Base class of local steps whose exchanges may use any codec."""

    codec: str = "fp32"
    """Encoding of the data that replicas send each other: "fp32", "bf16", "8bit", "4bit", or a codec of exchanges at
    every step, written as a call: "powersgd(rank=4)", "sign". Fewer bits send less. The errors of 8 and 4 bits, signs,
    low rank and sparse entries are added to the next exchange (error feedback)."""

    @property
    def leaves_one_replica_alone(self) -> bool:
        return self.codec == "fp32" and self.outer[:2] == (1.0, 0.0)

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        refuse_sparse(self.name, attachments.model)
        self._find_codec().check(attachments)

    def make_codec(self) -> Codec:
        return self._find_codec().make_codec()

    def make_gradient_codec(self) -> Codec:
        return self.make_codec() if self.codec in PLAIN else super().make_gradient_codec()

    def _find_codec(self) -> Exchange:
        return parse_exchange(PLAIN.get(self.codec, self.codec), f"{self.name}.codec", PLAIN)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaging):
    """Replicas train independently, and their weights are averaged every few steps (Stich 2019)."""

    every: int = 8
    """Number of steps that each replica trains on its own between two averages of the same weights. A larger value
    sends less, and lets the replicas drift further apart."""
    second_moment: Literal["own", "global"] = "global"
    """Second moment that each replica's Adam divides by: "own" is computed from the replica's gradients, and "global"
    estimates the second moment of all replicas' mean gradient, with which a step learns more if `every` is small.
    Neither setting sends data, and optimizers other than Adam are not changed."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Averaging):
    """Replicas train independently, and an outer optimizer with Nesterov momentum applies their mean change.

    Douillard et al., 2023 (arXiv 2311.08105); with `fragments` and `delay`, Streaming DiLoCo (arXiv 2501.18512).
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

    Sarfi et al., 2025 (arXiv 2508.15706). By default 1 in 64 entries is sent, with 10.5 bits per sent entry: 1/195 of
    the bytes of all entries in fp32.
    """

    every: int = 30
    """Number of steps that each replica trains on its own between two merges of the same weights. A larger value sends
    less, and lets the replicas drift further apart."""
    k: int = 64
    """Number of entries sent of each chunk of 4,096 entries. A larger value is more accurate and sends more bytes, in
    proportion."""
    residual_decay: float = 0.95
    """Decay of the residual at every exchange, between 0 and 1. With 1 every change is sent eventually; a smaller value
    forgets older changes."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer. Without momentum, 1 moves the weights by the mean change that was sent."""
    outer_momentum: float = 0.0
    """Decay of the outer optimizer's Nesterov velocity. The default is 0, because the residual already acts like
    momentum."""

    @property
    def outer(self) -> tuple[float, float, bool]:
        return self.outer_lr, self.outer_momentum, True

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        if not 1 <= self.k <= 4096:
            raise ConfigError(f"`{self.name}.k` must lie between 1 and 4096, got {self.k}")
        if not 0 <= self.residual_decay <= 1:
            raise ConfigError(f"`{self.name}.residual_decay` must lie in [0, 1], got {self.residual_decay}")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.sparseloco import SparseLoCoCodec

        return SparseLoCoCodec(self.k, self.residual_decay)
