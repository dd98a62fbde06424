"""Determines which code is the program's own, the time of each source line, and the source texts to store."""

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
"""Matches files that torch.compile writes, in its default folder or in a configured folder."""
_OWN_PACKAGE = f"{Path(__file__).parents[1]}/"
_WATCHING = tuple(  # shoestring's code that is on the call path of the profiled program
    f"{_OWN_PACKAGE}{name}"
    for name in ("profile/", "core/trace.py", "cli.py", "__main__.py", "commands/", "verbs/profile.py")
)
_FRAMEWORKS = frozenset({"python", "torch", "jax", "jaxlib", "numpy", "flax"})

IMPORTS = "<imports>"
"""Pseudo file that gets the time of all imports of packages; shares of the time exclude it."""

LARGEST_SOURCE, MOST_SOURCES = 200_000, 400_000
"""Maximum number of characters of one source file, and of all source files, that a profile contains."""


@dataclass
class LineTime:
    """Nanoseconds attributed to a line: the sum of the own times of the nodes nearest to it (see `nearest_lines`)."""

    forward: int = 0
    backward: int = 0
    """Time of the backward pass of the operators that the line called."""
    python: int = 0
    """Time in Python code outside operators."""
    operators: dict[str, int] = field(default_factory=dict)
    variance: float = 0.0
    """Variance of `total`: time in Python is always sampled, and with a share below 1 all times are estimates."""

    @property
    def uncertainty(self) -> float:
        """Half width of the total's 95% confidence interval, in nanoseconds."""
        return 1.96 * math.sqrt(self.variance)

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.python


def without_imports(tree: CallTree) -> int:
    """Nanoseconds of the program without imports of packages; all shares of the time are relative to this total."""
    return int(tree.inclusive[0]) - import_time(tree)


def import_time(tree: CallTree) -> int:
    """Nanoseconds spent on importing packages."""
    return int(tree.own[imports(tree)].sum())


def imports(tree: CallTree) -> NDArray[np.bool_]:
    """Mask of the nodes that stand for imports of packages."""
    names = np.array([name.startswith(f"{IMPORTS}\t") for name in tree.names])
    return (tree.kind == NodeKind.PYTHON) & names[tree.name]


def package_of(file: str) -> str:
    """The installed package that contains a file; "" for the program itself, and `python` for code that is never shown:
    the standard library, and shoestring's code for profiling and launching.
    """
    if match := _INSTALLED.search(file):
        return match[1]
    if file.startswith(_OWN_PACKAGE):
        return "python" if file.startswith(_WATCHING) else "shoestring"
    if _COMPILED.search(file):
        return "torch"
    return "python" if _PYTHON.search(file) else ""


def short(file: str) -> str:
    """Make a path relative to the working directory or to the folder of installed packages, if it is inside."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    if file.startswith(_OWN_PACKAGE):
        return f"shoestring/{file.removeprefix(_OWN_PACKAGE)}"
    installed = _INSTALLED.search(file)
    return file[installed.start(1) :] if installed else file


def own_lines(tree: CallTree, inside: Sequence[str] = ()) -> NDArray[np.bool_]:
    """Mask of the nodes that are lines of the program's own code.

    Args:
        inside: names of installed packages whose code counts as the program's own.
    """
    return _lines_where(tree, {"", *inside})


def _lines_where(tree: CallTree, packages: set[str] | None, but: frozenset[str] = frozenset()) -> NDArray[np.bool_]:
    """Mask of the nodes for lines of `packages` (None: of all packages), without the packages `but`, and without
    imports of packages."""
    files = [name.partition("\t")[0] for name in tree.names]
    origins = [(file, package_of(file)) for file in files]
    wanted = np.array(
        [(packages is None or name in packages) and name not in but and file != IMPORTS for file, name in origins]
    )
    return (tree.kind == NodeKind.PYTHON) & wanted[tree.name]


def nearest_lines(tree: CallTree, inside: Sequence[str] = ()) -> Integers:
    """Map each node to the node of the source line that gets its time; -1 for imports, and if there is no such line.

    A node's time goes to the nearest line of the program's own code at or above the node; if there is none, to the
    nearest line of a package that is not a framework; if there is none either, to the nearest line of any package.
    """
    nearest = tree.nearest(own_lines(tree, inside))
    for others in (_lines_where(tree, None, _FRAMEWORKS), _lines_where(tree, None) & ~_starting(tree)):
        if (nearest >= 0).all():
            break
        nearest = np.where(nearest >= 0, nearest, tree.nearest(others))
    return nearest


def _starting(tree: CallTree) -> NDArray[np.bool_]:
    """Mask of the nodes of code that launches or profiles the program."""
    return np.array([bool(_STARTS.search(name)) or name.startswith(_WATCHING) for name in tree.names])[tree.name]


def in_backward(tree: CallTree) -> NDArray[np.bool_]:
    """Mask of the nodes that run in the backward pass."""
    engine = np.array([name.startswith(ENGINE) for name in tree.names])
    behind = np.isin(tree.kind, (NodeKind.LINK, NodeKind.BACKWARD)) | engine[tree.name]
    for node in range(1, len(tree)):
        behind[node] |= behind[tree.parent[node]]
    return behind


def by_line(tree: CallTree, inside: Sequence[str] = ()) -> dict[tuple[str, int], LineTime]:
    """Map (file, line) to the sum of the own times of the nodes attributed to the line."""
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
    """Source texts by file, in order of the files' time, until `MOST_SOURCES` is reached; longer files are left out."""
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
