"""`shoestring plan`: the predicted step time under each gradient exchange, the choice, and a run file with it."""

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
from shoestring.parallel import DDP
from shoestring.run import Run
from shoestring.storage.whole import write_atomic
from shoestring.training.build import build_job, build_loader
from shoestring.training.data_loading import open_data, to_device

SHOWN = 10  # candidates that are printed
TWICE = 2  # as long as predicted, from which on it is said as a factor


@dataclass(frozen=True)
class PlannedRun:
    """The outcome of a plan, and the run with the choice; `measured` is the median of its real steps in seconds."""

    chooser: Chooser
    run: Run
    facts: dict[str, float]
    measured: float


def plan(run: Run, world: World) -> PlannedRun:
    """Measure, choose, and take a few steps under the choice. Every rank calls it; data is prepared as for the run.

    Raises:
        ConfigError: there is one rank only, or the run's exchange cannot be priced.
    """
    if world.size == 1:
        raise ConfigError(
            "a single rank has nothing to exchange", hint="plan for several ranks: --workers 2, or under torchrun"
        )
    auto = _auto(run)
    others = tuple(feature for feature in run.features if not isinstance(feature, Auto | Exchange))
    trial = replace(run, features=(*others, auto)).completed(world)
    trial = replace(trial, features=tuple(f for f in trial.features if not f.name.startswith("checkpoint.")))
    with ExitStack() as stack:
        data = open_data(trial, world, Path(run.settings.folder or Path("runs") / run.name))
        stack.callback(data.close)
        job = stack.enter_context(build_job(trial, world, data, stack.enter_context(Trace(rank=world.rank))))
        loader = build_loader(trial, job, data)
        stack.callback(loader.close)
        batches, seconds = iter(loader), []
        job.model.train()
        for _ in range(TIMED_STEPS):
            micro = [to_device(batch, world.device) for batch in next(batches)]
            world.barrier()
            began = time.perf_counter()
            job.step(*micro)
            seconds.append(time.perf_counter() - began)
        chooser = job.kept[auto.name].state
        assert isinstance(chooser, Chooser)
        return PlannedRun(chooser, _fill_in(run, others, chooser, auto), dict(job.trace.facts), median(seconds[1:]))


def _auto(run: Run) -> Auto:
    """Build the settings of the choice: what [comm.auto] allows, or the codecs that the run file names."""
    wire = [feature for feature in run.features if Seam.WIRE in feature.seams]
    for feature in wire:
        if isinstance(feature, Auto):
            return feature
        if not isinstance(feature, Exchange) or Seam.OPTIM in feature.seams:
            raise ConfigError(
                f"`{feature.name}` cannot be priced", hint="plan compares codecs that exchange gradients at every step"
            )
    return Auto(allow=tuple(_codec_call(feature) for feature in wire if feature.name != "comm.dense"))


def _codec_call(feature: Feature) -> str:
    """Write a codec's settings in the form of `comm.auto.allow`: powersgd(rank=4)."""
    common = {each.name for each in fields(Exchange)}
    own = [each for each in fields(feature) if each.name not in common]
    given = {each.name: getattr(feature, each.name) for each in own}
    changed = [
        f"{each.name}={given[each.name]!r}"
        for each in own
        if each.default is MISSING or given[each.name] != each.default
    ]
    name = feature.name.split(".")[1]
    return f"{name}({', '.join(changed)})" if changed else name


def _fill_in(run: Run, others: tuple[Feature, ...], chooser: Chooser, auto: Auto) -> Run:
    """Replace what was to be chosen by the choice."""
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


def write(planned: PlannedRun, path: Path) -> None:
    """Write the chosen run as a run file.

    Raises:
        ConfigError: it cannot be written.
    """
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
        f"{evidence.total / 1e6:.3g} MB of gradients; forward and backward {_time(facts['local_seconds'])} on a rank "
        f"alone, optimizer {_time(rest)}"
    )
    for link in evidence.links:
        along = f"{link.ranks} ranks ({' x '.join(link.over)})"
        yield f"{link.kind} over {along}: {_time(link.latency)} + {_time(1e6 / link.bandwidth)} a MB"
    slow = [f"{pair} {factor:.2f}x" for pair, factor in evidence.ranks[0].slowdown.items() if factor > 1.02]
    yield "slowdown of work that shares cores: " + (", ".join(slow) or "not measurable")
    yield ""
    yield f"predicted   against {next(iter(decision.predicted))}, by what steps learn"
    baseline = facts["predicted_ddp_seconds"]
    ordered = sorted(decision.predicted.items(), key=lambda item: (item[1] + rest) / decision.worth.get(item[0], 1.0))
    shown = [*ordered[:SHOWN], *[item for item in ordered[SHOWN:] if item[0] in ("DDP", "dense", decision.choice)]]
    for name, seconds in shown:
        mark = "   <- chosen" if name == decision.choice else ""
        worth = decision.worth.get(name, 1.0)
        learns = f" (a step is worth {worth:.2g})" if worth != 1 else ""
        yield f"{_time(seconds + rest):>9}   {worth * baseline / (seconds + rest):10.2f}x   {name}{learns}{mark}"
    if len(ordered) > len(shown):
        yield f"and {len(ordered) - len(shown)} slower candidates"
    yield ""
    yield f"chosen: {decision.choice}, {decision.reason}"
    if rough := explain_spread(evidence):
        yield rough
    if list(chooser.codecs) == ["dense"]:
        yield "no codec was tried, because none may change gradients unless it is listed: [comm.auto] allow = […]"
    if isinstance(chooser, ReplicaChooser) and decision.choice in chooser.local:
        predicted = _time(facts["predicted_step_seconds"])
        yield f"{TIMED_STEPS - 1} real steps took {_time(planned.measured)} each, and {predicted} is with their merges"
        return
    said = _beside(planned.measured, facts["predicted_step_seconds"])
    yield f"{TIMED_STEPS - 1} real steps took {_time(planned.measured)} each, {said}"


def _beside(measured: float, predicted: float) -> str:
    """How much longer something took than predicted, in words."""
    ratio = measured / predicted
    if ratio > TWICE:
        return f"{ratio:.3g} times as long as predicted"
    return f"{abs(ratio - 1):.0%} {'less' if ratio < 1 else 'more'} than predicted"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
