"""Settings of exchanges at every step: one table, one codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.comm.settings.base import Exchange
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Seam

if TYPE_CHECKING:
    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.job import Job

__all__ = ["BF16", "DGC", "Dense", "Exchange", "OkTopK", "PowerSGD", "Quantize", "RandomK", "Sign", "TernGrad", "TopK"]


@dataclass(frozen=True, kw_only=True)
class Dense(Exchange):
    """Gradients whole, in the exchange's own order, parts and channels: what DDP does, between hosts as a 2D torus."""

    def codec(self) -> Codec:
        from shoestring.comm.codecs.dense import Dense

        return Dense()

    @property
    def cost(self) -> str:
        return "nothing is approximate"


@dataclass(frozen=True, kw_only=True)
class BF16(Exchange):
    """Gradients as bf16: half the bytes of fp32, with bf16's rounding in the sums."""

    def codec(self) -> Codec:
        import torch

        from shoestring.comm.codecs.dense import Dense

        return Dense(torch.bfloat16)

    @property
    def cost(self) -> str:
        return "gradients are rounded to 8 bits of precision"


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Exchange):
    """Gradients of low rank, by one power iteration a step, with error feedback (Vogels et al. 2019)."""

    rank: int = 4
    """Of what travels; bytes grow with it, and so does what each step brings."""
    alternate: bool = False
    """One half of the iteration a step: half the bytes and one round trip, with a basis that is one step old."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """What the two factors travel as."""
    start: int = 0
    """Steps at the beginning that send gradients whole: Adam's averages begin with all there is."""
    seed: int = 0
    """Of the first basis."""

    def check(self, job: Job) -> None:
        super().check(job)
        if self.rank < 1:
            raise ConfigError(f"`{self.name}.rank` must be at least 1, got {self.rank}")
        if self.start < 0:
            raise ConfigError(f"`{self.name}.start` must not be negative, got {self.start}")

    def codec(self) -> Codec:
        import torch

        from shoestring.comm.codecs.powersgd import PowerSGD

        dtype = torch.bfloat16 if self.wire == "bf16" else torch.float32
        return PowerSGD(self.rank, alternate=self.alternate, dtype=dtype, start=self.start, seed=self.seed)

    @property
    def cost(self) -> str:
        return f"gradients have rank {self.rank}; what is left out is added later"


@dataclass(frozen=True, kw_only=True)
class Quantize(Exchange):
    """Gradients as 8 or 4 bits an entry with a scale a bucket, summed by owners (after QSGD, Alistarh et al. 2017)."""

    bits: Literal[8, 4] = 8
    """An entry on the wire."""
    bucket: int = 512
    """Entries that share a scale."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Stochastic is right on average; nearest errs less, and should have its errors fed back."""
    feedback: bool = False
    """Add what rounding left out to the next step's gradients."""
    seed: int = 0
    """Of stochastic rounding."""

    def check(self, job: Job) -> None:
        super().check(job)
        if self.bucket < 2:
            raise ConfigError(f"`{self.name}.bucket` must be at least 2, got {self.bucket}")

    def codec(self) -> Codec:
        from shoestring.comm.codecs.quantize import Quantize

        return Quantize(self.bits, bucket=self.bucket, rounding=self.rounding, feedback=self.feedback, seed=self.seed)

    @property
    def cost(self) -> str:
        return f"gradients are rounded to {self.bits} bits"


@dataclass(frozen=True, kw_only=True)
class Sign(Exchange):
    """Signs and a scale a bucket, with error feedback (Karimireddy et al. 2019), about a bit an entry."""

    bucket: int = 512
    """Entries that share a scale."""

    def check(self, job: Job) -> None:
        super().check(job)
        if self.bucket < 2:
            raise ConfigError(f"`{self.name}.bucket` must be at least 2, got {self.bucket}")

    def codec(self) -> Codec:
        from shoestring.comm.codecs.sign import Sign

        return Sign(bucket=self.bucket)


@dataclass(frozen=True, kw_only=True)
class TernGrad(Exchange):
    """Entries as -1, 0 or 1 times a scale, right on average (Wen et al. 2017): two bits an entry, no error feedback."""

    clip: float = 2.5
    """Standard deviations that an entry may have at most."""
    owners: bool = False
    """Sum at owners: one more exchange, and bytes that do not grow with the number of ranks."""
    seed: int = 0
    """Of the draws."""

    def check(self, job: Job) -> None:
        super().check(job)
        if not self.clip > 0:
            raise ConfigError(f"`{self.name}.clip` must be positive, got {self.clip}")

    def codec(self) -> Codec:
        from shoestring.comm.codecs.terngrad import TernGrad

        return TernGrad(clip=self.clip, owners=self.owners, seed=self.seed)

    @property
    def cost(self) -> str:
        return "gradients are noisy"


