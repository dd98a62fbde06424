"""Four hosts, one of which is lost with its memory and replaced."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from shoestring.checkpoint.tiers import peer_copies
from shoestring.testing.netlab import Lab, Program, netlab, netlab_available
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


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""

    def lost(_: Deadline, how: str) -> Measured | NotRun:
        if reason := netlab_available():
            return NotRun(reason)
        with TemporaryDirectory() as place:
            fleet = Fleet.made(Path(place))
            expected = fleet.local("local", "--checkpoint.tiered.memory", f"{place}/memory", workers=HOSTS)
            worst, equal = 0, 0
            for host in range(1, HOSTS):  # where the ranks meet is on the first, and goes with it
                with netlab(hosts=HOSTS, rate="1gbit", shared=fleet.shared) as lab:
                    job = lose(lab, fleet, f"{how}-{host}", 10, host, "--checkpoint.tiered.peers", how)
                    told = resumed(job)
                equal += fleet.losses(f"{how}-{host}") == expected
                worst = max(worst, *(again for _, again in told))
        return Measured(
            equal / (HOSTS - 1), f"each of {HOSTS - 1} hosts lost once; at most {worst} steps of an interval of 4 again"
        )

    def storage(_: Deadline) -> Measured:
        of = peer_copies.ParitySet((0, 1, 2, 3), (1 << 30,) * 4, (0,) * 4)
        return Measured(1 + of.segment / of.lengths[0], "bytes of a rank's part and of the parity that it keeps")

    what = "a host of four is lost with its memory and disk, and replaced, under FSDP without checkpoints to disk; "
    bars = [
        Bar(
            f"checkpoint.host-{how}",
            f"{what}{words}: share of the hosts after whose loss all losses are those of four local ranks, bit for bit",
            ">=",
            1.0,
            partial(lost, how=how),
        )
        for how, words in (("copy", "copies on partners"), ("parity", "parity over the four"))
    ]
    return [
        *bars,
        Bar("checkpoint.parity-storage", "memory under parity over four hosts, times the state", "<=", 1.34, storage),
    ]
