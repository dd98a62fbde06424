"""Settings of the automatic choice between exchanges by predicted cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.comm.settings.base import Exchange, Transport, check_least, check_types
from shoestring.comm.settings.calls import parse_call, parse_exchange
from shoestring.comm.settings.local_steps import DiLoCo, LocalSGD, LocalSteps, SparseLoCo
from shoestring.comm.settings.per_step import Dense
from shoestring.comm.settings.worth import estimate_worth
from shoestring.core.errors import ConfigError, nearest
from shoestring.core.feature import DATA, HOSTS, Feature, Inexact, Reduction, Seam, splitting
from shoestring.settings import structure

if TYPE_CHECKING:
    from shoestring.comm.auto.decision import Candidate
    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.core.world import World

__all__ = ["Auto", "Selective"]


@dataclass(frozen=True, kw_only=True)
class Auto(Feature):
    """Measures links, codecs and a few passes at start-up, and uses the exchange with which the loss is predicted to
    fall fastest.

    DDP is left unchanged if no method beats it. Only the methods in `allow` may change training. If `allow` includes
    local steps, the model must not be wrapped in DDP, and exchanges at every step run after the backward pass.
    """

    allow: tuple[str, ...] = ()
    """Methods that may be chosen, in order of preference: codecs such as "bf16" or "powersgd(rank=4)", and local steps
    such as "localsgd(every=8, codec='4bit')". If the list is empty, gradients are sent exactly."""
    worth: tuple[float, ...] = ()
    """Number of DDP steps that one step of each method in `allow` is worth, in the same order. A larger value favours
    the method; 0, or an empty list, uses the value measured with a small model. A method without a measured value needs
    a number here."""
    trials: int = 3
    """Number of forward and backward passes that are timed, after one warm-up pass. More passes make the prediction
    steadier and delay the first step."""
    torus: bool = True
    """Whether a codec runs between hosts only, on sums formed inside each host (2D torus). The setting has an effect
    only if several hosts have several ranks each."""

    seams: ClassVar = (Seam.WIRE,)
    baselines: ClassVar[tuple[str, ...]] = ("DDP", "dense")

    @property
    def name(self) -> str:
        return "comm.auto"

    @property
    def inexact(self) -> Inexact:
        kinds = {method.inexact for method in self.methods.values()}
        return "gradients" if "gradients" in kinds else "numbers" if "numbers" in kinds else ""

    def resolve(self, world: World) -> Any:
        if not any(isinstance(parse_method(call), LocalSteps) for call in self.allow):
            return self
        return AutoReplicas(**{field.name: getattr(self, field.name) for field in fields(self)})

    def check(self, attachments: Attachments) -> None:
        if attachments.world.ranks_over(DATA) > 1 and not attachments.averages_in_backward:
            raise ConfigError(
                f"`{self.name}` needs a model under DDP", hint="name a codec, as in [comm.powersgd], or use DDP"
            )
        inside = [
            feature for feature in attachments.features if feature.averages_in_backward and HOSTS not in feature.over
        ]
        if inside and attachments.world.ranks_over([HOSTS]) > 1:
            raise ConfigError(
                f"`{self.name}` may choose unchanged DDP, and `{inside[0].name}` does not average between hosts",
                hint=f'set {inside[0].name}.hosts = "replicate", or name a codec, as in [comm.powersgd]',
            )
        self._check_methods(attachments)

    def _check_methods(self, attachments: Attachments) -> None:
        check_types(self, attachments)
        names = splitting(attachments.features, attachments.world)
        if names and attachments.world.ranks_over(DATA) > 1:
            raise ConfigError(
                f"`{self.name}` times passes of the whole model, of which `{names[0]}` gives a rank one part",
                hint="name a codec, as in [comm.powersgd]",
            )
        check_least(self.name, self, 1, "trials")
        if len(self.worth) not in (0, len(self.allow)) or not all(worth >= 0 for worth in self.worth):
            raise ConfigError(
                f"`{self.name}.worth` must have a number of steps for each of the {len(self.allow)} methods in "
                f"`allow`, got {list(self.worth)}"
            )
        for candidate in self.methods.values():
            candidate.check(attachments)
        if unknown := [call for call, worth in self.find_worth(0).items() if not worth]:
            raise ConfigError(
                f"`{self.name}` does not know how many DDP steps a step of `{unknown[0]}` is worth",
                hint=f"measure it, and set `worth` to {len(self.allow)} numbers, 0 for those that are known",
            )

    @property
    def methods(self) -> dict[str, Exchange | LocalSteps]:
        """Settings of each method that may be chosen, keyed by its call, such as "powersgd(rank=4)"."""
        return {call: parse_method(call) for call in ("dense", *self.allow)}

    def find_worth(self, total: int) -> dict[str, float]:
        """Number of DDP steps that a step of each method is worth, by call; 0 if unknown (`check` refuses 0).

        Args:
            total: number of steps of the run; 0 if the end is unknown.
        """
        configured = dict(zip(self.allow, self.worth or [0.0] * len(self.allow), strict=True))
        return {
            call: configured.get(call) or estimate_worth(method, total) or 0.0 for call, method in self.methods.items()
        }

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        if attachments.world.ranks_over(DATA) == 1:
            return
        from shoestring.comm.auto.chooser import Chooser
        from shoestring.comm.exchange.attach import install

        Chooser(
            attachments,
            self.name,
            {call: method.make_codec for call, method in self.methods.items()},
            trials=self.trials,
            torus=self.torus,
            install=lambda candidate: install(attachments, self.build_exchange(candidate)),
            worth=self.find_worth(attachments.progress.total),
        ).attach()

    def build_method(self, candidate: Candidate) -> Exchange | LocalSteps:
        """Build the feature of a candidate: local steps, or an exchange with a codec."""
        method = parse_method(candidate.codec)
        return method if isinstance(method, LocalSteps) else self.build_exchange(candidate)

    def build_exchange(self, candidate: Candidate) -> Exchange:
        """Build the feature of a candidate that has a codec."""
        transport = Transport(parts=candidate.parts, channels=candidate.channels, torus=self.torus)
        if candidate.whole:
            return Selective(codec=candidate.codec, uncompressed=candidate.whole, transport=transport)
        return replace(parse_exchange(candidate.codec), transport=transport)

    def explain(self, attachments: Attachments) -> str:
        if attachments.world.ranks_over(DATA) == 1:
            return "off: one rank"
        saved = attachments.kept.get(self.name)
        if saved is not None and str(saved.state):  # a `Chooser`; its text is empty until it has chosen
            return str(saved.state)
        return f"chosen in the first step from {', '.join([*self.baselines, *self.allow])}"

    def reduction(self, trace: Trace) -> Reduction | None:
        cut = Dense().reduction(trace)
        return cut and replace(cut, cost=f"chosen by {self.name}{cut.cost.removeprefix(Dense().cost)}")


@dataclass(frozen=True, kw_only=True)
class AutoReplicas(Auto):
    """`Auto` for a list of methods that includes local steps."""

    seams: ClassVar = (Seam.SHARD, Seam.STEP)
    baselines: ClassVar[tuple[str, ...]] = ("dense",)

    @property
    def inexact(self) -> Inexact:
        return "fragments" if any(method.inexact == "fragments" for method in self.methods.values()) else "replicas"

    def check(self, attachments: Attachments) -> None:
        self._check_methods(attachments)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        if attachments.world.ranks_over(DATA) == 1 or seam is Seam.SHARD:
            return
        from shoestring.comm.auto.replicas import ReplicaChooser
        from shoestring.comm.local.outer_state import let_replicas_differ

        local = {call: method for call, method in self.methods.items() if isinstance(method, LocalSteps)}
        exchanges = {
            call: replace(method, transport=Transport(parts=1, torus=self.torus))
            for call, method in self.methods.items()
            if isinstance(method, Exchange)
        }
        ReplicaChooser(
            attachments, self.name, exchanges, local, self.find_worth, trials=self.trials, torus=self.torus
        ).attach()
        let_replicas_differ(attachments, DATA)

    def explain(self, attachments: Attachments) -> str:
        choice = super().explain(attachments)
        if attachments.world.ranks_over(DATA) == 1:
            return choice
        return f"{choice}; exchanges at every step run after the backward pass, because local steps need a bare model"

    def reduction(self, trace: Trace) -> Reduction | None:
        return super().reduction(trace) or LocalSGD().reduction(trace)


@dataclass(frozen=True, kw_only=True)
class Selective(Exchange):
    """Use one codec for most parameters, and leave the gradients of some parameters uncompressed.

    Compression saves no time for gradients whose exchange overlaps with the backward pass anyway.
    """

    codec: str = "dense"
    """Codec of the compressed parameters, written as in `comm.auto.allow`: "powersgd(rank=4)"."""
    uncompressed: tuple[str, ...] = ()
    """Names of the parameters whose gradients are not compressed, or patterns such as "blocks.3.*"."""

    def make_codec(self) -> Codec:
        from shoestring.comm.selection.selective import SelectiveCodec

        return SelectiveCodec(self._find_codec().make_codec(), self.uncompressed)

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        self._find_codec().check(attachments)
        for pattern in self.uncompressed:
            if not any(fnmatchcase(name, pattern) for name in attachments.named()):
                raise ConfigError(
                    f"`{self.name}.uncompressed`: no parameter is called `{pattern}`",
                    hint=nearest(pattern, attachments.named()),
                )

    def _find_codec(self) -> Exchange:
        return parse_exchange(self.codec, f"{self.name}.codec")

    @property
    def codec_loses(self) -> Inexact:
        return self._find_codec().codec_loses

    @property
    def cost(self) -> str:
        return f"{self._find_codec().cost} (but {len(self.uncompressed)} parameters are not compressed)"


def parse_method(call: str) -> Exchange | LocalSteps:
    """Build the settings of a method from a call such as "powersgd(rank=4)"; for local steps ("localsgd(every=8)"),
    each rank is a replica.

    Raises:
        ConfigError: there is no such method, setting or value.
    """
    name, settings = parse_call(call)
    local: Mapping[str, type[LocalSteps]] = {kind.__name__.lower(): kind for kind in (LocalSGD, DiLoCo, SparseLoCo)}
    if name not in local:
        return parse_exchange(call)
    known = [field.name for field in fields(local[name]) if field.name != "replica"]
    for key in settings:
        if key not in known:
            raise ConfigError(f"`comm.auto.allow`: `{name}` has no setting `{key}` here", hint=nearest(key, known))
    return structure(settings | {"replica": "rank"}, local[name], name, "`comm.auto.allow`")
