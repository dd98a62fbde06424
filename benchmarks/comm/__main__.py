"""The command line of comm's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path

from benchmarks import comm
from benchmarks.comm import added, auto, efficiency, encoding, pictures, safety, selection, wire_bytes
from benchmarks.comm.contest import TRIAL, Contest, Sizes
from benchmarks.comm.store import Store
from benchmarks.harness import Bar, Deadline, OutOfBudget, main
from benchmarks.machine import ROOT
from benchmarks.rows import RESULTS, Measured, NotRun
from shoestring.testing.netlab import netlab_available


def rows(ask: efficiency.Ask, sizes: Sizes) -> list[Bar]:
    """Every bar of comm; `ask` gives the contest."""
    contest = efficiency.rows(ask, sizes.seeds)
    if (seeds := len(sizes.seeds)) < len(Sizes().seeds):
        contest = [
            replace(bar, command=f"python -m benchmarks.comm --only {bar.id} --seeds {seeds}") for bar in contest
        ]
    on_netlab = [
        *contest,
        *added.rows(ask),
        *auto.rows(ask),
        *selection.rows(ask),
    ]
    return [*map(_where_possible, on_netlab), *wire_bytes.rows(ask), *encoding.rows(), *safety.rows(), *comm.gpu_rows()]


def _where_possible(bar: Bar) -> Bar:
    """The bar, not run where there is no netlab."""

    @wraps(bar.measure)
    def measure(deadline: Deadline) -> float | Measured | NotRun:
        reason = netlab_available()
        return NotRun(reason) if reason else bar.measure(deadline)

    return replace(bar, measure=measure)


def flags() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(add_help=False)
    found.add_argument("--cache", type=Path, default=ROOT / ".cache" / "comm")
    found.add_argument("--budget", type=float, default=float("inf"))
    found.add_argument("--trial", action="store_true")
    found.add_argument("--pictures", action="store_true")
    found.add_argument("--curves", action="store_true")
    found.add_argument("--seeds", type=int, choices=range(1, len(Sizes().seeds) + 1))
    return found


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    known, rest = flags().parse_known_args(argv)
    deadline = Deadline(60 * known.budget)
    sizes = TRIAL if known.trial else Sizes()
    sizes = replace(sizes, seeds=sizes.seeds[: known.seeds])

    @cache
    def ask() -> Contest:
        kept = None if known.trial else RESULTS / "runs" / "comm"
        return Contest(Store(known.cache, deadline.check), sizes, kept)

    if known.curves:
        with suppress(OutOfBudget):
            ask().prepare()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if known.pictures:
            place = Path(folder) if known.trial else pictures.PICTURES
            print("\n".join(map(str, pictures.draw(ask(), place))))
            return 0
        return main("comm", lambda: rows(ask, sizes), rest, Path(folder) if known.trial else RESULTS)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
