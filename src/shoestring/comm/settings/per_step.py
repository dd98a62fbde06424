"""Settings of exchanges at every step: one table, one codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.comm.settings.base import Exchange
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Seam

if TYPE_CHECKING:
    import torch

    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.job import Job

__all__ = ["BF16", "DGC", "Dense", "Exchange", "OkTopK", "PowerSGD", "Quantize", "RandomK", "Sign", "TernGrad", "TopK"]


@dataclass(frozen=True, kw_only=True)
class Dense(Exchange):
    """Uncompressed gradients, as DDP sends them, but in parts, over channels, and between hosts by a 2D torus."""

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.dense import DenseCodec

        return DenseCodec()

    def make_per_node_codec(self) -> Codec:
        from shoestring.comm.selection.per_node import PerNodeCodec

        return PerNodeCodec(1e3 * self.budget_kb)

    @property
    def cost(self) -> str:
        return "gradients are exact"


@dataclass(frozen=True, kw_only=True)
class BF16(Exchange):
    """Gradients in bf16: half the bytes of fp32, with bf16's rounding in the sums."""

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.dense import DenseCodec

        return DenseCodec(_wire_dtype("bf16"))

    def make_per_node_codec(self) -> Codec:
        from shoestring.comm.selection.per_node import PerNodeCodec

        return PerNodeCodec(1e3 * self.budget_kb, dtype=_wire_dtype("bf16"))

    @property
    def cost(self) -> str:
        return "gradients are rounded to 8 bits of precision"


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Exchange):
    """Low-rank gradients by one power iteration a step, with error feedback (Vogels et al. 2019)."""

    rank: int = 4
    """Rank of the approximation. A higher rank is more accurate and sends more bytes, in proportion."""
    alternate: bool = False
    """Whether each step computes only one of the two factors, in turn. This halves the bytes and needs one round trip
    instead of two, with a basis that is one step old."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Data type of the two factors on the wire."""
    start: int = 0
    """Number of steps at the beginning that send gradients uncompressed. Adam's averages then start from exact
    gradients, and these steps send all bytes."""
    seed: int = 0
    """Seed of the random basis that the first power iteration starts from."""

    def check(self, job: Job) -> None:
        super().check(job)
        if self.rank < 1:
            raise ConfigError(f"`{self.name}.rank` must be at least 1, got {self.rank}")
        if self.start < 0:
            raise ConfigError(f"`{self.name}.start` must not be negative, got {self.start}")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.powersgd import PowerSGDCodec

        return PowerSGDCodec(
            self.rank, alternate=self.alternate, dtype=_wire_dtype(self.wire), start=self.start, seed=self.seed
        )

    @property
    def cost(self) -> str:
        return f"gradients have rank {self.rank}; the residual is added later"


@dataclass(frozen=True, kw_only=True)
class Quantize(Exchange):
    """Gradients of 8 or 4 bits an entry, by a compressed reduce-scatter and all-gather (after QSGD, 2017)."""

    bits: Literal[8, 4] = 8
    """Bits of each entry on the wire. Fewer bits send less and round more."""
    bucket: int = 512
    """Number of entries that share a scale. Larger buckets send fewer scales (32 bits each) and round more."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Rounding method. "stochastic" is unbiased; "nearest" has a smaller error, and needs `feedback`."""
    feedback: bool = False
    """Whether the rounding error is kept as a residual and added to the next step's gradients (error feedback). The
    residual costs 4 bytes of memory a parameter."""
    seed: int = 0
    """Seed of stochastic rounding."""

    def check(self, job: Job) -> None:
        super().check(job)
        if self.bucket < 2:
            raise ConfigError(f"`{self.name}.bucket` must be at least 2, got {self.bucket}")
        if self.rounding == "nearest" and not self.feedback:
            raise ConfigError(
                f'`{self.name}.rounding = "nearest"` rounds the same entries away at every step, without `feedback`',
                hint='set `feedback = true`, or `rounding = "stochastic"`',
            )

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.quantize import QuantizeCodec

        return QuantizeCodec(
            self.bits, bucket=self.bucket, rounding=self.rounding, feedback=self.feedback, seed=self.seed
        )

    @property
    def cost(self) -> str:
        return f"gradients are rounded to {self.bits} bits"


