"""restart: two hosts train, lose a worker, a host or the link, and end with the losses of an undisturbed run."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Bar, Deadline, Measured, NotRun, main
from benchmarks.rows import RESULTS
from shoestring.core.errors import WorldError
from shoestring.testing.netlab import Lab, Program, netlab, netlab_available
from tests.rigs.lab_run import LabRun, difference, killed, replaced, undisturbed

ROUNDS = 20
CLOSE = 1e-6  # how far a loss may be off, relatively; in fact they are equal bit for bit


def share(
    scenario: Callable[[Lab, LabRun, str], Program], rounds: int, deadline: Deadline, *, pipeline: bool = False
) -> Measured | NotRun:
    """The share of the rounds that end with the losses of two local ranks to which nothing happened."""
    if reason := netlab_available():
        return NotRun(reason)
    with tempfile.TemporaryDirectory() as folder:
        lab_run = LabRun.prepare(Path(folder), pipeline=pipeline)
        expected = lab_run.local("local")
        good, worst = 0, 0.0
        for number in range(rounds):
            deadline.check()
            name = f"round-{number}"
            try:
                with netlab(hosts=2, rate="100mbit", shared=lab_run.shared) as lab:
                    scenario(lab, lab_run, name)
            except (WorldError, RuntimeError) as error:
                print(f"{name}: {error}", file=sys.stderr)
            off = difference(expected, lab_run.losses(name))
            good, worst = good + (off <= CLOSE), max(worst, off)
    return Measured(good / rounds, f"{good} of {rounds} rounds; worst relative difference of a loss {worst:.1g}")


def rows(rounds: int = ROUNDS) -> list[Bar]:
    """The bars: all rounds of each scenario."""
    end = "end with the losses of two local ranks to which nothing happened: share of 20 rounds"
    told = {
        "local-equal": (undisturbed, "two hosts at 100 Mbit/s"),
        "kill": (killed, "two hosts at 100 Mbit/s, of whose two workers one is killed with SIGKILL,"),
        "host-lost": (replaced, "two hosts at 100 Mbit/s, of which one is lost with memory and disk and replaced,"),
    }
    return [
        Bar(
            f"restart.{name}",
            f"{what} {end}",
            ">=",
            1.0,
            measure=functools.partial(share, scenario, rounds),
            kind="exact",
        )
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
