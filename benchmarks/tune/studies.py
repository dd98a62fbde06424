"""tune.quickstart and tune.population: searches of real runs of the quickstart's model, made small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from benchmarks.harness import Bar, Deadline, Measured, stored
from benchmarks.intervals import of_mean

SEEDS = (0, 1, 2)
STEPS, TRIALS, EVERY = 300, 20, 50
RUN = {
    "run": {"data": "python-stdlib", "steps": STEPS, "batch": 8, "evaluate_every": EVERY},
    "model": {"dim": 48, "layers": 2, "heads": 2, "kv_heads": 2, "hidden": 128},
    "data": {"vocabulary": 512, "sequence": 64},
    "optim": {"adamw": {}, "clip": {"max_norm": 1.0}, "schedule": {"shape": "trapezoid", "cooldown": 0.4}},
}
SPACE = {"optim.adamw.lr": {"log": [1e-4, 1e-1]}, "optim.adamw.weight_decay": {"float": [0.0, 0.5]}}
SHAPE = {"optim.schedule.warmup": {"int": [1, 100]}}


def study(tables: Mapping[str, Any], run: Mapping[str, Any], space: Mapping[str, Any]) -> dict[str, Any]:
    """What a study of one worker found: the best result, and the seconds of work."""
    with TemporaryDirectory(prefix="tune-") as folder:
        Path(folder, "run.toml").write_text(tomli_w.dumps(run))
        own = {"run": str(Path(folder, "run.toml")), "objective": "held_out_loss", **tables.get("tune", {})}
        document = {**tables, "tune": own, "space": space}
        Path(folder, "tune.toml").write_text(tomli_w.dumps(document))
        command = [sys.executable, "-m", "shoestring", "tune", "tune.toml"]
        subprocess.run(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        return json.loads(_read(Path(folder)))


def _read(folder: Path) -> str:
    from shoestring.verbs.study import read_plan

    here = Path.cwd()
    os.chdir(folder)  # the store lies below it
    try:
        plan = read_plan("tune.toml")
        record = plan.record(plan.open_store())
    finally:
        os.chdir(here)
    best = record.ranked[0].value
    return json.dumps({"best": best, "hours": record.hours, "curve": record.best_so_far()})


def search(sampler: str, seed: int) -> dict[str, Any]:
    """A search of the learning rate, the weight decay and the warm-up."""
    tables = {"tune": {"sampler": sampler, "trials": TRIALS, "seed": seed}}
    return study(tables, RUN | {"run": RUN["run"] | {"seed": seed}}, SPACE | SHAPE)


def population(method: str, seed: int) -> dict[str, Any]:
    """A population that changes the learning rate and the weight decay; it works as long as a search does."""
    tables = {"tune": {"seed": seed}, "population": {"size": TRIALS, "every": EVERY, "method": method}}
    return study(tables, RUN | {"run": RUN["run"] | {"seed": seed}}, SPACE)


def rows(runs: Path, check: Callable[[], None]) -> list[Bar]:
    """The bars."""

    def found(kind: Callable[[str, int], dict[str, Any]], what: str) -> list[dict[str, Any]]:
        return [
            stored(runs / f"{kind.__name__}-{what}-{seed}.json", check, lambda seed=seed: kind(what, seed))
            for seed in SEEDS
        ]

    def against_random(_: Deadline) -> Measured:
        """At the hours of whichever ended first."""
        gaps = []
        pairs = zip(found(search, "gp"), found(search, "random"), strict=True)
        for ours, theirs in pairs:
            hours = min(ours["hours"], theirs["hours"])
            best = [min(value for spent, value in each["curve"] if spent <= hours) for each in (ours, theirs)]
            gaps.append(best[0] - best[1])
        return of_mean(gaps, "each seed: " + ", ".join(f"{gap:+.4f}" for gap in gaps))

    def against_fixed(method: str) -> Measured:
        pairs = zip(found(population, method), found(search, "random"), strict=True)
        gaps = [ours["best"] - theirs["best"] for ours, theirs in pairs]
        return of_mean(gaps, "each seed: " + ", ".join(f"{gap:+.4f}" for gap in gaps))

    small = "a GPT of 0.1 M parameters on Python's sources, 300 steps"
    fixed = f"the best of {TRIALS} fixed schedules (trapezoid; rate, decay and warm-up drawn at random)"
    return [
        Bar(
            "tune.quickstart",
            f"held-out loss of the best trial under the Gaussian process less that under random search, at equal hours "
            f"of work; {small}, {TRIALS} trials",
            "<=",
            0.0,
            against_random,
            baseline="random search",
            seeds=SEEDS,
            kind="drawn",
        ),
        *(
            Bar(
                f"tune.population-{method}",
                f"held-out loss of the best of {TRIALS} members under {method.upper()} less that of {fixed}; {small}",
                "<=",
                0.0,
                lambda _, method=method: against_fixed(method),
                baseline="fixed schedules",
                seeds=SEEDS,
                kind="drawn",
            )
            for method in ("pbt", "pb2")
        ),
    ]
