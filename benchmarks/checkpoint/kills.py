"""checkpoint.kills*: SIGKILL at random moments and at every named point."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Bar, Deadline, Measured
from tests.rigs.checkpointing.kills import KillOutcome, at_points, at_random, undisturbed
from tests.rigs.checkpointing.trainee import FaultyRun

KILLS, BATCH = 2000, 25


def in_batches(path: Path | None, kills: int, batch: Callable[[int], KillOutcome], deadline: Deadline) -> Measured:
    """Kills in numbered batches, each of a seed of its own; what was done is kept in a file, and resumes from there."""
    kept: dict[str, Any] = (
        json.loads(path.read_text()) if path and path.exists() else {"kills": 0, "batches": 0, "wrong": []}
    )
    while kept["kills"] < kills:
        deadline.check()
        outcome = batch(kept["batches"])
        kept = {
            "kills": kept["kills"] + outcome.kills,
            "batches": kept["batches"] + 1,
            "wrong": [*kept["wrong"], *outcome.wrong],
        }
        if path:
            path.write_text(json.dumps(kept))
    return Measured(float(len(kept["wrong"])), f"{kept['kills']} kills; {'; '.join(kept['wrong'][:3])}".rstrip("; "))


def forked(number: int) -> KillOutcome:
    """A batch of random kills, of ranks that are forked."""
    with TemporaryDirectory() as folder:
        task = FaultyRun(folder=str(Path(folder) / "task"), under=("ddp", "fsdp")[number % 2])
        return at_random(task, BATCH, undisturbed(task), random.Random(number))


def everywhere(_: Deadline) -> Measured:
    """A kill at each named point, on either rank, under both ways of sharing the state."""
    wrong: list[str] = []
    kills, points = 0, set[str]()
    for under in ("ddp", "fsdp"):
        with TemporaryDirectory() as folder:
            task = FaultyRun(folder=str(Path(folder) / "task"), under=under)
            expected = undisturbed(task)
            outcome = at_points(task, sorted(expected.points), expected, random.Random(under))
        wrong, kills, points = [*wrong, *outcome.wrong], kills + outcome.kills, points | set(expected.points)
    return Measured(float(len(wrong)), f"{kills} kills at {len(points)} points; {'; '.join(wrong[:3])}".rstrip("; "))


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""
    kept = cache and cache / "kills.json"
    said = (
        "SIGKILL {where}: runs of two ranks that loaded something torn, resumed from before what was said to be safe, "
        "or ended with other bits than the run that was not killed"
    )
    return [
        Bar(
            "checkpoint.kills",
            said.format(where="at 2,000 random moments"),
            "<=",
            0,
            partial(in_batches, kept, KILLS, forked),
            kind="exact",
        ),
        Bar(
            "checkpoint.kills-at-points",
            said.format(where="at every named point (40 at least)"),
            "<=",
            0,
            everywhere,
            kind="exact",
        ),
    ]
