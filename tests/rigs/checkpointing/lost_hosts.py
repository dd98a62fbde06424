"""Four hosts, one of which is lost with its memory and replaced."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shoestring.testing.netlab import Lab, Program
from tests.rigs.lab_run import LabRun

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
{under}
[checkpoint.tiered]
peers_every = 4
disk_every = 0
{settings}
"""
_SHARDED = ("[parallel.fsdp]", "memory_every = 1")
_REPLAYED = ("[parallel.ddp]\n[comm.quantize]\nbits = 4", 'differences = 16\ndifferences_on = "peers"')


@dataclass(frozen=True)
class Fleet(LabRun):
    """A run on four hosts that saves to memory and peers only; every host has a disk of its own."""

    @classmethod
    def made(cls, folder: Path, dim: int = 32, *, replayed: bool = False) -> Fleet:
        """Write the corpus and the run file: of a sharded run, or of replicas whose steps are replayed."""
        LabRun.prepare(folder)
        under, settings = _REPLAYED if replayed else _SHARDED
        of = {"corpus": folder / "corpus.txt", "steps": STEPS, "dim": dim, "under": under, "settings": settings}
        (folder / "run.toml").write_text(_RUN.format(**of))
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
