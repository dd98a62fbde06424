"""Training runs of benchmarks: the quickstart's run file with settings of their own, to the end or not at all."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import OutOfBudget
from benchmarks.machine import ROOT
from shoestring.report import history_file

RECIPE = ROOT / "src" / "shoestring_recipes" / "quickstart" / "run.toml"


def recipe(steps: int, *, seed: int, rate: float = 0.0) -> dict[str, Any]:
    """The quickstart's run file with a number of steps, without what costs time and measures nothing.

    Args:
        rate: a learning rate other than the recipe's.
    """
    document = tomllib.loads(RECIPE.read_text())
    for key in ("minutes", "evaluate_every", "baselines", "prompts"):
        document["run"].pop(key)
    document["run"] |= {"steps": steps, "seed": seed}
    document["optim"]["adamw"] |= {"lr": rate} if rate else {}
    document["optim"]["schedule"]["warmup"] = steps // 10
    document.pop("checkpoint")
    return document


def ended(folder: Path) -> bool:
    """Whether the run of a folder has made its last step: one that a signal has stopped has left a model too."""
    events = history_file.read(folder)
    return bool(events) and events[-1]["event"] == "finished" and (folder / "model").is_dir()


def train_to_end(document: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> Mapping[str, float]:
    """The metrics of a run.

    Args:
        check: raises OutOfBudget when the time is up; the run then stops after a whole step.

    Raises:
        OutOfBudget: it was stopped, by the check or by a signal.
    """
    from shoestring.core.world import World
    from shoestring.run import parse
    from shoestring.training.loop import train

    def out_of_time() -> bool:
        try:
            check()
        except OutOfBudget:
            return True
        return False

    logging.getLogger("shoestring").setLevel(logging.WARNING)
    result = train(parse(dict(document), name="benchmark"), World(), stop=out_of_time)
    if result.status != "finished":
        raise OutOfBudget
    return result.metrics
