"""Runs trials of `shoestring tune`: starts and forks them, and removes the checkpoints that they leave in this host's
memory."""

from __future__ import annotations

import logging
import os
import runpy
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from shoestring.core.errors import ConfigError
from shoestring.naming import TrustError
from shoestring.run_code import code_of
from shoestring.storage.whole import write_atomic
from shoestring.tune import Population
from shoestring.verbs.study import StudyPlan

if TYPE_CHECKING:
    from shoestring.tune.process import TrialProcess, TrialServer
    from shoestring.tune.store import Store, TrialLease

log = logging.getLogger("shoestring")

ENDED = ("done", "failed", "pruned")
PRELOADED = ("shoestring.training.loop", "torch._inductor")
"""Modules that every trial needs and that take long to import."""
FORKS = "forks"
"""Name of the folder, inside a trial's folder, with checkpoints from which other trials may be forked."""


def folder_of(plan: StudyPlan, number: int) -> Path:
    """The run folder of a trial."""
    return plan.folder / f"trial-{number:04d}"


def train(file: str) -> None:
    """Train the run of a run file, then end this process, which was started for the trial."""
    sys.argv = ["shoestring", "train", file]
    runpy.run_module("shoestring", run_name="__main__")


def start_trial(plan: StudyPlan, lease: TrialLease, server: TrialServer) -> TrialProcess:
    """Start a trial, or continue it from its newest checkpoint; a forked trial starts from a checkpoint of its parent.

    The trial reuses the data that the newest trial prepared, unless its settings need different data.
    """
    from shoestring.data.corpus import begin_with
    from shoestring.tune.process import TrialProcess

    folder = folder_of(plan, lease.number)
    prepared = sorted(plan.folder.glob("trial-*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    if prepared and not folder.exists():
        begin_with(folder, prepared[-1].parent)
    document = plan.run_document(lease.parameters)
    if strange := set().union(*code_of(document).values()) - plan.code:
        message = f"the settings of trial {lease.number} name code that the study does not: `{min(strange)}`"
        raise TrustError(message, hint="somebody else has written to the store: begin a new study in another store")
    resume = "auto"
    if lease.parent >= 0 and not newest_checkpoint(folder):
        # A fork starts from the checkpoint that its parent kept at the comparison at which the fork was made. If there
        # is none, it starts from the parent's newest kept checkpoint.
        forks = folder_of(plan, lease.parent) / FORKS
        places = [forks / f"rung-{lease.forked - 1:04d}", *sorted(forks.glob("rung-*"), reverse=True)]
        saved = next((saved for place in places if (saved := sorted(place.glob("step-*")))), None)
        if saved is None:
            message = f"trial {lease.parent} has no checkpoint in `{forks}` that trial {lease.number} could fork"
            raise ConfigError(message)
        resume = str(saved[-1])
    document["run"] = document.get("run", {}) | {"folder": str(folder), "resume": resume}
    file = plan.folder / "runs" / f"trial-{lease.number:04d}.toml"
    write_atomic(file, tomli_w.dumps(document).encode())
    log.info("trial %d: %s", lease.number, describe(lease.parameters))
    return TrialProcess(server, train, [str(file)], folder, plan.study.objective)


# -- checkpoints that are copied between trials -----------------------------------------------------------------------


def keep_for_forks(plan: StudyPlan, lease: TrialLease) -> None:
    """Keep a copy of the checkpoint at which a member of a population has paused, for the next two comparisons.

    The copy consists of hard links, which take no time to make, and no space until the run deletes its own checkpoint.
    """
    if not isinstance(plan.schedule, Population):
        return
    newest = newest_checkpoint(folder_of(plan, lease.number))
    if newest is None:
        log.warning("trial %d wrote no checkpoint on disk, so it cannot be forked", lease.number)
        return
    forks = folder_of(plan, lease.number) / FORKS
    target = forks / f"rung-{lease.rung:04d}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if newest.is_dir():
        shutil.copytree(newest, target / newest.name, copy_function=_link)
    else:
        _link(str(newest), str(target / newest.name))
    for old in sorted(forks.iterdir())[:-2]:
        shutil.rmtree(old, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run on disk: a folder (tiered) or a file (plain)."""
    from shoestring.checkpoint.tiers.disk import manifests

    tiered = manifests(folder / "checkpoints")
    plain = sorted((folder / "checkpoints").glob("step-*.safetensors"))
    return tiered[0][0] if tiered else plain[-1] if plain else None


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the target is on another file system, or the file system has no hard links
        shutil.copy2(source, target)


# -- what remains in memory -------------------------------------------------------------------------------------------


class Leftovers:
    """Removes the checkpoints that killed trials left in this host's memory, once the trials have ended.

    A trial that was never interrupted removes its own checkpoints, so only trials that were started more than once need
    attention.
    """

    def __init__(self, plan: StudyPlan, store: Store) -> None:
        self.plan, self.store = plan, store
        self._done: set[int] = set()

    def remove(self) -> None:
        """Remove the checkpoints of trials that have ended since the last call."""
        for trial in self.store.trials():
            if trial.state in ENDED and trial.epoch > 1 and trial.number not in self._done:
                self._done.add(trial.number)
                shutil.rmtree(self._memory(trial), ignore_errors=True)

    def _memory(self, trial: TrialLease) -> Path:
        from shoestring import run
        from shoestring.checkpoint import Tiered
        from shoestring.checkpoint.tiers.slots import slots_folder
        from shoestring.core.world import World

        document = self.plan.run_document(trial.parameters)
        parsed = run.parse(document, name=self.plan.study.name, unread=tuple(code_of(document)))
        tiered = next((feature for feature in parsed.features if isinstance(feature, Tiered)), Tiered())
        return slots_folder(tiered.placed(folder_of(self.plan, trial.number)), World(), make=False).parent


def describe(values: Mapping[str, Any]) -> str:
    """Write the settings of a trial in one line."""
    return ", ".join(
        f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}" for key, value in values.items()
    )
