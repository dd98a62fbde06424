"""Settings of exchanges of gradients at every step, one class for each codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.comm.settings.base import Exchange, check_least
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Inexact, Seam

if TYPE_CHECKING:
    import torch

    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class Dense(Exchange):
    """Uncompressed gradients, as with DDP, but with the settings of `transport`: parts, channels and a 2D torus between
    hosts."""

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.dense import DenseCodec

        return DenseCodec()

    def make_per_node_codec(self) -> Codec:
        from shoestring.comm.selection.per_node import PerNodeCodec

        return PerNodeCodec(1e3 * self.transport.kb_per_step)

    @property
    def codec_loses(self) -> Inexact:
        return ""

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

        return PerNodeCodec(1e3 * self.transport.kb_per_step, dtype=_wire_dtype("bf16"))

    @property
    def codec_loses(self) -> Inexact:
        return "numbers"

    @property
    def cost(self) -> str:
        return "gradients are rounded to 8 bits of precision"


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Exchange):
    """Low-rank gradients by one power iteration per step, with error feedback (Vogels et al., 2019)."""

    rank: int = 4
    """Rank of the approximation. A higher rank is more accurate and sends more bytes, in proportion."""
    alternate: bool = False
    """Whether steps compute the two factors in turn, one factor per step. Alternating halves the bytes and needs one
    round trip instead of two, with a basis that is one step old."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Data type of the two factors on the wire."""
    start: int = 0
    """Number of steps at the beginning that send gradients uncompressed. Such steps send all bytes, and let Adam's
    averages start from exact gradients."""
    seed: int = 0
    """Seed of the random basis that the first power iteration starts from."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        check_least(self.name, self, 1, "rank")
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
    """Gradients with 8 or 4 bits per entry, by a compressed reduce-scatter and all-gather (after QSGD, 2017)."""

    bits: Literal[8, 4] = 8
    """Bits of each entry on the wire. Fewer bits send less and round more."""
    group_size: int = 512
    """Number of entries that share a scale. Larger buckets send fewer scales (32 bits each) and round more. A bucket
    whose entries are all below about 1e-36 is sent as zeros."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Rounding method. "stochastic" is unbiased; "nearest" has a smaller error, and needs `feedback`."""
    feedback: bool = False
    """Whether the rounding error is kept as a residual and added to the next step's gradients (error feedback). The
    residual takes 4 bytes of memory per parameter."""
    seed: int = 0
    """Seed of stochastic rounding."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        check_least(self.name, self, 2, "group_size")
        if self.rounding == "nearest" and not self.feedback:
            raise ConfigError(
                f'`{self.name}.rounding = "nearest"` without `feedback` always rounds the same entries to zero',
                hint='set `feedback = true`, or `rounding = "stochastic"`',
            )

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.quantize import QuantizeCodec

        return QuantizeCodec(
            self.bits, bucket=self.group_size, rounding=self.rounding, feedback=self.feedback, seed=self.seed
        )

    @property
    def cost(self) -> str:
        return f"gradients are rounded to {self.bits} bits"


@dataclass(frozen=True, kw_only=True)
class Sign(Exchange):
    """Signs of the gradients and one scale per bucket, with error feedback (Karimireddy et al., 2019): 1 bit per
    entry."""

    group_size: int = 512
    """Number of entries that share a scale. Larger buckets send fewer scales (32 bits each) and are less accurate."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        check_least(self.name, self, 2, "group_size")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.sign import SignCodec

        return SignCodec(bucket=self.group_size)


@dataclass(frozen=True, kw_only=True)
class TernGrad(Exchange):
    """Gradients of three levels, -1, 0 and 1 times a scale (Wen et al., 2017): 2 bits per entry, without a residual."""

    clip_sigmas: float = 2.5
    """Magnitude at which entries are clipped, in root mean squares of the tensor's entries (their standard deviation if
    their mean is 0). A larger value clips less and adds more noise."""
    reduce_scatter: bool = False
    """Whether each rank sums one shard and the sums are all-gathered, instead of the entries of all ranks. A
    reduce-scatter needs one more collective, but the bytes do not grow with the number of ranks; from three ranks on,
    fewer bytes are sent."""
    seed: int = 0
    """Seed of the random rounding."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        if not self.clip_sigmas > 0:
            raise ConfigError(f"`{self.name}.clip_sigmas` must be positive, got {self.clip_sigmas}")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.terngrad import TernGradCodec

        return TernGradCodec(clip=self.clip_sigmas, reduce_scatter=self.reduce_scatter, seed=self.seed)

    @property
    def cost(self) -> str:
        return "gradients are noisy"


@dataclass(frozen=True, kw_only=True)
class TopK(Exchange):
    """The entries of largest magnitude and their indices, with error feedback (Stich et al., 2018)."""

    density: float = 0.01
    """Density: the fraction of entries sent each step (0.01 sends 1%). A higher density is more accurate and sends more
    bytes, in proportion."""
    topk_method: Literal["exact", "sampled", "mstopk"] = "exact"
    """Selection method: the exact top k, a threshold estimated from a sample (as in DGC), or a threshold found by
    counting passes (MSTopK). The two threshold methods are faster, and approximate."""
    wire: Literal["fp32", "bf16", "int8", "int4", "int2"] = "bf16"
    """Data type of the values on the wire; rounding errors are added to the residual."""
    per_layer: bool = False
    """Whether each parameter sends its own top k entries, instead of the top k over all parameters together."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        check_density(self.name, self.density)

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.topk import TopKCodec

        return TopKCodec(self.density, selection=self.topk_method, wire=self.wire, per_layer=self.per_layer)

    @property
    def cost(self) -> str:
        return describe_density(self.density)


