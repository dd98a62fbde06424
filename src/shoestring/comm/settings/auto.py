"""Settings of the choice among exchanges by their predicted cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.comm.settings.calls import parse_exchange
from shoestring.comm.settings.per_step import Dense, Exchange
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Feature, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.comm.auto.decision import Candidate
    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

__all__ = ["Auto", "Selective"]


@dataclass(frozen=True, kw_only=True)
class Auto(Feature):
    """Measures links, codecs and a few passes at start-up, and takes the exchange with the shortest predicted step.

    Plain DDP stays as it is when nothing beats it. Only the codecs in `allow` may change gradients.
    """

    allow: tuple[str, ...] = ()
    """Codecs that may be chosen, the preferred one first, such as "bf16" or "powersgd(rank=4)". With an empty list
    gradients stay exact."""
    trials: int = 3
    """Number of forward and backward passes that are timed, after one warm-up pass. More passes make the prediction
    steadier and delay the first step."""
    torus: bool = True
    """Whether a codec runs between hosts only, on sums formed inside each host (2D torus). It applies where several
    hosts have several ranks each."""

    seams: ClassVar = (Seam.WIRE,)

    def check(self, job: Job) -> None:
        if self.trials < 1:
            raise ConfigError(f"`{self.name}.trials` must be at least 1, got {self.trials}")
        if job.world.ranks_over(DATA) > 1 and job.engine != "ddp":
            raise ConfigError(
                f"`{self.name}` needs a model under DDP", hint="name a codec, as in [comm.powersgd], or use DDP"
            )
        for candidate in (Dense(), *map(parse_exchange, self.allow)):
            candidate.check(job)

    def apply(self, job: Job, seam: Seam) -> None:
        if job.world.ranks_over(DATA) == 1:
            return
        from shoestring.comm.auto.chooser import Chooser
        from shoestring.comm.exchange.attach import install

        codecs = {call: parse_exchange(call).make_codec for call in ("dense", *self.allow)}
        Chooser(
            job,
            self.name,
            codecs,
            trials=self.trials,
            torus=self.torus,
            install=lambda candidate: install(job, self.build_exchange(candidate)),
        ).attach()

    def build_exchange(self, candidate: Candidate) -> Exchange:
        """Build the feature of a candidate that has a codec."""
        common: dict[str, Any] = {"parts": candidate.parts, "channels": candidate.channels, "torus": self.torus}
        if candidate.whole:
            return Selective(codec=candidate.codec, uncompressed=candidate.whole, **common)
        return replace(parse_exchange(candidate.codec), **common)

    def explain(self, job: Job) -> str:
        if job.world.ranks_over(DATA) == 1:
            return "off: one rank"
        kept = job.kept.get(self.name)
        if kept is not None and str(kept.state):
            return str(kept.state)
        return "chosen in the first step from " + ", ".join(["DDP", "dense", *self.allow])

    def reduction(self, trace: Trace) -> Reduction | None:
        cut = Dense().reduction(trace)
        return cut and replace(cut, cost=f"chosen by {self.name}{cut.cost.removeprefix(Dense().cost)}")


@dataclass(frozen=True, kw_only=True)
class Selective(Exchange):
    """One codec for most parameters, while the gradients of some parameters are not compressed.

    Compression gains nothing for gradients whose exchange is overlapped by the backward pass anyway.
    """

    codec: str = "dense"
    """Codec of the compressed parameters, written as in `comm.auto.allow`: "powersgd(rank=4)"."""
    uncompressed: tuple[str, ...] = ()
    """Names of the parameters whose gradients are not compressed, or patterns such as "blocks.3.*"."""

    def make_codec(self) -> Codec:
        from shoestring.comm.selection.selective import SelectiveCodec

        return SelectiveCodec(parse_exchange(self.codec).make_codec(), self.uncompressed)

    def check(self, job: Job) -> None:
        super().check(job)
        parse_exchange(self.codec).check(job)

    @property
    def cost(self) -> str:
        return f"{parse_exchange(self.codec).cost} (but {len(self.uncompressed)} parameters are not compressed)"