@dataclass(frozen=True, kw_only=True)
class TopK(Exchange):
    """The largest entries and where they are, with error feedback (Stich et al. 2018), by one all-gather."""

    density: float = 0.01
    """The part of the entries that is sent."""
    how: Literal["exact", "sampled", "mstopk"] = "exact"
    """Select exactly, by a threshold from a sample (as DGC does), or by counting passes (MSTopK)."""
    wire: Literal["fp32", "bf16", "int8", "int4", "int2"] = "bf16"
    """What values travel as; what rounding takes from them is owed."""
    per_layer: bool = False
    """Select in each parameter, instead of in all together."""

    def check(self, job: Job) -> None:
        super().check(job)
        check_density(self.name, self.density)

    def codec(self) -> Codec:
        from shoestring.comm.codecs.topk import TopK

        return TopK(self.density, how=self.how, wire=self.wire, per_layer=self.per_layer)

    @property
    def cost(self) -> str:
        return f"{self.density:.2g} of the entries are sent; the others are added later"


@dataclass(frozen=True, kw_only=True)
class OkTopK(Exchange):
    """The largest sums of the ranks' largest entries (Li and Hoefler 2022): bytes that do not grow with the ranks."""

    density: float = 0.01
    """The part of the entries that is sent."""
    slack: float = 1.25
    """Room in a message to an owner, over its equal share; what does not fit is added later."""
    wire: Literal["fp32", "bf16"] = "bf16"
    """What values travel as."""

    def check(self, job: Job) -> None:
        super().check(job)
        check_density(self.name, self.density)
        if self.slack < 1:
            raise ConfigError(f"`{self.name}.slack` must be at least 1, got {self.slack}")

    def codec(self) -> Codec:
        from shoestring.comm.codecs.oktopk import OkTopK

        return OkTopK(self.density, slack=self.slack, wire=self.wire)

    @property
    def cost(self) -> str:
        return f"{self.density:.2g} of the entries are sent; the others are added later"


@dataclass(frozen=True, kw_only=True)
class RandomK(Exchange):
    """Random entries, the same on all ranks, with error feedback: no indices travel, and a ring can add them up."""

    density: float = 0.05
    """The part of the entries that is sent."""
    block: int = 16
    """Neighbours that are drawn together."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """What values travel as."""
    feedback: bool = True
    """Add what was not sent later; without it, what is sent is scaled up, which is right on average and noisy."""
    seed: int = 0
    """Of the draws."""

    def check(self, job: Job) -> None:
        super().check(job)
        check_density(self.name, self.density)

    def codec(self) -> Codec:
        import torch

        from shoestring.comm.codecs.randomk import RandomK

        dtype = torch.bfloat16 if self.wire == "bf16" else torch.float32
        return RandomK(self.density, block=self.block, dtype=dtype, feedback=self.feedback, seed=self.seed)

    @property
    def cost(self) -> str:
        return f"{self.density:.2g} of the entries are sent; the others are added later"


@dataclass(frozen=True, kw_only=True)
class DGC(Exchange):
    """Deep Gradient Compression (Lin et al. 2018): the largest entries of each rank's own momentum. Builds the SGD."""

    lr: float = 0.1
    """Learning rate of its SGD."""
    weight_decay: float = 0.0
    """Of its SGD."""
    momentum: float = 0.9
    """Of the velocity that is accumulated before it is sent."""
    nesterov: bool = False
    """Nesterov's form of it."""
    density: float = 0.001
    """The part of the entries that is sent, after the warm-up."""
    warmup: int = 0
    """Steps over which the density falls to that, in five stages."""
    clip: float = 0.0
    """Largest norm of the gradients; each of N ranks clips its own at this over the root of N. All gradients must be
    there before any can be sent, so the step is exchanged in one part. 0 turns clipping off."""
    how: Literal["exact", "sampled", "mstopk"] = "exact"
    """As for `comm.topk`."""
    wire: Literal["fp32", "bf16", "int8", "int4", "int2"] = "fp32"
    """What values travel as."""

    seams: ClassVar = (Seam.WIRE, Seam.OPTIM)
    alone: ClassVar = True

    def check(self, job: Job) -> None:
        super().check(job)
        check_density(self.name, self.density)
        if self.budget_kb or self.select != "auto":
            raise ConfigError(
                f"`{self.name}` accumulates momentum, which cannot wait for a budget", hint="use [comm.topk]"
            )

    @property
    def together(self) -> bool:
        return self.clip > 0

    def apply(self, job: Job, seam: Seam) -> None:
        if seam is Seam.WIRE:
            super().apply(job, seam)
            return
        from functools import partial

        from torch.optim import SGD

        job.build_with(partial(SGD, lr=self.lr, weight_decay=self.weight_decay))

    def codec(self) -> Codec:
        from shoestring.comm.codecs.dgc import DGC

        return DGC(
            self.density,
            momentum=self.momentum,
            nesterov=self.nesterov,
            clip=self.clip or None,
            warmup=self.warmup,
            how=self.how,
            wire=self.wire,
        )

    @property
    def cost(self) -> str:
        return f"{self.density:.2g} of the entries are sent; the others are added later"


def check_density(name: str, density: float) -> None:
    if not 0 < density <= 1:
        raise ConfigError(f"`{name}.density` must be above 0 and at most 1, got {density}")
