"""The lines of a profiled program: which code is its own, how long each line takes, and what is written there."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoestring.profile.tree import ENGINE, CallTree, Integers, NodeKind, without_native

_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/.]+)")
_PYTHON = re.compile(r"^<frozen |/lib/python3[^/]*/|^<(?!stdin>|ipython)|/bin/shoestring$")
_STARTS = re.compile(r"^<frozen runpy>|/runpy\.py\t|/bin/shoestring\t")
_COMPILED = re.compile(r"/torchinductor_[^/]*/|/[a-z0-9]{2}/c[a-z0-9]{51}\.py$")
"""Files that torch.compile writes, in its own folder or in another that it was told to use."""
_OWN_PACKAGE = f"{Path(__file__).parents[1]}/"
_WATCHING = tuple(  # what is on the path to what it watches
    f"{_OWN_PACKAGE}{each}" for each in ("profile/", "core/trace.py", "cli.py", "__main__.py", "commands/profiling.py")
)
_FRAMEWORKS = frozenset({"python", "torch", "jax", "jaxlib", "numpy", "flax"})

IMPORTS = "<imports>"
"""Stands for a file: what a program takes to import packages, wherever it does. Is in no line and no share."""

LARGEST_SOURCE, MOST_SOURCES = 200_000, 400_000
"""Characters of one file of the program, and of all of them, that a profile carries."""


@dataclass
class LineTime:
    """Nanoseconds of a line of the program, its own, where it is the nearest line of the program's own code."""

    forward: int = 0
    backward: int = 0
    """Of the gradients of what it called."""
    python: int = 0
    """Outside of operators."""
    operators: dict[str, int] = field(default_factory=dict)
    variance: float = 0.0
    """Of the total, as an estimate: Python's own time is sampled, and all time is in a sampled profile."""

    @property
    def uncertainty(self) -> float:
        """Nanoseconds by which the total may be off, either way, in 95 of 100 cases."""
        return 1.96 * math.sqrt(self.variance)

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.python


def without_imports(tree: CallTree) -> int:
    """Nanoseconds of the whole program but for importing packages: what shares are of."""
    return int(tree.inclusive[0]) - import_time(tree)


def import_time(tree: CallTree) -> int:
    """Nanoseconds of importing packages."""
    return int(tree.own[imports(tree)].sum())


def imports(tree: CallTree) -> NDArray[np.bool_]:
    """Which nodes stand for importing packages."""
    names = np.array([name.startswith(f"{IMPORTS}\t") for name in tree.names])
    return (tree.kind == NodeKind.PYTHON) & names[tree.name]


def package_of(file: str) -> str:
    """The package that a file is installed with, "" for the program itself, and `python` for what is never shown as it.

    That is the standard library, and the code of this package that marks and records other code.
    """
    if found := _INSTALLED.search(file):
        return found[1]
    if file.startswith(_OWN_PACKAGE):
        return "python" if file.startswith(_WATCHING) else "shoestring"
    if _COMPILED.search(file):
        return "torch"
    return "python" if _PYTHON.search(file) else ""


def short(file: str) -> str:
    """A path as it is from here, or within what is installed."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    if file.startswith(_OWN_PACKAGE):
        return f"shoestring/{file.removeprefix(_OWN_PACKAGE)}"
    installed = _INSTALLED.search(file)
    return file[installed.start(1) :] if installed else file


def own_lines(tree: CallTree, inside: Sequence[str] = ()) -> NDArray[np.bool_]:
    """Which nodes are lines of the program's own code.

    Args:
        inside: installed packages whose code counts as the program's own.
    """
    return _lines_where(tree, {"", *inside})


def _lines_where(tree: CallTree, packages: set[str] | None, but: frozenset[str] = frozenset()) -> NDArray[np.bool_]:
    files = [name.partition("\t")[0] for name in tree.names]
    found = [(file, package_of(file)) for file in files]
    wanted = np.array(
        [(packages is None or name in packages) and name not in but and file != IMPORTS for file, name in found]
    )
    return (tree.kind == NodeKind.PYTHON) & wanted[tree.name]


def nearest_lines(tree: CallTree, inside: Sequence[str] = ()) -> Integers:
    """Of each node the line of the program that it runs for, as a node; -1 where there is none, and for imports.

    Where no line of the program's own is above, it is the nearest one of a package that is no framework, or of any.
    """
    nearest = tree.nearest(own_lines(tree, inside))
    for others in (_lines_where(tree, None, _FRAMEWORKS), _lines_where(tree, None) & ~_starting(tree)):
        if (nearest >= 0).all():
            break
        nearest = np.where(nearest >= 0, nearest, tree.nearest(others))
    return nearest


def _starting(tree: CallTree) -> NDArray[np.bool_]:
    """Which nodes are of what starts a program, and records it."""
    return np.array([bool(_STARTS.search(name)) or name.startswith(_WATCHING) for name in tree.names])[tree.name]


def in_backward(tree: CallTree) -> NDArray[np.bool_]:
    """Which nodes run in the backward pass."""
    engine = np.array([name.startswith(ENGINE) for name in tree.names])
    behind = np.isin(tree.kind, (NodeKind.LINK, NodeKind.BACKWARD)) | engine[tree.name]
    for node in range(1, len(tree)):
        behind[node] |= behind[tree.parent[node]]
    return behind


def by_line(tree: CallTree, inside: Sequence[str] = ()) -> dict[tuple[str, int], LineTime]:
    """Own times of all nodes by the nearest line of the program above them."""
    tree = without_native(tree)
    nearest, behind = nearest_lines(tree, inside), in_backward(tree)
    lines: dict[tuple[str, int], LineTime] = {}
    for node in np.flatnonzero((nearest >= 0) & (tree.own != 0)):
        line = lines.setdefault(tree.place(int(nearest[node])), LineTime())
        own = int(tree.own[node])
        line.variance += float(tree.own_variance[node])
        if tree.kind[node] in (NodeKind.PYTHON, NodeKind.SPAN):
            line.python += own
            continue
        if behind[node]:
            line.backward += own
        else:
            line.forward += own
        name = tree.label(int(node))
        line.operators[name] = line.operators.get(name, 0) + own
    return lines


def sources_of(tree: CallTree, inside: Sequence[str] = ()) -> dict[str, str]:
    """The text of the files whose lines are the program's own, those with most time first, as far as they have room."""
    times: dict[str, int] = {}
    for (file, _), line in by_line(tree, inside).items():
        times[file] = times.get(file, 0) + line.total
    sources, room = {}, MOST_SOURCES
    for file in sorted(times, key=lambda file: -times[file]):
        text = "".join(linecache.getlines(file))
        if 0 < len(text) <= min(LARGEST_SOURCE, room):
            sources[file] = text
            room -= len(text)
    return sources
