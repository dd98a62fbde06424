"""What a budget chooses, against every combination of the same knobs that was really run."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Bar, Deadline, Measured, stored
from shoestring import compose, memory
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.memory import Budget
from shoestring.memory.settings.budget import Knob
from shoestring.models.loading import build_model
from shoestring.run import Run, parse
from shoestring.training.budget import GIB, BudgetSearch, MemoryChoice
from shoestring.training.choices import with_choice
from shoestring.training.data_loading import model_arguments

KNOBS: tuple[Knob, ...] = ("accumulate", "recompute")
PARTS = (0.02, 0.1, 0.25, 0.5, 0.8)
"""Of the way from the least that fits to what the run takes as it is."""
RUNS: dict[str, dict[str, Any]] = {
    "narrow": {"run": {"batch": 16}, "model": {"dim": 192, "layers": 4, "heads": 6, "kv_heads": 2, "hidden": 512}},
    "long": {
        "run": {"batch": 8},
        "model": {"dim": 256, "layers": 3, "heads": 4, "kv_heads": 4, "hidden": 1024},
        "data": {"sequence": 512},
    },
}
SEQUENCE = 128
ROUNDS = 7
CLOSE = 1.04
"""Combinations whose time is at most this many times the best one's are timed again, in alternation with the choice."""


@dataclass(frozen=True)
class Tried:
    """A combination that was run."""

    choice: MemoryChoice
    peak: int
    """Bytes, traced."""
    seconds: float
    """Of a step: the least of some, in processor time."""


def _run(name: str) -> Run:
    tables = RUNS[name]
    data = {"tokenizer": "bytes", "sequence": SEQUENCE, **tables.get("data", {})}
    document = {**tables, "data": data, "checkpoint": {"plain": {}}}
    return parse(document, name=name).completed(World())


@contextmanager
def _stepping(run: Run, features: Sequence[Feature], accumulate: int) -> Iterator[Callable[[], object]]:
    """A step of the run with these features, on random tokens."""
    torch.manual_seed(0)
    model = build_model(run.settings.model, run.model, model_arguments(run), 0)
    rows, tokens = run.settings.batch // accumulate, run.data.sequence
    micro = [torch.randint(0, 256, (rows, tokens + 1)) for _ in range(accumulate)]
    batches = [{"inputs": each[:, :-1].contiguous(), "targets": each[:, 1:].contiguous()} for each in micro]
    with ExitStack() as stack:
        job = stack.enter_context(Job(model))
        stack.enter_context(compose(job, [each for each in features if not each.name.startswith("checkpoint.")]))
        yield lambda: job.step(*batches)


def _seconds(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def _tried(run: Run, choice: MemoryChoice) -> Tried:
    gc.collect()  # models of earlier combinations that lie in cycles would be traced, too
    with memory.traced() as traced, _stepping(run, choice.features, choice.accumulate) as step:
        step()
        step()
    with _stepping(run, choice.features, choice.accumulate) as step:
        step()
        seconds = min(_seconds(step) for _ in range(2))
    return Tried(choice, traced.profile.main.peak, seconds)


def budgets(name: str) -> list[dict[str, Any]]:
    """Of each budget of a run: what is chosen, its traced peak over the budget, and its time over the best one's."""
    torch.set_num_threads(1)
    run, found = _run(name), []
    search = BudgetSearch(run, World())
    tried = [_tried(run, choice) for choice in search.choices(KNOBS, rounding=False)]
    whole = next(each.peak for each in tried if not each.choice.blocks and each.choice.accumulate == 1)
    least = min(each.peak for each in tried)
    for part in PARTS:
        room = least + part * (whole - least)
        budget = Budget(gib=room / GIB, allow=KNOBS)
        chosen = with_choice(run, World(), budget, search.within(budget))
        features = {each for each in chosen.features if not isinstance(each, Budget)}
        ours = next(
            each
            for each in tried
            if each.choice.accumulate == chosen.settings.accumulate and set(each.choice.features) == features
        )
        fitting = sorted((each for each in tried if each.peak <= room), key=lambda each: each.seconds)
        close = [each for each in fitting if each.seconds <= CLOSE * fitting[0].seconds and each is not ours][:4]
        slower = max([1.0, *(_against(run, ours, each) for each in close)])
        said = ours.choice.describe(run, search.blocks)
        print(f"{name} {room / 2**20:.1f} MiB: {said}; {ours.peak / room:.3f}, {slower:.3f}", file=sys.stderr)
        found.append({"part": part, "chosen": said, "peak": ours.peak / room, "slower": slower, "tried": len(tried)})
    return found


def _against(run: Run, ours: Tried, other: Tried) -> float:
    """Times as long as the other a step of ours takes: the median of rounds in alternation."""
    with (
        _stepping(run, ours.choice.features, ours.choice.accumulate) as our_step,
        _stepping(run, other.choice.features, other.choice.accumulate) as other_step,
    ):
        our_step()
        other_step()
        return statistics.median(_seconds(our_step) / _seconds(other_step) for _ in range(ROUNDS))


def rows(folder: Path, deadline: Deadline) -> list[Bar]:
    """The bars of the budget; what was chosen and measured is stored in a file for each run."""

    def largest(key: str) -> Measured:
        found = {
            f"{name} {each['part']:.0%}": each
            for name in RUNS
            for each in stored(folder / f"{name}.json", deadline.check, lambda: {"budgets": budgets(name)})["budgets"]  # noqa: B023
        }
        note = "; ".join(f"{name} {each[key]:.3f} ({each['chosen']})" for name, each in found.items())
        return Measured(max(each[key] for each in found.values()), note)

    return [
        Bar(
            "memory.budget-kept",
            "traced peak over the budget, at most, in 10 settings: two models and five budgets of each, between the "
            "least that fits and what the run takes as it is",
            "<=",
            1.0,
            lambda _: largest("peak"),
            kind="exact",
        ),
        Bar(
            "memory.budget-time",
            "processor time of a step with what the budget chooses over that of the best of all combinations of "
            "micro-batches and selective recomputation that fit, each of which was run; the most of the 10 settings",
            "<=",
            1.05,
            lambda _: largest("slower"),
        ),
    ]
