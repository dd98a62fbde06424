"""`shoestring plan`: predicts the step time of all ways to train a run on its ranks, chooses a way, and writes a run
file with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from statistics import median

from shoestring import run as runs
from shoestring.comm import Auto
from shoestring.comm.auto.chooser import TIMED_STEPS, Chooser
from shoestring.comm.auto.decision import explain_spread
from shoestring.comm.auto.replicas import ReplicaChooser
from shoestring.comm.settings.base import Exchange
from shoestring.core.errors import ConfigError, nearest
from shoestring.core.feature import Feature, Seam, splits_replicas
from shoestring.core.world import World
from shoestring.figures import memory, percent, seconds, size
from shoestring.memory import Budget
from shoestring.parallel import DDP
from shoestring.parallel.settings import Planned as PlanRecord
from shoestring.planner.measure import writes_files
from shoestring.planner.outlook import GIB, Outlook, look, of_all_ranks
from shoestring.planner.page import write as write_page
from shoestring.planner.search import CLOSE, TrainingPlan, chosen
from shoestring.planner.trying import for_trial, start, time_plan
from shoestring.planning.step import Plannable
from shoestring.run import Run
from shoestring.storage.whole import write_atomic
from shoestring.training.data_loading import DataSets, open_data, sequence_of
from shoestring.training.same_run import check_ranks
from shoestring.training.user_code import UserCode, import_user_code

SHOWN = 10  # maximum number of candidates to print
TWICE = 2  # ratio of measured to predicted time above which the deviation is printed as a factor
_VARIED = (Auto, Exchange, Budget, PlanRecord)  # features that the plan chooses, so the run's own ones are removed


@dataclass(frozen=True)
class Exchanged:
    """The chosen exchange of gradients between whole replicas; `measured` is the median time, in seconds, of real steps
    with this exchange."""

    chooser: Chooser
    run: Run
    facts: dict[str, float]
    measured: float

    @property
    def seconds(self) -> float:
        """Predicted seconds until training has progressed as far as in one step of DDP."""
        return self.facts["predicted_step_seconds"] / self.facts["predicted_worth"]

    @property
    def took(self) -> float:
        """Like `seconds`, but measured in a trial; equal to `seconds` for local steps, as trials include no merge."""
        return self.seconds if self.merges else self.measured / self.facts["predicted_worth"]

    @property
    def merges(self) -> bool:
        """Whether replicas are merged at intervals."""
        chooser = self.chooser
        return isinstance(chooser, ReplicaChooser) and bool(chooser.choice) and chooser.choice.codec in chooser.local


@dataclass(frozen=True)
class PlannedRun:
    """The outcome of a plan.

    Args:
        run: the run with the chosen settings. predicted, measured: predicted and measured seconds of its step.
        exchanged: the best way to train with whole replicas; None if replicas do not fit into memory.
        plans: all other ways, the fastest first. tried: index in `plans` -> measured seconds of a plan that was tried.
        choice: index in `plans` of the chosen plan; None if `exchanged` was chosen.
        outlook: the measurements that the predictions use. page: path of the page with pictures; None if not written.
    """

    run: Run
    predicted: float
    measured: float
    exchanged: Exchanged | None
    plans: Sequence[TrainingPlan] = ()
    tried: Mapping[int, float] = field(default_factory=dict)
    choice: int | None = None
    outlook: Outlook | None = None
    page: Path | None = None


@dataclass(frozen=True)
class _Planning:
    """The run to plan, and what planning needs: its code, world and data.

    Args:
        run: the user's run. others: the run's features, without features that a plan chooses.
    """

    run: Run
    others: tuple[Feature, ...]
    code: UserCode
    world: World
    data: DataSets

    @property
    def budget(self) -> Budget | None:
        return next((feature for feature in self.run.features if isinstance(feature, Budget)), None)


def plan(run: Run, world: World, out: Path | None = None, tries: int = 3, also: Sequence[str] = ()) -> PlannedRun:
    """Measure the run's model and the links between its ranks, predict all ways to train it, and choose one.

    Every rank must call this function. The data is prepared as for the run.

    Args:
        out: path of the run file with the chosen way, which the first rank writes; None to write no file.
        tries: number of ways to try for a few steps before one is chosen, starting with the fastest predicted one; 0
            compares only exchanges between whole replicas.
        also: names of features to try as well, each with its default settings, although they change the training result
            (`precision.autocast`, or `optim.adamw8bit`).

    Raises:
        ConfigError: `tries` is 0 and there is only one rank, a feature of `also` cannot be tried, the step time under
            the run's exchange cannot be predicted, nothing fits, or `out` cannot be written.
    """
    if world.size == 1 and not tries:
        raise ConfigError(
            "a single rank has nothing to exchange", hint="leave out --tries 0, or plan for several: --workers 2"
        )
    check_ranks(run.document, world)
    for feature in run.features:
        if splits_replicas(feature) and not isinstance(feature, Plannable):
            raise ConfigError(
                f"[{feature.name}] splits the model by a search of its own, which is not compared with other plans",
                hint="remove the table; `shoestring plan --explain` shows what it finds",
            )
    if out is not None:
        world.agree(lambda: _check_out(out))
    sequence = world.decide(lambda: sequence_of(run.data, run.settings.model, run.model))
    run = replace(run, data=replace(run.data, sequence=sequence))
    auto, more = _auto(run), features_to_try(run, also)
    if more and not tries:
        raise ConfigError("--also has no effect with --tries 0, which compares only exchanges", hint="leave out one")
    others = tuple(feature for feature in run.features if not isinstance(feature, _VARIED))
    code = import_user_code(run, skip=("run.evaluate", "run.sinks"))
    with ExitStack() as stack:
        folder = Path(run.settings.folder or Path("runs") / run.name)
        data = open_data(run, world, folder, code)
        stack.callback(data.close)
        planning = _Planning(run, others, code, world, data)
        if tries:
            planned = _among_all(planning, auto, tries, more)
        else:
            best = _exchanged(planning, auto)
            planned = PlannedRun(best.run, best.facts["predicted_step_seconds"], best.measured, best)
    if out is not None:

        def write() -> None:
            try:
                write_atomic(out, planned.run.toml.encode())
            except OSError as error:
                raise ConfigError(f"cannot write `{out}`: {error.strerror}", hint="choose another --out") from error
            if planned.choice is not None:
                others = [one for number, one in _shown(planned) if number != planned.choice]
                tried = {str(planned.plans[number]): took for number, took in planned.tried.items()}
                write_page(planned.plans[planned.choice], others, tried, planned.measured, page_beside(out))

        world.decide(write)
        planned = replace(planned, page=page_beside(out) if planned.choice is not None else None)
    return planned


def _check_out(out: Path) -> None:
    """Raise ConfigError if `out` cannot be written; called before planning, which takes minutes."""
    if out.suffix == page_beside(out).suffix:
        raise ConfigError(f"`{out}` is the name of a page", hint="end --out in .toml; the page lies beside it")
    nearest = next(place for place in out.absolute().parents if place.exists())
    if out.is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"cannot write `{out}`", hint="choose another --out")


def page_beside(out: Path) -> Path:
    """Path of the page that is written beside the run file `out`."""
    return out.with_suffix(".html")


_KNOBS = {
    "accumulate": "run.accumulate",
    "recompute": "memory.recompute",
    "zero": "memory.zero",
    "fsdp": "parallel.fsdp",
}
"""Entries of `memory.budget.allow` -> names of the settings or features that they allow."""


_COSTED = {Seam.MODEL, Seam.LOSS, Seam.OPTIM, Seam.STEP}
"""Seams of the features whose effect on a step is measured on one rank."""


def features_to_try(run: Run, names: Sequence[str]) -> tuple[Feature, ...]:
    """The features of `plan --also`, with their default settings.

    Raises:
        ConfigError: there is no such feature, the run has it already, or a plan varies it without being asked.
    """
    features, own, kinds = list[Feature](), {feature.name for feature in run.features}, runs.keys()
    for name in dict.fromkeys(names):
        if name not in kinds:
            raise ConfigError(f"--also: there is no feature `{name}`", hint=nearest(name, kinds))
        if name in own:
            raise ConfigError(f"--also: the run file has [{name}] already", hint="leave out one of the two")
        try:
            feature = kinds[name]()
        except TypeError:  # some setting has no default
            feature = None
        chosen_anyway = isinstance(feature, (Plannable, *_VARIED))
        if feature is None or chosen_anyway or writes_files(feature) or not {*feature.seams} <= _COSTED:
            raise ConfigError(
                f"--also: [{name}] cannot be tried in this way",
                hint="a plan varies exchanges, splits and recomputation itself; write other features in the run file",
            )
        features.append(feature)
    return tuple(features)


def _among_all(planning: _Planning, auto: Auto, tries: int, also: Sequence[Feature]) -> PlannedRun:
    """Choose among all ways to train: exchanges between whole replicas, and all other plans. A collective."""
    run, others, budget = planning.run, planning.others, planning.budget
    gib = budget.gib if budget else 0.0
    left_out = [name for knob, name in _KNOBS.items() if budget and knob not in budget.allow]
    outlook = look(replace(run, features=others), planning.code, planning.world, planning.data, gib, left_out, also)
    plans, exchanged = outlook.plans(), None
    # Exchanges are between whole replicas: these must fit into memory, and no feature may require another way to train.
    owners = [feature for feature in others if Seam.SHARD in feature.seams and not isinstance(feature, DDP)]
    whole = not owners and not any(map(splits_replicas, others))
    replicas = [plan for plan in plans if [type(feature) for feature in plan.added] in ([DDP], [])]
    if planning.world.size > 1 and whole and any(not plan.refused for plan in replicas):
        exchanged = _exchanged(planning, auto)
        assert exchanged.chooser.measured is not None
        slowdown = exchanged.chooser.measured.cluster().slowdown
        # DDP without other changes is compared as an exchange between replicas instead.
        plans = [
            one
            for one in outlook.plans(slowdown)
            if [type(feature) for feature in one.added] != [DDP] or one.step.micro != run.settings.accumulate
        ]
    tried, choice = _try(plans, exchanged, tries, planning)
    if choice is None:
        assert exchanged is not None
        run, predicted, measured = exchanged.run, exchanged.facts["predicted_step_seconds"], exchanged.measured
    else:
        predicted, measured = plans[choice].seconds, tried[choice]
        record = PlanRecord(
            num_hosts=planning.world.hosts,
            num_ranks=planning.world.size,
            num_weights=outlook.search.weights,
            seconds=float(f"{predicted:.4g}"),
            tried_seconds=float(f"{measured:.4g}"),
            peak_gib=float(f"{plans[choice].predicted.peak / GIB:.4g}"),
        )
        run = outlook.search.file(plans[choice])
        run = replace(run, features=(record, *run.features))  # first, so that its check of the ranks runs first
    return PlannedRun(run, predicted, measured, exchanged, plans, tried, choice, outlook)


def _exchanged(planning: _Planning, auto: Auto) -> Exchanged:
    """Choose an exchange of gradients like [comm.auto], and time a few steps with it. A collective."""
    run, others, world = planning.run, planning.others, planning.world
    trial = for_trial(replace(run, features=(*others, auto)), world)
    budget = (planning.budget,) if planning.budget else ()  # stays in the run, to lower the peak when the run trains
    with ExitStack() as stack:
        job, times = start(trial, planning.code, world, planning.data, stack)
        chooser = job.kept[auto.name].state
        assert isinstance(chooser, Chooser)
        choice = chooser.choice
        assert choice is not None
        ddp = next((feature for feature in others if isinstance(feature, DDP)), DDP())
        rest = tuple(feature for feature in (*others, *budget) if not isinstance(feature, DDP))
        if choice.bucket:
            ddp = replace(ddp, bucket_mb=choice.bucket / 2**20)
        features: tuple[Feature, ...] = (ddp, *rest)
        if choice.codec:
            method = auto.build_method(choice)
            features = (method, *rest) if Seam.SHARD in method.seams else (ddp, method, *rest)
        return Exchanged(chooser, replace(run, features=features), dict(job.trace.facts), median(times[1:]))


def _try(
    plans: list[TrainingPlan], exchanged: Exchanged | None, tries: int, planning: _Planning
) -> tuple[dict[int, float], int | None]:
    """Time the fastest plans for a few steps. Returns (index -> seconds for the plans that were tried, chosen index).

    A plan may be refused only when it is tried, for example because the model computes something different under it;
    such a plan is marked as refused.
    """
    possible = [number for number, one in enumerate(plans) if not one.refused]
    bound = exchanged.seconds if exchanged else float("inf")
    promising = [number for number in possible if plans[number].seconds < bound * WORTH_TRYING]
    if not promising:
        if exchanged is None:
            chosen(plans)  # raises an error that states what the smallest plan needs
        return {}, None
    first = plans.index(chosen([plans[number] for number in promising]))
    # Try only plans that differ from all earlier ones in features or in the number of micro-batches.
    unlike, seen = [first], {(*_kinds(plans[first]), plans[first].step.micro)}
    for number in promising:
        if (kinds := (*_kinds(plans[number]), plans[number].step.micro)) not in seen:
            seen.add(kinds)
            unlike.append(number)
    tried = dict[int, float]()
    for number in unlike:
        if len(tried) == tries or (tried and plans[number].seconds > min(tried.values()) * WORTH_TRYING):
            break
        try:
            own = time_plan(plans[number].run, planning.code, planning.world, planning.data)
        except ConfigError as error:
            plans[number] = replace(plans[number], refused=f"refused when it was tried: {error.parts()[1]}")
        else:
            tried[number] = max(of_all_ranks(own, planning.world))
    limit = min(tried.values(), default=0.0) * (1 + CLOSE)
    close = (number for number, took in tried.items() if took <= limit)
    best = min(close, key=lambda number: (len(plans[number].added), tried[number]), default=None)
    if best is None and exchanged is None:
        raise ConfigError("no plan can be trained", hint=f"the first plan was {plans[first].refused}")
    if best is not None and exchanged is not None and exchanged.took <= tried[best] * (1 + CLOSE):
        best = None
    return tried, best


WORTH_TRYING = 1.15
"""Plans are not tried if they are predicted to take longer than this factor times the best time. Predictions are about
as accurate as this factor."""


def _kinds(plan: TrainingPlan) -> tuple[object, ...]:
    return (*(type(feature) for feature in plan.added), plan.step.stages, plan.step.ways, plan.step.tiles)


def _auto(run: Run) -> Auto:
    """The settings of the search: the table [comm.auto] if the run has one, otherwise defaults with the codecs that the
    run file names."""
    wire = [feature for feature in run.features if Seam.WIRE in feature.seams]
    for feature in wire:
        if isinstance(feature, Auto):
            return feature
        if not isinstance(feature, Exchange) or Seam.OPTIM in feature.seams:
            raise ConfigError(
                f"the step time under `{feature.name}` cannot be predicted",
                hint="plan can only compare codecs that exchange gradients at every step",
            )
    return Auto(allow=tuple(_codec_call(feature) for feature in wire if feature.name != "comm.dense"))


def _codec_call(feature: Feature) -> str:
    """Write a codec's settings in the form of `comm.auto.allow`: powersgd(rank=4)."""
    common = {setting.name for setting in fields(Exchange)}
    own = [setting for setting in fields(feature) if setting.name not in common]
    values = {setting.name: getattr(feature, setting.name) for setting in own}
    changed = [
        f"{setting.name}={values[setting.name]!r}"
        for setting in own
        if setting.default is MISSING or values[setting.name] != setting.default
    ]
    name = feature.name.split(".")[1]
    return f"{name}({', '.join(changed)})" if changed else name


