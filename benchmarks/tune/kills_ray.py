"""tune.kills-ray*: what Ray Tune loses when its trials are killed and stalled, and its head is killed and restored.

Ray has no store; its head has that place, so an outage kills the head with all that belongs to it, and some time later
the study is restored from its folder. Ray is not among the packages of this project: RAY_PYTHON names a Python that has
`ray[tune]`, without which nothing is run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Bar, NotRun, stored
from benchmarks.tune.kills import KILLS, LEASE, OUTAGES, PAUSE, STALLS, STEPS, TRIALS, WORKERS
from benchmarks.tune.peers import PEER_BATCHES, peer_rows
from benchmarks.tune.toy_trial import undisturbed
from benchmarks.tune.toy_worker import EVERY

SCRIPT = Path(__file__).with_name("ray_study.py")
MOST = 1200.0
"""Seconds after which a study that has not ended is given up."""
_MARK = "TUNE_STUDY"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",  # snapshots of the study: the last one is what a killed head comes back to
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


@dataclass
class RayStudy:
    """One study in a folder: its head, and the processes of its trials."""

    python: str
    folder: Path
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    stopped: dict[int, float] = field(default_factory=dict)
    head: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the head, or restore the study."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= _ENVIRONMENT | {_MARK: str(self.folder)}
        with (self.folder / "head.log").open("ab") as log:
            command = [self.python, str(SCRIPT), str(self.folder)]
            self.head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def ended(self) -> bool:
        assert self.head is not None
        return self.head.poll() is not None

    def kill_all(self) -> None:
        """Kill the head, Ray's daemons, and the trials, which may have ended by themselves."""
        until = time.monotonic() + 10.0
        while (found := set(_marked(self.folder)) | set(self._trials())) and time.monotonic() < until:
            for process in found:
                _signal(process, signal.SIGKILL)
            time.sleep(0.1)
        self.stopped.clear()
        if self.head is not None:
            self.head.wait()

    def act(self) -> None:
        """One kill or stall, or the end of a stall; nothing where no trial runs."""
        for process, since in list(self.stopped.items()):
            if time.monotonic() - since > 2 * LEASE:
                _signal(process, signal.SIGCONT)
                del self.stopped[process]
        running = [process for process in self._trials() if process not in self.stopped]
        if not running:
            return
        process = self.chance.choice(running)
        left = {"stall": STALLS - self.done["stall"], "kill": KILLS - self.done["kill"]}
        if left["stall"] > 0 and self.chance.random() < STALLS / (KILLS + STALLS):
            _signal(process, signal.SIGSTOP)
            self.stopped[process] = time.monotonic()
            self.done["stall"] += 1
        elif left["kill"] > 0:
            _signal(process, signal.SIGKILL)
            self.done["kill"] += 1

    def _trials(self) -> list[int]:
        named = [int(path.name) for path in (self.folder / "pids").iterdir()]
        return [process for process in named if _alive(process)]


def _alive(process: int) -> bool:
    """Whether it is a process of Ray's, and no later one with its number."""
    try:
        return b"ray::" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _marked(folder: Path) -> list[int]:
    """Processes that have the study's folder in their environment."""
    found, mark = [], f"{_MARK}={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def batch(python: str, number: int) -> dict[str, Any]:
    """One study under up to 100 kills and 10 stalls of trials, and 2 deaths of the head; what became of it."""
    chance = random.Random(number)
    with TemporaryDirectory(prefix="ray-") as place:  # a short name, for the sockets below it
        folder = Path(place)
        (folder / "pids").mkdir()
        setting = {"trials": TRIALS, "workers": WORKERS, "steps": STEPS, "pause": PAUSE, "every": EVERY}
        (folder / "setting.json").write_text(json.dumps(setting))
        study = RayStudy(python, folder, chance)
        try:
            study.start()
            outages = _disturb(study, chance)
        finally:
            study.kill_all()
        return _outcome(study, outages)


def _disturb(study: RayStudy, chance: random.Random) -> int:
    """All kills, stalls and outages that fit until the study has ended; the number of outages."""
    while not study._trials() and not study.ended():
        time.sleep(0.1)
    outages, began = 0, time.monotonic()
    down = sorted(chance.uniform(10.0, 60.0) for _ in range(OUTAGES))
    while not study.ended() and time.monotonic() - began < MOST:
        if outages < OUTAGES and time.monotonic() - began > down[outages]:
            study.kill_all()
            time.sleep(chance.uniform(5.0, 60.0))
            study.start()
            outages += 1
        time.sleep(chance.uniform(0.2, 2.2))
        study.act()
    return outages


def _outcome(study: RayStudy, outages: int) -> dict[str, Any]:
    ended = study.folder / "ended.json"
    results = json.loads(ended.read_text()) if ended.exists() else []
    right = [each for each in results if each["step"] == STEPS and each["loss"] == undisturbed(each["x"], STEPS)]
    folders = list(study.folder.glob("trial-*"))
    steps = [list(map(int, (folder / "steps.log").read_text().split())) for folder in folders]
    starts = sum(len((folder / "starts.log").read_text().split()) for folder in folders)
    head = "" if ended.exists() else (study.folder / "head.log").read_text()[-500:]
    return {
        "trials": TRIALS,
        "lost": TRIALS - len(results),
        "twice": 0,
        "wrong": len(results) - len(right),
        "repeated": sum(len(each) - max(each, default=0) for each in steps),
        "starts": starts,
        "kills": study.done["kill"],
        "stalls": study.done["stall"],
        "outages": outages,
        "head": head,
    }


def rows(runs: Path, check: Callable[[], None]) -> list[Bar]:
    """The bars."""

    def measure() -> list[dict[str, Any]] | NotRun:
        python = os.environ.get("RAY_PYTHON", "")
        paths = [runs / f"kills-ray-{number}.json" for number in range(PEER_BATCHES)]
        if not python and not all(path.exists() for path in paths):
            return NotRun("Ray Tune is not installed; RAY_PYTHON names a Python that has it")
        return [stored(path, check, lambda number=number: batch(python, number)) for number, path in enumerate(paths)]

    name = "Ray Tune with max_failures=-1, whose head is killed and restored in place of an outage of the store"
    return peer_rows("ray", name, measure, runs, check)


if __name__ == "__main__":
    print(batch(os.environ["RAY_PYTHON"], int(sys.argv[1])))
