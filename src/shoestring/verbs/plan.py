"""`shoestring plan`: predicts the step time under each gradient exchange, chooses one, and writes a run file with
it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from statistics import median

from shoestring import run as runs
from shoestring.comm import Auto
from shoestring.comm.auto.chooser import TIMED_STEPS, Chooser
from shoestring.comm.auto.decision import explain_spread
from shoestring.comm.auto.replicas import ReplicaChooser
from shoestring.comm.settings.per_step import Exchange
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.figures import percent, seconds, size
from shoestring.parallel import DDP
from shoestring.report.recordings import RecordsSteps
from shoestring.run import Run
from shoestring.storage.whole import write_atomic
from shoestring.training.build import build_job, build_loader
from shoestring.training.data_loading import open_data, sequence_of, to_device, with_sequence
from shoestring.training.same_run import check_ranks
from shoestring.training.user_code import import_user_code

SHOWN = 10  # number of candidates that are printed
TWICE = 2  # measured / predicted time above which the deviation is printed as a factor


@dataclass(frozen=True)
class PlannedRun:
    """The outcome of a plan, and the run with the chosen exchange; `measured` is the median time of real steps with
    that exchange, in seconds."""

    chooser: Chooser
    run: Run
    facts: dict[str, float]
    measured: float


def plan(run: Run, world: World, out: Path | None = None) -> PlannedRun:
    """Measure the run and its links, choose an exchange, and time a few steps with it. Every rank must call this
    function; the data is prepared as for the run.

    Args:
        out: path of a run file with the choice, which the first rank writes.

    Raises:
        ConfigError: there is one rank only, the step time under the run's exchange cannot be predicted, or `out` cannot
            be written.
    """
    if world.size == 1:
        raise ConfigError(
            "a single rank has nothing to exchange", hint="plan for several ranks: --workers 2, or under torchrun"
        )
    check_ranks(run, world)
    run = with_sequence(run, world.decide(lambda: sequence_of(run)))
    auto = _auto(run)
    others = tuple(feature for feature in run.features if not isinstance(feature, Auto | Exchange))
    trial = replace(run, features=(*others, auto)).completed(world)
    # A plan saves no checkpoint, and records no step: recordings also take time, which the run's other steps do not.
    left_out = [f for f in trial.features if f.name.startswith("checkpoint.") or isinstance(f, RecordsSteps)]
    trial = replace(trial, features=tuple(f for f in trial.features if f not in left_out))
    code = import_user_code(trial, skip=("run.evaluate", "run.sinks"))
    with ExitStack() as stack:
        folder = Path(run.settings.folder or Path("runs") / run.name)
        trial = trial.placed(folder)
        data = open_data(trial, world, folder, code.collate)
        stack.callback(data.close)
        job = stack.enter_context(build_job(trial, code, world, data, stack.enter_context(Trace(rank=world.rank))))
        loader = build_loader(job, data, trial.settings, trial.data.workers)
        stack.callback(loader.close)
        batches, times = iter(loader), []
        job.model.train()
        for _ in range(TIMED_STEPS):
            micro = [to_device(batch, world.device) for batch in next(batches)]
            world.barrier()
            began = time.perf_counter()
            job.step(*micro)
            times.append(time.perf_counter() - began)
        chooser = job.kept[auto.name].state
        assert isinstance(chooser, Chooser)
        chosen = _fill_in(run, others, chooser, auto)
        planned = PlannedRun(chooser, chosen, dict(job.trace.facts), median(times[1:]))
    if out is not None:
        world.decide(lambda: _write(planned, out))
    return planned


def _auto(run: Run) -> Auto:
    """The settings of the search: the table [comm.auto] if there is one, else defaults with the codecs that the run
    file names."""
    wire = [feature for feature in run.features if Seam.WIRE in feature.seams]
    for feature in wire:
        if isinstance(feature, Auto):
            return feature
        if not isinstance(feature, Exchange) or Seam.OPTIM in feature.seams:
            raise ConfigError(
                f"the step time under `{feature.name}` cannot be predicted",
                hint="plan compares codecs that exchange gradients at every step",
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


def _fill_in(run: Run, others: tuple[Feature, ...], chooser: Chooser, auto: Auto) -> Run:
    """Put the chosen exchange into the run."""
    choice = chooser.choice
    assert choice is not None
    ddp = next((feature for feature in others if isinstance(feature, DDP)), DDP())
    rest = tuple(feature for feature in others if not isinstance(feature, DDP))
    if choice.bucket:
        ddp = replace(ddp, bucket_mb=choice.bucket / 2**20)
    if not choice.codec:
        return replace(run, features=(ddp, *rest))
    method = auto.build_method(choice)
    return replace(run, features=(method, *rest) if Seam.SHARD in method.seams else (ddp, method, *rest))


def _write(planned: PlannedRun, path: Path) -> None:
    try:
        write_atomic(path, planned.run.dump().encode())
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error.strerror}", hint="choose another --out") from error


def default_path(source: str) -> Path:
    """Return plan.toml next to the run file, or in the working folder for a recipe."""
    path = runs.locate(source)
    return (path.parent if Path(source).exists() else Path()) / "plan.toml"


def describe(planned: PlannedRun, world: World) -> Iterator[str]:
    """Describe the decision and its reasons, on one screen."""
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
    yield f"chosen: {decision.choice}, {decision.reason}"
    if rough := explain_spread(evidence):
        yield rough
    if list(chooser.codecs) == ["dense"]:
        yield "no codec was tried, because none may change gradients unless it is listed: [comm.auto] allow = […]"
    if isinstance(chooser, ReplicaChooser) and decision.choice in chooser.local:
        merged = seconds(facts["predicted_step_seconds"])
        yield f"{TIMED_STEPS - 1} real steps took {seconds(planned.measured)} each, and {merged} is with their merges"
        return
    deviation = _deviation(planned.measured, facts["predicted_step_seconds"])
    yield f"{TIMED_STEPS - 1} real steps took {seconds(planned.measured)} each, {deviation}"


def _deviation(measured: float, predicted: float) -> str:
    """The deviation of a measured time from the predicted one, in words."""
    ratio = measured / predicted
    if ratio > TWICE:
        return f"{ratio:.3g} times as long as predicted"
    return f"{percent(abs(ratio - 1))} {'less' if ratio < 1 else 'more'} than predicted"