def default_path(source: str) -> Path:
    """Path of plan.toml: next to the run file, or in the working folder if `source` is a recipe."""
    path = runs.locate(source)
    return (path.parent if Path(source).exists() else Path()) / "plan.toml"


def describe(planned: PlannedRun, world: World) -> Iterator[str]:
    """Yield lines, at most a screenful, that describe the decision and its reasons."""
    if planned.exchanged is not None:
        yield from _describe_exchange(planned.exchanged, world, last=planned.choice is None)
        yield ""
    plans = planned.plans
    if planned.outlook is None:
        return
    # The measurements from which ways to train are predicted.
    ways = "ways to train" if planned.exchanged is None else "other ways"
    yield f"{ways}, within {memory(int(planned.outlook.room))} a rank; measured on all ranks at once:"
    for name, model in planned.outlook.costs.items():
        if name:
            yield f"  with [{name}]:"
        samples = model.samples[-1]
        block = max(model.blocks, key=lambda one: one.forward[-1], default=model.behind)
        what = f"each of {len(model.blocks)} blocks" if model.blocks else "the model"
        yield (
            f"  {what}: {seconds(block.forward[-1])} forward, {seconds(block.backward[-1])} backward for {samples} "
            f"samples, {size(block.trained)} of weights"
        )
        if model.blocks:
            around = [model.before, model.behind]
            forward, backward = (sum(getattr(one, way)[-1] for one in around) for way in ("forward", "backward"))
            yield (
                f"  around them: {seconds(forward)} forward, {seconds(backward)} backward, "
                f"{size(sum(one.trained for one in around))} of weights"
            )
    for (kind, group), link in sorted(planned.outlook.links.speeds.items()):
        where = f"{group.ranks} ranks on {group.hosts} host{'s' * (group.hosts > 1)}"
        yield f"  {kind}, {where}: {seconds(link.latency)} + {seconds(1e6 / link.bandwidth)} a MB"
    yield "predicted   measured   memory of a rank"
    for number, one in _shown(planned):
        mark = "   <- chosen" if number == planned.choice else ""
        real = seconds(planned.tried[number]) if number in planned.tried else ""
        why = f"   {one.refused}" if one.refused else ""
        yield f"{seconds(one.seconds):>9} {real:>10}   {memory(int(one.predicted.peak)):>9}   {one}{why}{mark}"
    for way, reason in list(planned.outlook.search.refusals.items())[:SHOWN]:
        yield f"refused: {way}: {reason}"
    yield ""
    if planned.choice is None:
        yield "chosen: whole replicas, because none of the other ways is faster"
        return
    one = plans[planned.choice]
    off = _deviation(planned.measured, planned.predicted)
    yield f"chosen: {one}; real steps took {seconds(planned.measured)}, {off}"
    if world.size > 1:
        yield f"  it waits: {_waits(one)}"


