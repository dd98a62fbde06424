"""Four hosts, one of which is lost with its memory and replaced: what the run goes on from, and how fast that is read."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.restart import RENDEZVOUS, Trial, environment
from shoestring.testing.netlab import SHARED, Job, Lab

HOSTS = 4
STEPS = 24
_RUN = """
[run]
data = "{corpus}"
steps = {steps}
batch = 8
resume = "auto"
[model]
dim = {dim}
layers = 2
heads = 2
kv_heads = 2
[data]
tokenizer = "bytes"
sequence = 32
[parallel.fsdp]
[checkpoint.tiered]
memory_every = 1
peers_every = 4
disk_every = 0
"""


@dataclass(frozen=True)
class Fleet(Trial):
    """A sharded run on four hosts that saves to memory and peers only; every host has a disk of its own."""

    @classmethod
    def made(cls, folder: Path, dim: int = 32) -> Fleet:
        """Write the corpus and the run file."""
        Trial.prepare(folder)
        (folder / "run.toml").write_text(_RUN.format(corpus=folder / "corpus.txt", steps=STEPS, dim=dim))
        return cls(folder)

    def launch(self, lab: Lab, name: str, *overrides: str) -> Job:
        """Start the run on all hosts of a lab."""
        options = {
            "--nnodes": str(HOSTS),
            "--nproc-per-node": "1",
            "--max-restarts": "3",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": "host0:29400",
            "--rdzv-conf": RENDEZVOUS,
            "--rdzv-id": name,
            "--monitor-interval": "0.1",
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", *(word for pair in options.items() for word in pair)]
        folder = ["--run.folder", str(SHARED / name), "--run.timeout", "10"]
        return lab.start([*torchrun, "-m", "shoestring", "train", self.run, *folder, *overrides], env=environment())


def lose(lab: Lab, fleet: Fleet, name: str, at: int, host: int, *overrides: str) -> Job:
    """A run that loses a host after a step, and gets a fresh one in its place."""
    job = fleet.launch(lab, name, *overrides)
    fleet.reach(job, name, at)
    lab.remove(host)
    lab.add(host)
    job.join(host)
    job.check(240.0)
    return job


def resumed(job: Job) -> list[tuple[int, int]]:
    """(the step gone on from, steps repeated) of each restart, as the first host says."""
    found = re.findall(r"resumed from step (\d+)(?:; (\d+) step)?", job.output(0))
    return [(int(step), int(again or 0)) for step, again in found]
