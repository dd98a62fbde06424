"""Four hosts, one of which is lost with its memory and replaced."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shoestring.testing.netlab import Lab, Program
from shoestring.testing.netlab.lab_run import LabRun

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
class Fleet(LabRun):
    """A sharded run on four hosts that saves to memory and peers only; every host has a disk of its own."""

    @classmethod
    def made(cls, folder: Path, dim: int = 32) -> Fleet:
        """Write the corpus and the run file."""
        LabRun.prepare(folder)
        (folder / "run.toml").write_text(_RUN.format(corpus=folder / "corpus.txt", steps=STEPS, dim=dim))
        return cls(folder)


def lose(lab: Lab, fleet: Fleet, name: str, at: int, host: int, *overrides: str) -> Program:
    """A run that loses a host after a step, and gets a fresh one in its place."""
    job = fleet.start(lab, name, "--run.timeout", "10", *overrides)
    fleet.reach(job, name, at)
    lab.remove(host)
    lab.add(host)
    job.join(host)
    job.check(240.0)
    return job


def resumed(job: Program) -> list[tuple[int, int]]:
    """(the step resumed from, steps repeated) of each restart, as the host says that is the first then."""
    said = "".join(job.output(host) for host in range(HOSTS))
    return [
        (int(step), int(again or 0)) for step, again in re.findall(r"resumed from step (\d+)(?:; (\d+) step)?", said)
    ]
