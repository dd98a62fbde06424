"""restart: two hosts train, lose a worker, a host or the link, and end with the losses of a run that nothing befell."""

from __future__ import annotations

import argparse
import functools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Bar, Deadline, Measured, NotRun, main
from benchmarks.rows import RESULTS
from shoestring.core.errors import WorldError
from shoestring.report.reading import read
from shoestring.testing.netlab import SHARED, Lab, Program, netlab, netlab_available

ROUNDS = 20
STEPS, EVERY, STRIKE = 60, 5, 12  # the run's length, its saves, and the step after which something happens to it
CLOSE = 1e-6  # how far a loss may be off, relatively; in fact they are equal bit for bit
PATIENCE = 240.0  # seconds for a run that takes a few, on a machine that is busy

# Notice a lost host within five seconds; wait for a new one for two minutes.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2,join_timeout=120,read_timeout=60"

_RUN = """
[run]
data = "{corpus}"
steps = {steps}
batch = 4
resume = "auto"
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 2
[data]
tokenizer = "bytes"
sequence = 32
[checkpoint.plain]
every = {every}
"""


@dataclass(frozen=True)
class Trial:
    """A run file, a corpus, and the folder that all hosts share, in one folder."""

    folder: Path

    @classmethod
    def prepare(cls, folder: Path) -> Trial:
        """Write the corpus and the run file."""
        words, draw = ["red", "green", "blue", "fish", "river", "stone", "sky", "runs", "sleeps"], random.Random(0)
        lines = (" ".join(draw.choices(words, k=9)) for _ in range(600))
        (folder / "corpus.txt").write_text("\n".join(lines))
        (folder / "run.toml").write_text(_RUN.format(corpus=folder / "corpus.txt", steps=STEPS, every=EVERY))
        (folder / "shared").mkdir()
        return cls(folder)

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def run(self) -> str:
        return str(self.folder / "run.toml")

    def losses(self, name: str) -> dict[int, float]:
        """The loss of each step that a run has done so far."""
        path = self.shared / name
        return read(path).columns.get("loss", {}) if (path / "metrics.jsonl").is_file() else {}

    def local(self, name: str, *overrides: str, workers: int = 2) -> dict[int, float]:
        """The losses of this machine's own ranks.

        Raises:
            RuntimeError: they failed.
        """
        command = [sys.executable, "-m", "shoestring", "train", self.run, "--workers", str(workers)]
        folder = ["--run.folder", str(self.shared / name)]
        done = subprocess.run(
            [*command, *folder, *overrides], env=os.environ | environment(), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{workers} local ranks failed:\n{done.stderr}")
        return self.losses(name)

    def start(self, lab: Lab, name: str, *overrides: str, restarts: int = 3) -> Program:
        """Start the run under torchrun on all hosts of a lab, in the folder that they share."""
        options = {
            "--nnodes": str(len(lab.hosts)),
            "--nproc-per-node": "1",
            "--max-restarts": str(restarts),
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": "host0:29400",
            "--rdzv-conf": RENDEZVOUS,
            "--rdzv-id": name,
            "--monitor-interval": "0.1",
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", *(word for pair in options.items() for word in pair)]
        train = ["-m", "shoestring", "train", self.run, "--run.folder", str(SHARED / name), *overrides]
        return lab.start([*torchrun, *train], env=environment())

    def reach(self, job: Program, name: str, step: int) -> None:
        """Wait until a run has done `step` steps.

        Raises:
            RuntimeError: it ended before, or took too long.
        """
        end = time.monotonic() + PATIENCE
        while max(self.losses(name), default=0) < step:
            if time.monotonic() > end or any(code is not None for code in job.codes().values()):
                raise RuntimeError(f"no step {step} of {name}:\n{job.output(0)}\n{job.output(1)}")
            time.sleep(0.02)


def environment() -> dict[str, str]:
    """What the runs need besides this process's environment."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Otherwise torch never tells a host that comes later where the ranks meet (pytorch issue 135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def undisturbed(lab: Lab, trial: Trial, name: str) -> Program:
    """Two hosts, to which nothing happens."""
    job = trial.start(lab, name)
    job.check(PATIENCE)
    return job


def killed(lab: Lab, trial: Trial, name: str, rank: int = 1) -> Program:
    """The agents start the ranks again after one of them died."""
    job = trial.start(lab, name)
    trial.reach(job, name, STRIKE)
    lab.kill(rank)
    job.check(PATIENCE)
    return job


def replaced(lab: Lab, trial: Trial, name: str) -> Program:
    """A host is lost with its memory and disk, and a fresh one of the same name joins."""
    job = trial.start(lab, name, "--run.timeout", "10")
    trial.reach(job, name, STRIKE)
    lab.remove(1)
    lab.add(1)
    job.join(1)
    job.check(PATIENCE)
    return job


def share(scenario: Callable[[Lab, Trial, str], Program], rounds: int, deadline: Deadline) -> Measured | NotRun:
    """The share of the rounds that end with the losses of two local ranks to which nothing happened."""
    if reason := netlab_available():
        return NotRun(reason)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial.prepare(Path(folder))
        expected = trial.local("local")
        good, worst = 0, 0.0
        for number in range(rounds):
            deadline.check()
            name = f"round-{number}"
            try:
                with netlab(hosts=2, rate="100mbit", shared=trial.shared) as lab:
                    scenario(lab, trial, name)
            except (WorldError, RuntimeError) as error:
                print(f"{name}: {error}", file=sys.stderr)
            off = difference(expected, trial.losses(name))
            good, worst = good + (off <= CLOSE), max(worst, off)
    return Measured(good / rounds, f"{good} of {rounds} rounds; worst relative difference of a loss {worst:.1g}")


def difference(expected: dict[int, float], losses: dict[int, float]) -> float:
    """The largest relative difference of a step's loss; infinite where the steps differ."""
    if expected.keys() != losses.keys() or len(expected) != STEPS:
        return float("inf")
    return max(abs(losses[step] - loss) / abs(loss) for step, loss in expected.items())


def rows(rounds: int = ROUNDS) -> list[Bar]:
    """The bars: all rounds of each scenario."""
    end = "end with the losses of two local ranks to which nothing happened: share of 20 rounds"
    told = {
        "local-equal": (undisturbed, "two hosts at 100 Mbit/s"),
        "kill": (killed, "two hosts at 100 Mbit/s, of whose two workers one is killed with SIGKILL,"),
        "host-lost": (replaced, "two hosts at 100 Mbit/s, of which one is lost with memory and disk and replaced,"),
    }
    return [
        Bar(f"restart.{name}", f"{what} {end}", ">=", 1.0, measure=functools.partial(share, scenario, rounds))
        for name, (scenario, what) in told.items()
    ]


def command() -> int:
    """The harness's command line, with `--rounds N`: other than 20 rounds are a trial, whose rows are not stored."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--rounds", type=int, default=ROUNDS)
    known, rest = flags.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        results = RESULTS if known.rounds == ROUNDS else Path(folder)
        return main("restart", functools.partial(rows, known.rounds), rest, results)


if __name__ == "__main__":
    sys.exit(command())