@dataclass(frozen=True, kw_only=True)
class Sign(Exchange):
    """Signs of the gradients and a scale a bucket, with error feedback (Karimireddy et al. 2019): 1 bit an entry."""

    bucket: int = 512
    """Number of entries that share a scale. Larger buckets send fewer scales (32 bits each) and are less accurate."""

    def check(self, job: Job) -> None:
        super().check(job)
        if self.bucket < 2:
            raise ConfigError(f"`{self.name}.bucket` must be at least 2, got {self.bucket}")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.sign import SignCodec

        return SignCodec(bucket=self.bucket)


@dataclass(frozen=True, kw_only=True)
class TernGrad(Exchange):
    """Gradients of three levels, -1, 0 and 1 times a scale (Wen et al. 2017): 2 bits an entry, without a residual."""

    clip: float = 2.5
    """Largest magnitude of an entry, in standard deviations of its tensor. A larger value clips less and adds more
    noise."""
    reduce_scatter: bool = False
    """Whether each rank sums one shard and gathers the sums, instead of gathering everything. This needs one more
    collective, but the bytes do not grow with the number of ranks; they are fewer from three ranks on."""
    seed: int = 0
    """Seed of the random rounding."""

    def check(self, job: Job) -> None:
        super().check(job)
        if not self.clip > 0:
            raise ConfigError(f"`{self.name}.clip` must be positive, got {self.clip}")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.terngrad import TernGradCodec

        return TernGradCodec(clip=self.clip, reduce_scatter=self.reduce_scatter, seed=self.seed)

    @property
    def cost(self) -> str:
        return "gradients are noisy"


@dataclass(frozen=True, kw_only=True)
class TopK(Exchange):
    """The entries of largest magnitude and their indices, with error feedback (Stich et al. 2018)."""

    density: float = 0.01
    """Density: the fraction of entries sent each step (0.01 sends 1%). A higher density is more accurate and sends more
    bytes, in proportion."""
    selection: Literal["exact", "sampled", "mstopk"] = "exact"
    """Selection method: the exact top k, a threshold estimated from a sample (as in DGC), or a threshold found by
    counting passes (MSTopK). The thresholds are faster, and select approximately the top k."""
    wire: Literal["fp32", "bf16", "int8", "int4", "int2"] = "bf16"
    """Data type of the values on the wire; rounding errors go to the residual."""
    per_layer: bool = False
    """Whether each parameter sends its own top k entries, instead of the top k over all parameters together."""

    def check(self, job: Job) -> None:
        super().check(job)
        check_density(self.name, self.density)

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.topk import TopKCodec

        return TopKCodec(self.density, selection=self.selection, wire=self.wire, per_layer=self.per_layer)

    @property
    def cost(self) -> str:
        return describe_density(self.density)


@dataclass(frozen=True, kw_only=True)
class OkTopK(Exchange):
    """The largest sums of the ranks' top k entries (Li and Hoefler 2022), in bytes that do not grow with the ranks."""

    density: float = 0.01
    """Density: the fraction of entries sent each step (0.01 sends 1%). A higher density is more accurate and sends more
    bytes, in proportion."""
    slack: float = 1.25
    """Capacity of a message to the rank that sums a region, as a multiple of its equal share. Entries that do not fit
    go to the residual; a larger value delays fewer entries and sends more bytes."""
    wire: Literal["fp32", "bf16"] = "bf16"
    """Data type of the values on the wire."""

    def check(self, job: Job) -> None:
        super().check(job)
        check_density(self.name, self.density)
        if self.slack < 1:
            raise ConfigError(f"`{self.name}.slack` must be at least 1, got {self.slack}")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.oktopk import OkTopKCodec

        return OkTopKCodec(self.density, slack=self.slack, wire=self.wire)

    @property
    def cost(self) -> str:
        return describe_density(self.density)


