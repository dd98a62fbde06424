"""Lists the ways to train a run on a cluster, predicts their step times from measurements, and chooses one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from shoestring import figures
from shoestring.core.compose import unkept
from shoestring.core.errors import ConfigError, ConflictError, ShoestringError
from shoestring.core.feature import DATA, Feature, Seam, arrange_mesh, check_owners, resolve_all
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.data.loader import check_batch
from shoestring.models.blocks import repeated, routers
from shoestring.parallel import DDP, Pipeline
from shoestring.planning.predict import Predicted, predict
from shoestring.planning.step import (
    Alternative,
    GroupShape,
    Kind,
    Links,
    ModelCosts,
    Plannable,
    Situation,
    StepPlan,
    planned_step,
)
from shoestring.run import Run, keys
from shoestring.training.data_loading import DataSets
from shoestring.training.user_code import UserCode

REPLACEABLE = (DDP(), DDP(hosts="leave"))
"""The default features at SHARD, which a plan may replace. DDP with other settings is the user's choice, and stays."""
Costs = Mapping[str, ModelCosts]
"""Maps the name of a feature of `PlanSearch.also` to the costs of the model with it; "" to the costs without any."""
LONG = 120
"""Characters of a setting's value above which a plan's text leaves it out."""
CLOSE = 0.02
"""A plan with fewer features is chosen instead of the fastest plan if it takes at most this fraction longer."""


@dataclass(frozen=True)
class TrainingWay:
    """A way to train: the features added to the user's, and the numbers of micro-batches to plan for."""

    run: Run
    """The run with the added features and all defaults."""
    added: tuple[Feature, ...]
    world: World
    counts: tuple[int, ...]
    place: int = 0
    """Index of the way; of several ways that take equally long, the first is chosen."""
    also: Feature | None = None
    """The feature of `PlanSearch.also` with which this way trains; it changes the costs of the model."""

    @property
    def name(self) -> str:
        """Name of `also`, or an empty string without it: the key of the way's costs in `Costs`."""
        return self.also.name if self.also else ""


@dataclass(frozen=True)
class TrainingPlan:
    """A plan with its prediction: a run with all settings chosen."""

    run: Run
    added: tuple[Feature, ...]
    predicted: Predicted
    step: StepPlan
    place: int
    """Index of the plan's way to train."""
    refused: str = ""
    """Why the plan cannot be chosen; empty if it can be chosen."""

    @property
    def seconds(self) -> float:
        return self.predicted.seconds

    def __str__(self) -> str:
        micro = self.run.settings.accumulate
        batches = f", {micro} micro-batches" if micro > 1 else ""
        return (" + ".join(map(_describe, self.added)) or "the run file as it is") + batches


def _one_owner(features: Sequence[Feature]) -> bool:
    """Whether every seam and mesh axis has at most one owner among the features."""
    try:
        check_owners(features)
    except ConflictError:
        return False
    return True


def _describe(feature: Feature) -> str:
    """Write a feature as a call, with the settings that differ from its defaults."""
    kind = type(feature)
    named = {name: getattr(feature, name) for name in kind.__dataclass_fields__}
    defaults = {name: field.default for name, field in kind.__dataclass_fields__.items()}
    changed = list[str]()
    for name, value in named.items():
        if value != defaults[name]:
            written = str([*value]) if isinstance(value, tuple) else repr(value)
            changed.append(f"{name}={written if len(written) <= LONG else '[…]'}")
    return feature.name.partition(".")[2] + (f"({', '.join(changed)})" if changed else "")


