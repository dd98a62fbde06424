"""`shoestring report` and `shoestring compare`: write pages about runs from the files in the run folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shoestring.report import comparison, page, timeline
from shoestring.storage.whole import write_atomic
from shoestring.verbs.memory import compare_runs


def report(run: Path, trace: Path | None = None) -> list[Path]:
    """Rewrite the report of a run, which may still be training.

    Args:
        trace: path of a Chrome trace to write, with the spans of all ranks; None to write none.

    Returns:
        The files that were written.

    Raises:
        ConfigError: `run` is not a run folder.
    """
    written = [page.write(run)]
    if trace is not None:
        ranks = [timeline.read(path) for path in sorted(run.glob("trace-*.jsonl"))]
        write_atomic(trace, json.dumps(timeline.chrome(ranks)).encode())
        written.append(trace)
    return written


def compare(runs: Sequence[Path], out: Path) -> tuple[str, Path]:
    """Compare two or more runs: their results, their settings, and their memory if all runs have recorded it.

    Returns:
        A summary for the terminal, and the path of the page that was written (`out`).

    Raises:
        ConfigError: there are fewer than two folders, a folder is given twice, or is not a run folder.
    """
    text, written = comparison.compare(runs, out)
    return "\n".join([text, *compare_runs(runs)]), written