@dataclass(frozen=True, kw_only=True)
class RandomK(Exchange):
    """Random entries, the same on all ranks, with error feedback: no indices are sent, and values are all-reduced."""

    density: float = 0.05
    """Density: the fraction of entries sent each step (0.05 sends 5%). A higher density is more accurate and sends more
    bytes, in proportion."""
    block_size: int = 16
    """Number of neighbouring entries that are drawn together. Larger blocks read memory faster and are less random."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Data type of the values on the wire."""
    feedback: bool = True
    """Whether entries that are not sent are added to the next step's gradients (error feedback). If false, sent entries
    are scaled up, which is unbiased but noisy, and needs no memory for a residual."""
    seed: int = 0
    """Seed of the draws, the same on all ranks."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        check_density(self.name, self.density)
        check_least(self.name, self, 1, "block_size")

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.randomk import RandomKCodec

        return RandomKCodec(
            self.density, block=self.block_size, dtype=_wire_dtype(self.wire), feedback=self.feedback, seed=self.seed
        )

    @property
    def cost(self) -> str:
        return describe_density(self.density)


@dataclass(frozen=True, kw_only=True)
class DGC(Exchange):
    """Deep Gradient Compression (Lin et al., 2018): sends the top k entries of each rank's momentum, and builds its own
    SGD."""

    lr: float = 0.1
    """Learning rate of the SGD that DGC builds."""
    weight_decay: float = 0.0
    """Weight decay of the SGD that DGC builds."""
    momentum: float = 0.9
    """Decay of each rank's velocity, which accumulates gradients before they are sent."""
    nesterov: bool = False
    """Whether the momentum is Nesterov's."""
    density: float = 0.001
    """Density after the warm-up: the fraction of entries sent each step (0.001 sends 0.1%). A higher density is more
    accurate and sends more bytes, in proportion."""
    warmup: int = 0
    """Number of steps over which the fraction of entries sent falls to `density`, in five stages. A longer warm-up is
    gentler on early training, and sends more bytes during these steps."""
    max_norm: float = 0.0
    """Maximum norm of the gradients; each of N ranks clips its own gradients to this value divided by the square root
    of N. Clipping needs all gradients before any can be sent, so all gradients of a step are exchanged in one part. 0
    turns clipping off."""
    topk_method: Literal["exact", "sampled", "mstopk"] = "exact"
    """Selection method: the exact top k, a threshold estimated from a sample, or a threshold found by counting passes
    (MSTopK). The two threshold methods are faster, and approximate."""
    wire: Literal["fp32", "bf16", "int8", "int4", "int2"] = "fp32"
    """Data type of the values on the wire; rounding errors are added to the residual."""

    seams: ClassVar = (Seam.WIRE, Seam.OPTIM)
    runs_alone: ClassVar = True

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        check_density(self.name, self.density)
        if not self.lr > 0:
            raise ConfigError(f"`{self.name}.lr` must be above 0, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"`{self.name}.momentum` must be at least 0 and below 1, got {self.momentum}")
        for name in ("weight_decay", "warmup", "max_norm"):
            if getattr(self, name) < 0:
                raise ConfigError(f"`{self.name}.{name}` must not be negative, got {getattr(self, name)}")
        if self.transport.kb_per_step or self.transport.select != "auto":
            raise ConfigError(
                f"`{self.name}` accumulates momentum, which cannot wait for a budget", hint="use [comm.topk]"
            )

    @property
    def needs_all_gradients(self) -> bool:
        return self.max_norm > 0

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        if seam is Seam.WIRE:
            super().apply(attachments, seam)
            return
        from functools import partial

        from torch.optim import SGD

        attachments.build_with(partial(SGD, lr=self.lr, weight_decay=self.weight_decay))

    def make_codec(self) -> Codec:
        from shoestring.comm.codecs.dgc import DGCCodec

        return DGCCodec(
            self.density,
            momentum=self.momentum,
            nesterov=self.nesterov,
            clip=self.max_norm or None,
            warmup=self.warmup,
            selection=self.topk_method,
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