def _shown(planned: PlannedRun) -> list[tuple[int, TrainingPlan]]:
    """Indices and plans to print: the plans that were tried, and the best plan of each combination of features."""
    seen, shown = set[object](), list[tuple[int, TrainingPlan]]()
    for number, one in enumerate(planned.plans):
        kinds = (*_kinds(one), bool(one.refused))
        if number in planned.tried or (kinds not in seen and len(shown) < SHOWN):
            shown.append((number, one))
        seen.add(kinds)
    return shown


def _waits(plan: TrainingPlan) -> str:
    """The fraction of a step that ranks wait, as text; with pipeline stages, the smallest and the largest fraction."""
    busy = plan.predicted.busy()
    idle = [1 - computing / plan.seconds for computing in busy]
    if len(busy) == 1:
        return f"{percent(idle[0])} of a step for other ranks"
    return f"stages {percent(min(idle))} to {percent(max(idle))} of a step for each other"


def _describe_exchange(planned: Exchanged, world: World, *, last: bool) -> Iterator[str]:
    """Yield lines that describe the choice of an exchange between whole replicas."""
    chooser, facts = planned.chooser, planned.facts
    evidence, decision = chooser.measured, chooser.decision
    assert evidence is not None and decision is not None
    rest = facts["predicted_step_seconds"] - decision.seconds
    yield (
        f"{world.size} ranks on {world.hosts} host{'s' * (world.hosts > 1)}, "
        f"{size(evidence.total)} of gradients; forward and backward {seconds(facts['local_seconds'])} on a rank "
        f"alone, optimizer {seconds(rest)}"
    )
    for link in evidence.links:
        along = f"{link.ranks} ranks ({' x '.join(link.over)})"
        yield f"{link.kind} over {along}: {seconds(link.latency)} + {seconds(1e6 / link.bandwidth)} a MB"
    slow = [f"{pair} {factor:.2f}x" for pair, factor in evidence.ranks[0].slowdown.items() if factor > 1.02]
    yield "slowdown of work that shares cores: " + (", ".join(slow) or "not measurable")
    yield ""
    yield f"predicted   against {next(iter(decision.predicted))}, by what steps learn"
    baseline = facts["predicted_ddp_seconds"]
    ordered = sorted(decision.predicted.items(), key=lambda item: (item[1] + rest) / decision.worth.get(item[0], 1.0))
    shown = [*ordered[:SHOWN], *[item for item in ordered[SHOWN:] if item[0] in ("DDP", "dense", decision.choice)]]
    for name, time_of_step in shown:
        mark = "   <- chosen" if name == decision.choice else ""
        worth = decision.worth.get(name, 1.0)
        learns = f" (a step is worth {worth:.2g})" if worth != 1 else ""
        whole = time_of_step + rest
        yield f"{seconds(whole):>9}   {worth * baseline / whole:10.2f}x   {name}{learns}{mark}"
    if len(ordered) > len(shown):
        yield f"and {len(ordered) - len(shown)} slower candidates"
    yield ""
    yield f"{'chosen' if last else 'the best of these'}: {decision.choice}, {decision.reason}"
    if rough := explain_spread(evidence):
        yield rough
    if list(chooser.codecs) == ["dense"]:
        yield "no codec was tried, because none may change gradients unless it is listed: [comm.auto] allow = […]"
    if planned.merges:
        merged = seconds(facts["predicted_step_seconds"])
        yield f"{TIMED_STEPS - 1} real steps took {seconds(planned.measured)} each, and {merged} is with their merges"
        return
    deviation = _deviation(planned.measured, facts["predicted_step_seconds"])
    yield f"{TIMED_STEPS - 1} real steps took {seconds(planned.measured)} each, {deviation}"


def _deviation(measured: float, predicted: float) -> str:
    """How far a measured time is from the predicted time, as text."""
    ratio = measured / predicted
    if ratio > TWICE:
        return f"{ratio:.3g} times as long as predicted"
    return f"{percent(abs(ratio - 1))} {'less' if ratio < 1 else 'more'} than predicted"
