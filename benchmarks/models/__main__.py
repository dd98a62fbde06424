"""The command line of the matrix of models.

python -m benchmarks.models                         the bars, as in other areas; the table goes beside their rows
python -m benchmarks.models --cases llama gpt2      some models, and `--columns tokens LoRA` some promises, printed
python -m benchmarks.models --release 5.24.0 …      the same with another release of transformers, installed aside
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Deadline, main, stored
from benchmarks.machine import ROOT
from benchmarks.models import text, timing, tuned, zoo
from benchmarks.models.columns import COLUMNS
from benchmarks.models.matrix import from_json, release, run, table, totals
from benchmarks.rows import RESULTS, Bar, Measured, NotRun
from shoestring.core.errors import ConfigError, ShoestringError, nearest

RUNS = RESULTS / "runs" / "models"
OLDEST, NEWEST = "5.13.0", "5.24.0"
"""Releases of transformers that the matrix is run with beside the installed one: the ends of the range in
pyproject.toml."""


def whole_matrix(deadline: Deadline) -> dict[str, Any]:
    """The stored matrix of the imported release, run now if it was not before."""

    def make() -> dict[str, Any]:
        began, missing = time.monotonic(), zoo.missing()
        matrix = run([name for name in zoo.CASES if name not in missing])
        return {"seconds": round(time.monotonic() - began), "missing": missing, "cells": matrix}

    record = stored(RUNS / f"{release()}.json", deadline.check, make)
    matrix = from_json(record["cells"])
    about = (
        f"transformers {release()}, {record['seconds'] / 60:.0f} minutes, one thread; `python -m benchmarks.models`."
    )
    skipped = [f"- {name}: {reason}" for name, reason in record["missing"].items()]
    page = table(matrix, about) + ("\nLeft out:\n" + "\n".join(skipped) + "\n" if skipped else "")
    (RUNS / f"{release()}.md").write_text(page)
    return record


def _column(name: str, deadline: Deadline) -> Measured:
    counts = totals(from_json(whole_matrix(deadline)["cells"]))[name]
    return Measured(counts["no"], f"transformers {release()}: {counts['yes']} yes, {counts['refused']} refused")


def _size(families: bool, deadline: Deadline) -> float:
    names = whole_matrix(deadline)["cells"]
    return len({zoo.family(name) for name in names}) if families else len(names)


def _minutes(deadline: Deadline) -> float:
    return whole_matrix(deadline)["seconds"] / 60


def _of_release(number: str, deadline: Deadline) -> Measured | NotRun:
    """Cells that are no with another release, measured by this module in a process of its own."""
    path = RUNS / f"{number}.json"
    if not path.exists() and (code := _with_release(number, ["--whole"])):
        return NotRun(f"transformers {number} could not be installed or run (exit code {code})")
    record = stored(path, deadline.check, dict)
    matrix = from_json(record["cells"])
    counts = [f"{column} {of['yes']}" for column, of in totals(matrix).items()]
    wrong = sum(of["no"] for of in totals(matrix).values())
    note = f"of {len(matrix)} models, {len(record['missing'])} others are not in it; yes: {', '.join(counts)}"
    return Measured(wrong, note)


def rows() -> list[Bar]:
    """The bars of the area."""
    peers = ("transformers", "peft", "tokenizers", "safetensors")

    def bar(name: str, what: str, op: Any, limit: float, measure: Callable[..., Any]) -> Bar:
        return Bar(f"models.{name}", what, op, limit, measure, seeds=(0,), peers=peers, kind="exact")

    columns = [
        bar(
            name.lower().replace(" ", "-").replace(":", "-"),
            f'models whose cell "{name}" in the matrix is neither yes nor refused with a reason',
            "<=",
            0,
            partial(_column, name),
        )
        for name in COLUMNS
    ]
    return [
        bar("models", "models in the matrix", ">=", 60, partial(_size, False)),
        bar("families", "families in the matrix", ">=", 33, partial(_size, True)),
        bar("minutes", "minutes that the matrix takes, one thread", "<=", 40, _minutes),
        *columns,
        *timing.rows(),
        *tuned.rows(),
        *text.rows(),
        bar("oldest", f"cells that are no with transformers {OLDEST}", "<=", 0, partial(_of_release, OLDEST)),
        bar("newest", f"cells that are no with transformers {NEWEST}", "<=", 0, partial(_of_release, NEWEST)),
    ]


def install(number: str, folder: Path) -> str:
    """Install a release of transformers into a folder, with those of the packages it needs that the installed ones do
    not satisfy; returns why it cannot be installed, or an empty string."""
    pip, wanted = [sys.executable, "-m", "pip", "install", "--quiet"], f"transformers=={number}"
    plan = folder / "plan.json"
    done = subprocess.run([*pip, "--dry-run", "--report", str(plan), wanted], capture_output=True, text=True)
    if done.returncode == 0:
        packages = [package["metadata"] for package in json.loads(plan.read_text())["install"]]
        named = [f"{package['name']}=={package['version']}" for package in packages] or [wanted]
        target = ["--no-deps", "--target", str(folder), *named]
        done = subprocess.run([*pip, *target], capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (errors or done.stderr.splitlines() or ["pip failed"])[-1]


def _with_release(number: str, arguments: Sequence[str]) -> int:
    """Run this module with another release of transformers, installed into a temporary folder; its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        if reason := install(number, Path(folder)):
            print(f"transformers {number} cannot be installed here: {reason}", file=sys.stderr)
            return 1
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.models", *arguments]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT).returncode


def _slice(cases: Sequence[str], columns: Sequence[str]) -> int:
    """Measure and print a part of the matrix; 1 if a cell is no. A case is named by itself or by its family."""
    for given, known in ((cases, {*zoo.CASES, *map(zoo.family, zoo.CASES)}), (columns, set(COLUMNS))):
        for name in given:
            if name not in known:
                raise ConfigError(f"the matrix has no `{name}`", hint=nearest(name, known))
    names = [name for name in zoo.CASES if not cases or name in cases or zoo.family(name) in cases]
    missing = zoo.missing()
    for name in names:
        if name in missing:
            print(f"{name}: {missing[name]}")
    matrix = run([name for name in names if name not in missing], columns)
    for column, counts in totals(matrix).items():
        print(f"{column:10}" + ", ".join(f"{counts[state]} {state}" for state in ("yes", "refused", "no")))
    return int(any(counts["no"] for counts in totals(matrix).values()))


def command(argv: Sequence[str]) -> int:
    """The command line; see the module's docstring."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--cases", nargs="+", default=[])
    flags.add_argument("--columns", nargs="+", default=[])
    flags.add_argument("--release", default="")
    flags.add_argument("--whole", action="store_true")  # stores the matrix of the imported release, and no rows
    known, rest = flags.parse_known_args(argv)
    try:
        if known.release:
            without = [word for word in argv if word not in ("--release", known.release)]
            return _with_release(known.release, without)
        if known.cases or known.columns:
            return _slice(known.cases, known.columns)
    except ShoestringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if known.whole:
        whole_matrix(Deadline())
        return 0
    return main("models", rows, rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
