"""Runs the matrix, one case after the other, each in a child process that may die or hang, and writes its table."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.models import zoo
from benchmarks.models.columns import COLUMNS, Case, Cell, measure

SECONDS = 300.0
"""Most seconds that a case may take."""

Matrix = Mapping[str, Mapping[str, Cell]]
"""Cells by case and column."""


def release() -> str:
    """The release of transformers that is imported."""
    return importlib.metadata.version("transformers")


def run(cases: Sequence[str], columns: Sequence[str] = ()) -> dict[str, dict[str, Cell]]:
    """Measure cases, and print a line for each."""
    for package in ("transformers", "peft"):  # imported once, before children are forked
        importlib.import_module(package)
    columns, matrix = columns or list(COLUMNS), {}
    for number, name in enumerate(cases, start=1):
        began = time.monotonic()
        matrix[name] = _in_child(name, columns)
        notes = [f"{column} {cell.state}: {cell.reason}" for column, cell in matrix[name].items() if cell.reason]
        seconds = time.monotonic() - began
        print(f"{number:3}/{len(cases)} {name:28} {seconds:5.1f} s  " + ("; ".join(notes) or "yes"), flush=True)
    return matrix


def _in_child(name: str, columns: Sequence[str]) -> dict[str, Cell]:
    """The cells of a case, measured in a forked process by one thread."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=_answer, args=(name, columns, folder, sender))
        child.start()
        sender.close()
        try:
            reason = f"it took more than {SECONDS:.0f} s"
            if receiver.poll(SECONDS):
                return receiver.recv()
        except EOFError:
            child.join()
            reason = f"the process died with the code {child.exitcode}"
        finally:
            child.kill()
            child.join()
    return dict.fromkeys(columns, Cell("no", reason))


def _answer(name: str, columns: Sequence[str], folder: str, sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sender.send(measure(Case(name, Path(folder)), columns))


def totals(matrix: Matrix) -> dict[str, Counter[str]]:
    """Numbers of cells by column and state."""
    counts: dict[str, Counter[str]] = {}
    for cells in matrix.values():
        for column, cell in cells.items():
            counts.setdefault(column, Counter())[cell.state] += 1
    return counts


def table(matrix: Matrix, about: str) -> str:
    """The matrix as a page of Markdown: a row for each case, then the reasons, each with the cases that it is of.

    Args:
        about: what was measured with, in a line.
    """
    columns = list(totals(matrix))
    families = len({zoo.family(name) for name in matrix})
    lines = [f"# {len(matrix)} models of {families} families", "", about, ""]
    lines += ["| model | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    numbers: dict[str, int] = {}
    cases_of: dict[str, list[str]] = defaultdict(list)
    for name, cells in matrix.items():
        row = [name]
        for column in columns:
            cell, mark = cells[column], ""
            if cell.reason:
                text = f"{column}: {cell.reason}"
                mark = f" ({numbers.setdefault(text, len(numbers) + 1)})"
                cases_of[text].append(name)
            row.append(f"{cell.state}{mark}")
        lines.append("| " + " | ".join(row) + " |")
    for state in ("yes", "refused", "no"):
        counts = [str(totals(matrix)[column][state]) for column in columns]
        lines.append(f"| **{state}** | " + " | ".join(counts) + " |")
    lines += [""] + [f"{number}. {text} ({len(cases_of[text])} models)" for text, number in numbers.items()]
    return "\n".join(lines) + "\n"


def from_json(cells: Mapping[str, Any]) -> dict[str, dict[str, Cell]]:
    """A matrix as it was stored."""
    return {name: {column: Cell(*cell) for column, cell in row.items()} for name, row in cells.items()}
