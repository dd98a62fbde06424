"""Settings of the choice among exchanges by their predicted cost."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from shoestring.comm.settings import per_step
from shoestring.comm.settings.per_step import Dense, Exchange
from shoestring.core.errors import ConfigError, nearest
from shoestring.core.feature import DATA, Feature, Saving, Seam

if TYPE_CHECKING:
    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

__all__ = ["Auto", "Selective"]


@dataclass(frozen=True, kw_only=True)
class Auto(Feature):
    """Measure links, codecs and a few steps at the start, and take the exchange that is predicted to be the fastest.

    Under plain DDP nothing is attached when nothing beats it. What changes numbers is tried only where `allow` has it.
    """

    allow: tuple[str, ...] = ()
    """Codecs that may be chosen, the preferred first: "bf16", "powersgd(rank=4)"; without any, gradients stay exact."""
    trials: int = 3
    """Forward and backward passes that are timed, after one that is not."""
    torus: bool = True
    """With several ranks on several hosts: sum inside hosts first, and use the codec between hosts only."""

    seams: ClassVar = (Seam.WIRE,)

    def check(self, job: Job) -> None:
        if self.trials < 1:
            raise ConfigError(f"`{self.name}.trials` must be at least 1, got {self.trials}")
        if job.world.ranks_over(DATA) > 1 and job.engine != "ddp":
            raise ConfigError(
                f"`{self.name}` chooses for models under DDP", hint="name a codec, as in [comm.powersgd], or use DDP"
            )
        for each in (Dense(), *map(exchange, self.allow)):
            each.check(job)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.comm.auto.choosing import Chooser

        if job.world.ranks_over(DATA) > 1:
            Chooser(job, self).attach()

    def explain(self, job: Job) -> str:
        if job.world.ranks_over(DATA) == 1:
            return "off: one rank"
        kept = job.kept.get(self.name)
        if kept is not None and str(kept.state):
            return str(kept.state)
        return "is chosen in the first step from " + ", ".join(["DDP", "dense", *self.allow])

    def saving(self, trace: Trace) -> Saving | None:
        found = Dense().saving(trace)
        return found and replace(found, cost=f"chosen by {self.name}{found.cost.removeprefix(Dense().cost)}")


@dataclass(frozen=True, kw_only=True)
class Selective(Exchange):
    """One codec for some parameters, and gradients whole for the others: what compression gains nothing for."""

    of: str = "dense"
    """The codec, as in `comm.auto.allow`: "powersgd(rank=4)"."""
    whole: tuple[str, ...] = ()
    """Parameters whose gradients travel whole: names, or patterns such as "blocks.3.*"."""

    def codec(self) -> Codec:
        from shoestring.comm.selection.selective import Selective

        return Selective(exchange(self.of).codec(), self.whole)

    def check(self, job: Job) -> None:
        super().check(job)
        exchange(self.of).check(job)

    @property
    def cost(self) -> str:
        return f"{exchange(self.of).cost} (but {len(self.whole)} parameters travel whole)"


def exchange(call: str) -> Exchange:
    """The settings that `call` writes: "bf16", or "powersgd(rank=4)".

    Raises:
        ConfigError: there is no such codec or setting.
    """
    name, settings = parsed(call)
    found = {each.lower(): getattr(per_step, each) for each in per_step.__all__ if each != "Exchange"}
    kinds = {each: kind for each, kind in found.items() if kind.seams == (Seam.WIRE,)}  # none that takes the optimizer
    if name not in kinds:
        raise ConfigError(f"`comm.auto.allow`: there is no codec `{name}`", hint=nearest(name, kinds))
    common = {each.name for each in fields(Exchange)}
    known = [each.name for each in fields(kinds[name]) if each.name not in common]
    for key in settings:
        if key not in known:
            raise ConfigError(f"`comm.auto.allow`: `{name}` has no setting `{key}` here", hint=nearest(key, known))
    return kinds[name](**settings)


def parsed(call: str) -> tuple[str, dict[str, object]]:
    """ "powersgd(rank=4)" as ("powersgd", {"rank": 4}).

    Raises:
        ConfigError: it is neither a name nor a call with literals.
    """
    try:
        tree = ast.parse(call.strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
            return tree.func.id, {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ConfigError(f"`comm.auto.allow`: cannot read {call!r}", hint='write "bf16" or "powersgd(rank=4)"')