class PlanSearch:
    """Searches the ways to train a run on the ranks of a world.

    Args:
        run: the run, without [memory.budget] and [comm.auto].
        left_out: names of features that may not be added; "run.accumulate" if the number of micro-batches is fixed.
        also: features to try that change the result of training. The model must be measured with each of them.

    Raises:
        ConfigError: no way to train fits.
    """

    def __init__(
        self,
        run: Run,
        code: UserCode,
        world: World,
        data: DataSets,
        device: str,
        left_out: Collection[str] = (),
        also: Sequence[Feature] = (),
    ) -> None:
        self.left_out, self.also = left_out, also
        self.run, self.code, self.data, self.device = run, code, data, device
        # All ranks search the same ways and get the same result, so no process group is needed.
        self.world = World(size=world.size, local_size=world.local_size, device=world.device)
        self.refusals = dict[str, str]()
        """Text that names features that do not fit the run -> the reason."""
        self._unfit = list[Feature]()
        with torch.device("meta"):
            model = code.model.build(data.model_arguments)
        self._model = model  # checks of features only read it
        self.blocks = len(repeated(model))
        norms = any(isinstance(one, _BatchNorm) for one in model.modules())
        self.mixes_samples = norms or bool(routers(model))  # results depend on which samples share a micro-batch
        self.weights = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def ways(self) -> list[TrainingWay]:
        """The ways to train that fit the features and the model, in order of their number of added features."""
        fixed = tuple(feature for feature in self.run.features if feature not in REPLACEABLE)
        names = {feature.name for feature in fixed}.union(self.left_out)
        situation = Situation(arrange_mesh(self.world, fixed), self.blocks, self.device)
        choices: list[list[Feature | None]] = [
            [None, *kind.alternatives(situation)]
            for name, kind in keys().items()
            if name not in names and isinstance(kind, Alternative)
        ]
        ways = list[TrainingWay]()
        combinations = [tuple(filter(None, chosen)) for chosen in product(*choices)]
        for also in (None, *self.also):
            for added in sorted(combinations, key=len):  # if a feature does not fit alone, its combinations are skipped
                if way := self._way(fixed, added, also):
                    ways.append(replace(way, place=len(ways)))
        if not ways:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refusals.items())
            raise ConfigError(f"there is no plan for {self.world.size} ranks ({reasons})", hint="change run.batch")
        return ways

    def _way(self, fixed: tuple[Feature, ...], added: tuple[Feature, ...], also: Feature | None) -> TrainingWay | None:
        """The way with added features; None if they do not fit, or if one of them would have no effect."""
        fixed = (*fixed, also) if also else fixed
        if any(one in added for one in self._unfit) or not _one_owner((*fixed, *added)):
            return None
        with contextlib.suppress(ShoestringError):  # the ranks may not divide into the mesh that is needed
            world = arrange_mesh(self.world, (*fixed, *added))
            if any(Seam.SHARD in feature.seams and world.ranks_over(feature.over) == 1 for feature in added):
                return None
            run = replace(self.run, features=(*fixed, *added)).completed(world)
            own = tuple(feature for feature in run.features if feature not in fixed and isinstance(feature, Plannable))
            resolved, readers = resolve_all(run.features, world), world.ranks_over(DATA)
            if unkept(resolved, world):  # they may fit together with a feature that owns the other axis
                return None
            reason, counts = self._refusal(resolved, world), self._counts(world)
            if not reason and not counts:
                reason = f"{self.run.settings.batch} samples do not divide by {readers} ranks"
            if not reason:
                settled = tuple(one for one in run.features if also and one.name == also.name)
                return TrainingWay(run, (*settled, *own), world, counts, also=also)
            if len(added) <= 1:  # if a combination does not fit, its features may still fit alone
                names = [f"[{one.name}]" for one in (*added, also) if one]
                self.refusals.setdefault(" with ".join(names) or "whole replicas", reason)
                self._unfit += () if also else added
        return None

    def _refusal(self, features: Sequence[Feature], world: World) -> str:
        """The reason why the features do not fit the model, as their `check` states it; empty if they fit."""
        job = Job(self._model, self.code.forward, self.code.loss, world=world)
        attachments = attachments_of(job)
        attachments.features = tuple(features)
        try:
            for feature in features:
                feature.check(attachments)
        except ShoestringError as error:
            return str(error.parts()[1])
        return ""

    def _counts(self, world: World) -> tuple[int, ...]:
        """Numbers of micro-batches into which a replica's samples can be divided without changing the result."""
        batch, readers = self.run.settings.batch, world.ranks_over(DATA)
        counts = list[int]()
        for count in range(self.run.settings.accumulate, batch // readers + 1):
            with contextlib.suppress(ConfigError):
                check_batch(batch, 0, readers, count)
                own = batch // readers // count == self._own_size or not self.mixes_samples
                if own and (count == self.run.settings.accumulate or "run.accumulate" not in self.left_out):
                    counts.append(count)
        return tuple(counts)

    @property
    def _own_size(self) -> int:
        """Number of samples in a micro-batch with the run file's own settings."""
        return self.run.settings.batch // self.world.ranks_over(DATA) // self.run.settings.accumulate

    def sizes(self, ways: Sequence[TrainingWay]) -> list[int]:
        """Micro-batch sizes to measure: the smallest, the largest without pipeline stages, and one in between."""
        batch = self.run.settings.batch
        every = sorted({batch // way.world.ranks_over(DATA) // count for way in ways for count in way.counts})
        within = [size for size in every if size <= max(self._own_size, every[0])]
        middle = min(within, key=lambda size: abs(size - (within[0] * within[-1]) ** 0.5))
        return sorted({within[0], middle, within[-1]})

    def needed(
        self, ways: Sequence[TrainingWay], world: World, costs: Costs
    ) -> dict[tuple[Kind, GroupShape], tuple[World, tuple[str, ...]]]:
        """Each collective that the ways use -> the world and the mesh axes with which to measure it."""
        return {
            (kind, step.group(axes)): (arrange_mesh(world, way.run.features), axes)
            for way in ways
            for step in [self._step(way, way.counts[-1], costs[way.name])[0]]
            for kind, axes in sorted(step.collectives)
        }

    def _step(
        self, way: TrainingWay, micro: int, model: ModelCosts, links: Links | None = None
    ) -> tuple[StepPlan, tuple[Feature, ...]]:
        resolved = resolve_all(way.run.features, way.world)
        return planned_step(
            way.world, resolved, model, batch=self.run.settings.batch, micro=micro, device=self.device, links=links
        )

    def file(self, plan: TrainingPlan) -> Run:
        """The user's run with the settings of a plan, but without the defaults that `completed` adds."""
        own = {feature.name: feature for feature in plan.run.features}
        fixed = tuple(own[f.name] for f in self.run.features if f not in REPLACEABLE)
        names = {feature.name for feature in fixed}
        added = tuple(feature for feature in plan.added if feature.name not in names)
        return replace(self.run, settings=plan.run.settings, features=(*fixed, *added))

    def plans(
        self, ways: Sequence[TrainingWay], costs: Costs, links: Links, slowdown: Mapping[str, float], room: float
    ) -> list[TrainingPlan]:
        """All plans; those that can be chosen come first, and the fastest first among them.

        Args:
            room: bytes that a rank may hold.
        """
        plans = [plan for way in ways for plan in self._predicted(way, costs[way.name], links, slowdown, room)]
        return sorted(plans, key=lambda plan: (bool(plan.refused), plan.seconds))

    def priced(self, run: Run, costs: Costs, links: Links, slowdown: Mapping[str, float], room: float) -> TrainingPlan:
        """Predict the plan that corresponds to a run file's own settings.

        Raises:
            ConfigError: the run's features do not fit the model or the ranks.
        """
        world = arrange_mesh(self.world, run.features)
        completed = run.completed(world)
        resolved = resolve_all(completed.features, world)
        if reason := self._refusal(resolved, world):
            raise ConfigError(reason)
        completed = replace(completed, features=as_trained(completed.features, self._model, world))
        added = tuple(feature for feature in completed.features if isinstance(feature, Plannable))
        own = {feature.name for feature in run.features}
        also = next((feature for feature in self.also if feature.name in own), None)
        way = TrainingWay(completed, added, world, (run.settings.accumulate,), also=also)
        (plan,) = self._predicted(way, costs[way.name], links, slowdown, room)
        return plan

    def _predicted(
        self, way: TrainingWay, model: ModelCosts, links: Links, slowdown: Mapping[str, float], room: float
    ) -> Iterator[TrainingPlan]:
        """Yield a plan for each number of micro-batches, except for numbers with which no pipeline can be formed."""
        for micro in way.counts:
            with contextlib.suppress(ConfigError):
                step, features = self._step(way, micro, model, links)
                predicted = predict(step, links, slowdown)
                settled = {feature.name: feature for feature in features}
                added = tuple(settled[feature.name] for feature in way.added)
                own = {feature.name: feature for feature in added}
                run = replace(
                    way.run,
                    settings=replace(way.run.settings, accumulate=micro),
                    features=tuple(own.get(feature.name, feature) for feature in way.run.features),
                )
                much = f"needs {figures.memory(int(predicted.peak))} a rank" if predicted.peak > room else ""
                yield TrainingPlan(run, added, predicted, step, way.place, much)


def as_trained(features: Sequence[Feature], model: torch.nn.Module, world: World) -> tuple[Feature, ...]:
    """The features with the pipeline cuts that training uses; a plan instead chooses cuts by measured costs."""
    return tuple(one.as_trained(model, world, features) if isinstance(one, Pipeline) else one for one in features)


def chosen(plans: Sequence[TrainingPlan]) -> TrainingPlan:
    """The fastest plan, or one with fewer features or micro-batches that takes hardly longer.

    Raises:
        ConfigError: no plan fits into memory.
    """
    possible = [plan for plan in plans if not plan.refused]
    if not possible:
        least = min(plans, key=lambda plan: plan.predicted.peak)
        raise ConfigError(
            f"no plan fits: the smallest needs {figures.memory(int(least.predicted.peak))} a rank ({least})",
            hint="use more ranks, or a smaller model; optim.adamw8bit and memory.lora also take less",
        )
    limit = possible[0].seconds * (1 + CLOSE)
    close = (plan for plan in possible if plan.seconds <= limit)

    def complexity(plan: TrainingPlan) -> tuple[int, int, int, float]:
        whole = plan.step.stages == 1  # stages need several micro-batches
        return len(plan.added), whole * plan.place, whole * plan.step.micro, plan.seconds

    return min(close, key=complexity)
