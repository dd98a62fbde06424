"""Settings of the choice among exchanges by their predicted cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.comm.settings.base import check_types
from shoestring.comm.settings.calls import parse_call, parse_exchange
from shoestring.comm.settings.local_steps import DiLoCo, LocalSGD, LocalSteps, SparseLoCo
from shoestring.comm.settings.per_step import Dense, Exchange
from shoestring.comm.settings.worth import estimate_worth
from shoestring.core.errors import ConfigError, nearest
from shoestring.core.feature import DATA, Feature, Reduction, Seam
from shoestring.settings import structure

if TYPE_CHECKING:
    from shoestring.comm.auto.decision import Candidate
    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.core.world import World

__all__ = ["Auto", "Selective"]


@dataclass(frozen=True, kw_only=True)
class Auto(Feature):
    """Measures links, codecs and a few passes at start-up, and takes the exchange that is predicted to learn fastest.

    Plain DDP stays as it is when nothing beats it. Only the methods in `allow` may change training. Local steps among
    them need a model without DDP; exchanges at every step then run after the backward pass.
    """

    allow: tuple[str, ...] = ()
    """Methods that may be chosen, the preferred one first: codecs such as "bf16" or "powersgd(rank=4)", and local steps
    such as "localsgd(every=8, codec='4bit')". With an empty list gradients stay exact."""
    worth: tuple[float, ...] = ()
    """Number of DDP's steps that a step of each method in `allow` is worth, in the same order. A larger value favours
    the method; 0, or an empty list, takes what was measured with a small model. A method without such a figure needs a
    number here."""
    trials: int = 3
    """Number of forward and backward passes that are timed, after one warm-up pass. More passes make the prediction
    steadier and delay the first step."""
    torus: bool = True
    """Whether a codec runs between hosts only, on sums formed inside each host (2D torus). It applies where several
    hosts have several ranks each."""

    seams: ClassVar = (Seam.WIRE,)
    baselines: ClassVar[tuple[str, ...]] = ("DDP", "dense")

    @property
    def name(self) -> str:
        return "comm.auto"

    def resolve(self, world: World) -> Any:
        if not any(isinstance(parse_method(call), LocalSteps) for call in self.allow):
            return self
        return AutoReplicas(**{field.name: getattr(self, field.name) for field in fields(self)})

    def check(self, job: Job) -> None:
        if job.world.ranks_over(DATA) > 1 and job.engine != "ddp":
            raise ConfigError(
                f"`{self.name}` needs a model under DDP", hint="name a codec, as in [comm.powersgd], or use DDP"
            )
        self._check_methods(job)

    def _check_methods(self, job: Job) -> None:
        check_types(self, job)
        if self.trials < 1:
            raise ConfigError(f"`{self.name}.trials` must be at least 1, got {self.trials}")
        if len(self.worth) not in (0, len(self.allow)) or not all(worth >= 0 for worth in self.worth):
            raise ConfigError(
                f"`{self.name}.worth` must have a number of steps for each of the {len(self.allow)} methods in "
                f"`allow`, got {list(self.worth)}"
            )
        for candidate in self.methods.values():
            candidate.check(job)
        if unknown := [call for call, worth in self.find_worth(0).items() if not worth]:
            raise ConfigError(
                f"`{self.name}` does not know what a step of `{unknown[0]}` is worth beside one of DDP",
                hint=f"measure it, and set `worth` to {len(self.allow)} numbers, 0 for those that are known",
            )

    @property
    def methods(self) -> dict[str, Exchange | LocalSteps]:
        """What may be chosen, by call."""
        return {call: parse_method(call) for call in ("dense", *self.allow)}

    def find_worth(self, total: int) -> dict[str, float]:
        """Steps of DDP that a step of each method is worth; 0 if nobody knows, which `check` refuses.

        Args:
            total: steps of the run, 0 where that is open.
        """
        given = dict(zip(self.allow, self.worth or [0.0] * len(self.allow), strict=True))
        return {call: given.get(call) or estimate_worth(each, total) or 0.0 for call, each in self.methods.items()}

    def apply(self, job: Job, seam: Seam) -> None:
        if job.world.ranks_over(DATA) == 1:
            return
        from shoestring.comm.auto.chooser import Chooser
        from shoestring.comm.exchange.attach import install

        Chooser(
            job,
            self.name,
            {call: method.make_codec for call, method in self.methods.items()},
            trials=self.trials,
            torus=self.torus,
            install=lambda candidate: install(job, self.build_exchange(candidate)),
            worth=self.find_worth(job.progress.total),
        ).attach()

    def build_method(self, candidate: Candidate) -> Exchange | LocalSteps:
        """Build the feature of a candidate that has a codec or is a method of local steps."""
        method = parse_method(candidate.codec)
        return method if isinstance(method, LocalSteps) else self.build_exchange(candidate)

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
        return f"chosen in the first step from {', '.join([*self.baselines, *self.allow])}"

    def reduction(self, trace: Trace) -> Reduction | None:
        cut = Dense().reduction(trace)
        return cut and replace(cut, cost=f"chosen by {self.name}{cut.cost.removeprefix(Dense().cost)}")


@dataclass(frozen=True, kw_only=True)
class AutoReplicas(Auto):
    """`Auto` where local steps are among the methods."""

    seams: ClassVar = (Seam.SHARD, Seam.STEP)
    baselines: ClassVar[tuple[str, ...]] = ("dense",)

    def check(self, job: Job) -> None:
        self._check_methods(job)

    def apply(self, job: Job, seam: Seam) -> None:
        if job.world.ranks_over(DATA) == 1 or seam is Seam.SHARD:
            return
        from shoestring.comm.auto.replicas import ReplicaChooser
        from shoestring.comm.local.outer_state import let_replicas_differ

        local = {call: method for call, method in self.methods.items() if isinstance(method, LocalSteps)}
        exchanges = {
            call: replace(method, parts=1, torus=self.torus)
            for call, method in self.methods.items()
            if isinstance(method, Exchange)
        }
        ReplicaChooser(job, self.name, exchanges, local, self.find_worth, trials=self.trials, torus=self.torus).attach()
        let_replicas_differ(job, DATA)

    def explain(self, job: Job) -> str:
        said = super().explain(job)
        if job.world.ranks_over(DATA) == 1:
            return said
        return f"{said}; exchanges at every step run after the backward pass, because local steps need a bare model"

    def reduction(self, trace: Trace) -> Reduction | None:
        return super().reduction(trace) or LocalSGD().reduction(trace)


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

        return SelectiveCodec(self._find_codec().make_codec(), self.uncompressed)

    def check(self, job: Job) -> None:
        super().check(job)
        self._find_codec().check(job)
        for pattern in self.uncompressed:
            if not any(fnmatchcase(name, pattern) for name in job.named()):
                raise ConfigError(
                    f"`{self.name}.uncompressed`: no parameter is called `{pattern}`",
                    hint=nearest(pattern, job.named()),
                )

    def _find_codec(self) -> Exchange:
        return parse_exchange(self.codec, f"{self.name}.codec")

    @property
    def cost(self) -> str:
        return f"{self._find_codec().cost} (but {len(self.uncompressed)} parameters are not compressed)"


def parse_method(call: str) -> Exchange | LocalSteps:
    """Build the settings that `call` writes: a codec, or local steps such as "localsgd(every=8)" of single ranks.

    Raises:
        ConfigError: there is no such method, setting or value.
    """
    name, settings = parse_call(call)
    local: Mapping[str, type[LocalSteps]] = {each.__name__.lower(): each for each in (LocalSGD, DiLoCo, SparseLoCo)}
    if name not in local:
        return parse_exchange(call)
    known = [field.name for field in fields(local[name]) if field.name != "replica"]
    for key in settings:
        if key not in known:
            raise ConfigError(f"`comm.auto.allow`: `{name}` has no setting `{key}` here", hint=nearest(key, known))
    return structure(settings | {"replica": "rank"}, local[name], name, "`comm.auto.allow`")
