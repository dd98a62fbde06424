"""A worker on toy trials: `python toy_worker.py URL FOLDER TRIALS LEASE STEPS PAUSE`."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tune import toy_trial

if TYPE_CHECKING:
    from shoestring.tune.process import TrialProcess, TrialServer
    from shoestring.tune.store import TrialLease
    from shoestring.tune.worker import TrialWorker

EVERY = 5
"""Steps between two checkpoints."""
NAME = "toy"


def pause_of(x: float, pause: float, spread: float) -> float:
    """Seconds of a step of the trial with setting x, from `pause` to `spread` times as much."""
    return pause * spread ** ((x * 7.3) % 1.0)


def start(folder: Path, steps: int, pause: float, lease: TrialLease, server: TrialServer) -> TrialProcess:
    """Begin a trial, or continue it; a fork begins from its parent's checkpoint."""
    from shoestring.tune.process import TrialProcess

    at = folder / f"trial-{lease.number}"
    if lease.parent >= 0 and not (at / "checkpoint.json").exists():
        at.mkdir(exist_ok=True)
        shutil.copy(kept(folder, lease.parent, lease.forked - 1), at / "checkpoint.json")
    arguments = [str(at), lease.parameters["toy.x"], steps, EVERY, pause]
    return TrialProcess(server, toy_trial.main, arguments, at, "loss")


def kept(folder: Path, number: int, rung: int) -> Path:
    """The checkpoint that a trial has paused at."""
    return folder / f"trial-{number}" / f"rung-{rung}.json"


def build(
    url: str,
    folder: Path,
    trials: int,
    lease: float,
    steps: int,
    pause: float,
    sampler: Any = "random",
    schedule: Any = None,
    spread: float = 1.0,
    **budget: Any,
) -> TrialWorker:
    """A worker for a study of toy trials, which is made if it is missing."""
    from shoestring.tune.process import TrialServer
    from shoestring.tune.search import TrialSearch
    from shoestring.tune.settings import Study
    from shoestring.tune.space import Dimension
    from shoestring.tune.store import Store, connect
    from shoestring.tune.worker import TrialWorker

    settings = Study(run="toy", name=NAME, trials=trials, lease=lease, sampler=sampler, objective="loss", **budget)
    store = Store(connect(url), NAME)
    store.create({"trials": trials})
    search = TrialSearch(store, settings, [Dimension("toy.x", "float", 0.0, 1.0)], schedule, total=steps)

    server = TrialServer([toy_trial.__name__])

    def begin(held: TrialLease) -> TrialProcess:
        return start(folder, steps, pause_of(held.parameters["toy.x"], pause, spread), held, server)

    def keep(held: TrialLease) -> None:
        shutil.copy(folder / f"trial-{held.number}" / "checkpoint.json", kept(folder, held.number, held.rung))

    return TrialWorker(store, search, begin, lease, grace=5.0, attempts=10**6, paused=keep)


if __name__ == "__main__":
    import signal

    url, folder, trials, lease, steps, pause = sys.argv[1:]
    worker = build(url, Path(folder), int(trials), float(lease), int(steps), float(pause))
    worker.stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: worker.stop.set())
    worker.run()
