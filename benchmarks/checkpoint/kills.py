"""Kill -9 at random moments and at every named point: nothing torn is loaded, nothing that was safe is lost."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Bar, Deadline, Measured
from shoestring.testing.checkpointing.trainee import FaultyRun, RunOutcome, began, finished, fresh, run, safe

MOST_STARTS = 40


@dataclass(frozen=True)
class Outcome:
    """What a number of kills came to."""

    kills: int
    wrong: tuple[str, ...]
    """What was not as it should be, one line each."""


def undisturbed(task: FaultyRun) -> RunOutcome:
    """The run that nothing befalls.

    Raises:
        RuntimeError: it did not end.
    """
    if not run(replace(task, folder=str(fresh(task.place)), point="", victim=-1)):
        raise RuntimeError(f"the undisturbed run in {task.folder} failed")
    return finished(task)


def at_points(task: FaultyRun, points: Sequence[str], expected: RunOutcome, draw: random.Random) -> Outcome:
    """Kill a rank at each of the named points, each in a run of its own that is then started again."""
    wrong, kills = [], 0
    for point in points:
        victim, count = draw.choice(expected.points[point]), 1 + draw.randrange(2)
        struck = replace(task, folder=str(fresh(task.place)), point=point, victim=victim, count=count)
        ended = run(struck)
        kills += not ended
        wrong += again(struck, ended, expected, f"{point}, rank {victim}, time {count}", draw)
    return Outcome(kills, tuple(wrong))


def at_random(task: FaultyRun, kills: int, expected: RunOutcome, draw: random.Random) -> Outcome:
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
    return Outcome(done, tuple(wrong))


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


# -- rows -------------------------------------------------------------------------------------------------------------

KILLS, BATCH = 2000, 25


def in_batches(path: Path | None, kills: int, batch: Callable[[int], Outcome], deadline: Deadline) -> Measured:
    """Kills in numbered batches, each of a seed of its own; what was done is kept in a file, and resumes from there."""
    kept = json.loads(path.read_text()) if path and path.exists() else {"kills": 0, "batches": 0, "wrong": []}
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


def forked(number: int) -> Outcome:
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
        ),
        Bar("checkpoint.kills-at-points", said.format(where="at every named point (40 at least)"), "<=", 0, everywhere),
    ]
