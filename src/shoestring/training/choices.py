"""Make or reuse the choice of [memory.budget]. The run folder stores the choice, and a resumed run uses it again.

A choice depends on the model and the ranks, so it does not become a setting of the run file: a run with the same file
on a different number of ranks makes a new choice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.core.feature import DATA, arrange_mesh, splitting
from shoestring.core.world import World
from shoestring.memory import Budget
from shoestring.memory.settings.budget import BudgetChoice, SettledBudget
from shoestring.planning.links import time_collective
from shoestring.renames import renamed
from shoestring.run import Run, technique
from shoestring.settings import structure
from shoestring.storage.whole import write_atomic
from shoestring.training.budget import GIGABIT, BudgetSearch, rounded

FILE = "choices.json"
"""Name of the file in a run folder that holds the choice."""
LARGEST = 1 << 22
"""Size in bytes of the largest message for measuring the links between ranks."""


def within_budget(run: Run, world: World, folder: Path | None = None) -> Run:
    """If the run has the table [memory.budget], return the run with a choice applied. A collective.

    Args:
        run: the run, with the default features that `Run.completed` adds.
        folder: the run folder, where the choice is stored for resumed runs; None to store nothing.

    Raises:
        ConfigError: no allowed choice fits (the error states the smallest feasible budget), or the peak cannot be
            predicted.
    """
    budget = next((feature for feature in run.features if isinstance(feature, Budget)), None)
    if budget is None or isinstance(budget, SettledBudget):
        return run
    if names := splitting(run.features, arrange_mesh(world, run.features)):
        message = f"`{budget.name}` cannot choose for `{names[0]}`, whose ranks hold different parts of the model"
        raise ConfigError(message, hint=f"remove the table [{budget.name}], and set memory.recompute yourself")
    ranks_run = dist.is_initialized()  # false in `shoestring check`, which starts no ranks
    gathered = GIGABIT  # bytes of weights that ranks can gather per second
    if ranks_run and world.size > 1:
        link = time_collective(world, "all-gather", DATA, LARGEST)
        gathered = link.bandwidth * link.ranks  # `bandwidth` counts only one rank's shard
    decide = world.decide if ranks_run else lambda work: work()
    choice = structure(decide(lambda: _decided(run, world, budget, folder, gathered)), BudgetChoice, budget.name, FILE)
    return with_choice(run, world, budget, choice)


def with_choice(run: Run, world: World, budget: Budget, choice: BudgetChoice) -> Run:
    """Return the run with the features and settings of a choice in place of its own."""
    others = (
        feature for feature in run.features if feature.name not in choice.replaced and not isinstance(feature, Budget)
    )
    remaining = tuple(rounded(feature) if choice.rounded else feature for feature in others)
    names = {name: name.partition(".") for name in choice.added_features}
    kinds = {name: technique(area, key) for name, (area, _, key) in names.items()}
    added = [
        structure(renamed(name, table, FILE), kinds[name], name, FILE) for name, table in choice.added_features.items()
    ]
    settled = SettledBudget(gib=budget.gib, allow=budget.allow, choice=choice)
    settings = replace(run.settings, accumulate=choice.accumulate)
    return replace(run, settings=settings, features=(*remaining, *added, settled)).completed(world)


def _decided(run: Run, world: World, budget: Budget, folder: Path | None, gathered: float) -> dict[str, Any]:
    """Reuse the choice of the resumed run if it was made under the same conditions; otherwise search for a new one."""
    budget.check_limit()
    settings = run.settings
    depends_on = {
        "model": settings.model,
        "arguments": dict(run.model),
        "batch": settings.batch,
        "accumulate": settings.accumulate,
        "sequence": run.data.sequence,
        "features": [feature.name for feature in run.features],
        "budget": [asdict(feature) for feature in run.features if isinstance(feature, Budget)],
        "ranks": world.size,
        "ranks of a host": world.local_size,
    }
    depends_on |= {"data": settings.data} if run.has_own_data else {}
    conditions = json.loads(json.dumps(depends_on))  # in the types that a choice read from JSON has
    choice = _recorded(run, folder, conditions)
    if choice is None:
        alone = not dist.is_initialized()
        if alone:
            choice = asdict(BudgetSearch(run, world).within(budget))
        else:
            # Prediction needs fake ranks, and this process has a real process group.
            numbers = map(str, (world.size, world.local_size, gathered))
            command = [sys.executable, "-P", "-m", "shoestring.training.budget", *numbers]
            done = subprocess.run(command, input=run.toml, capture_output=True, text=True, check=False)
            if done.returncode == ShoestringError.code:
                raise ShoestringError.from_parts(json.loads(done.stdout))
            if done.returncode:
                raise ConfigError(f"the search of `memory.budget` failed: {done.stderr.strip()[-500:]}")
            choice = json.loads(done.stdout)
    if folder is not None:
        record = {budget.name: {"for": conditions, "choice": choice}}
        write_atomic(folder / FILE, json.dumps(record, indent=2).encode())
    return choice


def _recorded(run: Run, folder: Path | None, conditions: dict[str, Any]) -> dict[str, Any] | None:
    """Read the choice of the resumed run; None if there is none, or if it was made under other conditions."""
    resume = run.settings.resume
    if resume is False:
        return None
    folders = [folder] if folder is not None else []
    if isinstance(resume, str) and resume != "auto":
        folders += list(Path(resume).parents)[:2]
    for candidate in folders:
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((candidate / FILE).read_text())["memory.budget"]
            if record["for"] == conditions:
                return record["choice"]
    return None
