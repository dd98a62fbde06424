"""Kill -9 at random moments and at every named point: nothing torn is loaded, nothing that was safe is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.rigs.checkpointing.trainee import FaultyRun, RunOutcome, began, finished, fresh, run, safe

MOST_STARTS = 40


@dataclass(frozen=True)
class KillOutcome:
    """What a number of kills came to."""

    kills: int
    wrong: tuple[str, ...]
    """What was not as it should be, one line each."""


def undisturbed(task: FaultyRun) -> RunOutcome:
    """The run without a fault.

    Raises:
        RuntimeError: it did not end.
    """
    if not run(replace(task, folder=str(fresh(task.place)), point="", victim=-1)):
        raise RuntimeError(f"the undisturbed run in {task.folder} failed")
    return finished(task)


def at_points(task: FaultyRun, points: Sequence[str], expected: RunOutcome, draw: random.Random) -> KillOutcome:
    """Kill a rank at each of the named points, each in a run of its own that is then started again."""
    wrong, kills = [], 0
    for point in points:
        victim, count = draw.choice(expected.points[point]), 1 + draw.randrange(2)
        struck = replace(task, folder=str(fresh(task.place)), point=point, victim=victim, count=count)
        ended = run(struck)
        kills += not ended
        wrong += again(struck, ended, expected, f"{point}, rank {victim}, time {count}", draw)
    return KillOutcome(kills, tuple(wrong))


def at_random(task: FaultyRun, kills: int, expected: RunOutcome, draw: random.Random) -> KillOutcome:
    """Kill ranks at random moments of the time that a run takes, and a little after it, until so many were killed."""
    wrong, done, starting = [], 0, time.perf_counter()
    undisturbed(task)
    longest = 1.25 * (time.perf_counter() - starting)
    while done < kills:
        current = replace(task, folder=str(fresh(task.place)), start=0)
        for start in range(MOST_STARTS):
            current = replace(current, start=start, victim=draw.randrange(task.ranks))
            before = safe(current)
            ended = run(current, draw.uniform(0.01, longest) if done < kills else 0.0, draw)
            wrong += checked(current, before, f"random kill {done}")
            done += not ended
            if ended:
                break
        wrong += compared(current, expected, f"after random kill {done}")
    return KillOutcome(done, tuple(wrong))


def again(task: FaultyRun, ended: bool, expected: RunOutcome, what: str, draw: random.Random) -> list[str]:
    """Start a run again until it ends, and say what is wrong with how it did."""
    wrong: list[str] = []
    current = replace(task, point="", victim=-1)
    while not ended and current.start < 3:
        before = safe(current)
        current = replace(current, start=current.start + 1)
        ended = run(current)
        wrong += checked(current, before, what)
    return wrong + compared(current, expected, what)


def checked(task: FaultyRun, before: int, what: str) -> list[str]:
    """Whether a start resumed from no earlier step than had been said to be safe."""
    step = began(task)
    return [f"{what}: resumed from step {step}, step {before} was safe"] if step is not None and step < before else []


def compared(task: FaultyRun, expected: RunOutcome, what: str) -> list[str]:
    if not all((task.place / f"end-{rank}.json").exists() for rank in range(task.ranks)):
        return [f"{what}: it did not end"]
    return [] if finished(task).digests == expected.digests else [f"{what}: it ended with other bits"]


def forgotten(folder: Path) -> list[Path]:
    """What a run that has ended left in memory."""
    return [path for path in (folder / "memory").rglob("*") if path.is_file()]
