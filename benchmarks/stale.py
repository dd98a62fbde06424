"""`python -m benchmarks.stale`: which rows are out of date, and `--hours H` to measure the stalest of them again."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.provenance import STALE, Sources, present_lines
from benchmarks.rows import RESULTS, Row, read
from shoestring.core.errors import ShoestringError

_GRACE = 60.0  # seconds that a benchmark has to end when its time is up


def staleness(row: Row, sources: Sources, present: Mapping[bytes, int]) -> float:
    """Share of the lines that a row measured which the tree no longer has, of the oldest run that it rests on.

    1 where the code is unknown or had uncommitted changes; 0 for a row that was never measured, which is not stale.
    """
    if row.measured is None:
        return 0.0
    if not row.rests_on or any(one["tree"].endswith("-dirty") for one in row.rests_on):
        return 1.0
    return max(sources.changed(one["sources"], present) for one in row.rests_on)


def ranked(results: Path) -> list[tuple[float, Row]]:
    """Rows with their staleness, the stalest first, and of those that are as stale the quickest to measure."""
    sources, present = Sources.read(results), present_lines()
    rows = [row for path in sorted(results.glob("*.json")) for row in read(path).values()]
    found = [(staleness(row, sources, present), row) for row in rows]
    return sorted(found, key=lambda pair: (-pair[0], pair[1].seconds or 0.0, pair[1].id))


def main(argv: Sequence[str] | None = None, results: Path = RESULTS) -> int:
    """Print the stale rows; with `--hours`, run the command of one after the other until the time is up.

    Returns:
        The exit status: 1 when a command failed, 2 for malformed results.
    """
    flags = argparse.ArgumentParser(prog="python -m benchmarks.stale", description="Show or measure stale rows.")
    flags.add_argument(
        "--hours", type=float, default=0.0, help="hours to measure for; without it, stale rows are shown"
    )
    flags.add_argument("--only", action="append", default=[], metavar="PREFIX", help="rows whose id starts with this")
    given = flags.parse_args(argv)
    try:
        stale = [(share, row) for share, row in ranked(results) if share > STALE]
    except ShoestringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = [(share, row) for share, row in stale if not given.only or row.id.startswith(tuple(given.only))]
    end, failed = time.monotonic() + 3600 * given.hours, False
    for share, row in chosen:
        print(f"{share:6.1%}  {row.date}  {row.id}  {row.command}", flush=True)
        left = end - time.monotonic()
        if given.hours and left > 0 and "benchmarks.gpu" not in row.command:
            failed |= _run(row.command, left) != 0
    return int(failed)


def _run(command: str, seconds: float) -> int:
    """Run a row's command, which stores what it measured, within a time."""
    process = subprocess.Popen([sys.executable, *command.split()[1:]], cwd=ROOT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return 0  # the time was up, which is no failure


if __name__ == "__main__":
    sys.exit(main())
