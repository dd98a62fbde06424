"""A worker on toy trials: `python toy_worker.py URL FOLDER TRIALS LEASE STEPS PAUSE`."""

import shutil
import sys
import threading
from pathlib import Path

TOY = Path(__file__).with_name("toy_trial.py")
EVERY = 5
NAME = "toy"


def start(folder, steps, pause, lease):
    from shoestring.tune.process import TrialProcess

    at = folder / f"trial-{lease.number}"
    if lease.parent >= 0 and not (at / "checkpoint.json").exists():
        at.mkdir(exist_ok=True)
        shutil.copy(kept(folder, lease.parent, lease.forked - 1), at / "checkpoint.json")
    x = lease.parameters["toy.x"]
    return TrialProcess(
        [sys.executable, "-I", str(TOY), str(at), repr(x), str(steps), str(EVERY), str(pause)], at, "loss"
    )


def kept(folder, number, rung):
    """The checkpoint that a trial has paused at."""
    return folder / f"trial-{number}" / f"rung-{rung}.json"


def keep(folder, lease):
    shutil.copy(folder / f"trial-{lease.number}" / "checkpoint.json", kept(folder, lease.number, lease.rung))


def build(url, folder, trials, lease, steps, pause, sampler="random", schedule=None, **budget):
    from shoestring.tune.search import TrialSearch
    from shoestring.tune.settings import Study
    from shoestring.tune.space import Dimension
    from shoestring.tune.store import Store, connect
    from shoestring.tune.worker import TrialWorker

    settings = Study(run="toy", name=NAME, trials=trials, lease=lease, sampler=sampler, objective="loss", **budget)
    store = Store(connect(url), NAME)
    store.create({"trials": trials})
    search = TrialSearch(store, settings, [Dimension("toy.x", "float", 0.0, 1.0)], schedule, total=steps)
    worker = TrialWorker(
        store, search, lambda held: start(folder, steps, pause, held), lease, grace=5.0, attempts=10**6
    )
    worker.paused = lambda held: keep(folder, held)
    return worker


if __name__ == "__main__":
    import signal

    url, folder, trials, lease, steps, pause = sys.argv[1:]
    worker = build(url, Path(folder), int(trials), float(lease), int(steps), float(pause))
    worker.stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: worker.stop.set())
    worker.run()
