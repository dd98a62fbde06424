"""A small run that several hosts train, undisturbed, or with the loss of a worker or a host."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shoestring.report.reading import read
from shoestring.testing.netlab.hosts import SHARED
from shoestring.testing.netlab.lab import Lab
from shoestring.testing.netlab.programs import Program

STEPS, EVERY, STRIKE = 60, 5, 12  # the run's length, its checkpoints, and the step after which something happens to it
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
layers = {layers}
heads = 2
kv_heads = 2
[data]
tokenizer = "bytes"
sequence = 32
{checkpoint}
"""
_PLAIN = f"[checkpoint.plain]\nevery = {EVERY}"
_PIPELINE = f"[checkpoint.tiered]\ndisk_every = {EVERY}\nmemory_every = {EVERY}\n[parallel.pipeline]"


@dataclass(frozen=True)
class LabRun:
    """A run file, a corpus, and the folder that all hosts share, in one folder."""

    folder: Path

    @classmethod
    def prepare(cls, folder: Path, *, pipeline: bool = False) -> LabRun:
        """Write the corpus and the run file: of replicas, or of a pipeline."""
        words, draw = ["red", "green", "blue", "fish", "river", "stone", "sky", "runs", "sleeps"], random.Random(0)
        lines = (" ".join(draw.choices(words, k=9)) for _ in range(600))
        (folder / "corpus.txt").write_text("\n".join(lines))
        tables = {"layers": 4, "checkpoint": _PIPELINE} if pipeline else {"layers": 1, "checkpoint": _PLAIN}
        run = _RUN.format(corpus=folder / "corpus.txt", steps=STEPS, **tables)
        (folder / "run.toml").write_text(run)
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
        return dict(read(path).columns.get("loss", {})) if (path / "metrics.jsonl").is_file() else {}

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
            "--log-dir": str(SHARED / f"{name}-agent"),
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


def undisturbed(lab: Lab, lab_run: LabRun, name: str) -> Program:
    """Two hosts, to which nothing happens."""
    job = lab_run.start(lab, name)
    job.check(PATIENCE)
    return job


def killed(lab: Lab, lab_run: LabRun, name: str, rank: int = 1) -> Program:
    """The agents start the ranks again after one of them died."""
    job = lab_run.start(lab, name)
    lab_run.reach(job, name, STRIKE)
    lab.kill(rank)
    job.check(PATIENCE)
    return job


def replaced(lab: Lab, lab_run: LabRun, name: str) -> Program:
    """A host is lost with its memory and disk, and a fresh one of the same name joins."""
    job = lab_run.start(lab, name, "--run.timeout", "10")
    lab_run.reach(job, name, STRIKE)
    lab.remove(1)
    lab.add(1)
    job.join(1)
    job.check(PATIENCE)
    return job


def difference(expected: dict[int, float], losses: dict[int, float]) -> float:
    """The largest relative difference of a step's loss; infinite where the steps differ."""
    if expected.keys() != losses.keys() or len(expected) != STEPS:
        return float("inf")
    return max(abs(losses[step] - loss) / abs(loss) for step, loss in expected.items())