@dataclass(frozen=True, kw_only=True)
class RandomK(Exchange):
    """Random entries, the same on all ranks, with error feedback: no indices are sent, and rings sum the values."""

    density: float = 0.05
    """Density: the fraction of entries sent each step (0.05 sends 5%). A higher density is more accurate and sends more
    bytes, in proportion."""
    block: int = 16
    """Number of neighbouring entries that are drawn together. Larger blocks read memory faster and are less random."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Data type of the values on the wire."""
    feedback: bool = True
    """Whether entries that are not sent are kept as a residual (error feedback). Without it the sent entries are scaled
    up, which is unbiased but noisy, and needs no memory."""
    seed: int = 0
    """Seed of the draws, the same on all ranks."""

    def check(self, job: Job) -> None:
        super().check(job)
        check_density(self.name, self.density)
        if self.block < 1:
            raise ConfigError(f"`{self.name}.block` must be at least 1, got {self.block}")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.randomk import RandomKCodec

        return RandomKCodec(
            self.density, block=self.block, dtype=_wire_dtype(self.wire), feedback=self.feedback, seed=self.seed
        )

    @property
    def cost(self) -> str:
        return describe_density(self.density)


@dataclass(frozen=True, kw_only=True)
class DGC(Exchange):
    """Deep Gradient Compression (Lin et al. 2018): the top k entries of each rank's momentum. It builds its own SGD."""

    lr: float = 0.1
    """Learning rate of the SGD that DGC builds."""
    weight_decay: float = 0.0
    """Weight decay of the SGD that DGC builds."""
    momentum: float = 0.9
    """Decay of each rank's velocity, which accumulates before it is sent."""
    nesterov: bool = False
    """Whether the momentum is Nesterov's."""
    density: float = 0.001
    """Density after the warm-up: the fraction of entries sent each step (0.001 sends 0.1%). A higher density is more
    accurate and sends more bytes, in proportion."""
    warmup: int = 0
    """Number of steps over which the density falls to `density`, in five stages. A longer warm-up is gentler on early
    training, and sends more bytes during these steps."""
    clip: float = 0.0
    """Largest norm of the gradients; each of N ranks clips its own gradients at this value over the square root of N.
    Clipping needs all gradients before the first can be sent, so the step is exchanged in one part. 0 turns it off."""
    selection: Literal["exact", "sampled", "mstopk"] = "exact"
    """Selection method: the exact top k, a threshold estimated from a sample, or a threshold found by counting passes
    (MSTopK). The thresholds are faster, and select approximately the top k."""
    wire: Literal["fp32", "bf16", "int8", "int4", "int2"] = "fp32"
    """Data type of the values on the wire; rounding errors go to the residual."""

    seams: ClassVar = (Seam.WIRE, Seam.OPTIM)
    runs_alone: ClassVar = True

    def check(self, job: Job) -> None:
        super().check(job)
        check_density(self.name, self.density)
        if not self.lr > 0:
            raise ConfigError(f"`{self.name}.lr` must be above 0, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"`{self.name}.momentum` must be at least 0 and below 1, got {self.momentum}")
        for name in ("weight_decay", "warmup", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"`{self.name}.{name}` must not be negative, got {getattr(self, name)}")
        if self.budget_kb or self.select != "auto":
            raise ConfigError(
                f"`{self.name}` accumulates momentum, which cannot wait for a budget", hint="use [comm.topk]"
            )

    @property
    def needs_all_gradients(self) -> bool:
        return self.clip > 0

    def apply(self, job: Job, seam: Seam) -> None:
        if seam is Seam.WIRE:
            super().apply(job, seam)
            return
        from functools import partial

        from torch.optim import SGD

        job.build_with(partial(SGD, lr=self.lr, weight_decay=self.weight_decay))

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.dgc import DGCCodec

        return DGCCodec(
            self.density,
            momentum=self.momentum,
            nesterov=self.nesterov,
            clip=self.clip or None,
            warmup=self.warmup,
            selection=self.selection,
            wire=self.wire,
        )

    @property
    def cost(self) -> str:
        return describe_density(self.density)


def check_density(name: str, density: float) -> None:
    if not 0 < density <= 1:
        raise ConfigError(f"`{name}.density` must be above 0 and at most 1, got {density}")


def describe_density(density: float) -> str:
    return f"{density:.2g} of the entries are sent; the residual is added later"


def _wire_dtype(name: Literal["fp32", "bf16"]) -> torch.dtype:
    import torch

    return torch.bfloat16 if name == "bf16" else torch.float32
