"""checkpoint.kills-torchrun: ranks killed at random moments, which torchrun starts again."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.checkpoint.kills import in_batches
from benchmarks.harness import Bar
from tests.rigs.checkpointing.kills import KillOutcome, compared
from tests.rigs.checkpointing.torchrun_kills import run
from tests.rigs.checkpointing.trainee import FaultyRun, finished

KILLS, BATCH = 100, 25
MASS = 64 << 20  # bytes of state of a rank
STEPS = 60


def batch(number: int, kills: int = BATCH) -> KillOutcome:
    """So many kills of runs that share their state in one way, with both ranks on one host or each on its own."""
    draw = random.Random(number)
    under, local = ("ddp", "fsdp")[number % 2], (2, 1)[number // 2 % 2]
    wrong, done = list[str](), 0
    with TemporaryDirectory() as folder:
        task = FaultyRun(folder=str(Path(folder) / "task"), under=under, local=local, mass=MASS, steps=STEPS)
        _, failed = run(task, 0, draw)
        if failed:
            raise RuntimeError(f"the run that is not killed failed: {failed}")
        expected = finished(task)
        while done < kills:
            what = f"{under}, {task.ranks // local} hosts, after kill {done}"
            struck, found = run(task, kills - done, draw)
            if not struck:
                raise RuntimeError(f"{what}: the run ended by itself: {found}")
            done += struck
            wrong += [f"{what}: {each}" for each in found] + compared(task, expected, what)
    return KillOutcome(done, tuple(wrong))


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""
    what = (
        "SIGKILL at 100 random moments under torchrun, which starts the ranks again: two ranks of 64 MB of state each "
        "that resumed from before what was said to be safe, failed to start, or ended with other bits than unkilled"
    )
    kept = cache and cache / "kills-torchrun.json"
    return [Bar("checkpoint.kills-torchrun", what, "<=", 0, partial(in_batches, kept, KILLS, batch), kind="exact")]
