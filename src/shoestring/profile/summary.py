"""The lines of a program by the time that they take, for a terminal."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from shoestring.profile.recording import Profile
from shoestring.profile.tree import CallTree, NodeKind


@dataclass
class LineTime:
    """Nanoseconds of a line of the program, its own, where it is the nearest line of the program's own code."""

    forward: int = 0
    backward: int = 0
    """Of the gradients of what it called."""
    python: int = 0
    """Outside of operators."""
    operators: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.python


@cache
def is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package, and not to the program."""
    if file.startswith("<"):
        return True
    roots = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(Path(file).is_relative_to(root) for root in roots if root) or file.startswith(sys.base_prefix + "/lib")


def own_lines(tree: CallTree) -> np.ndarray:
    """Which nodes are lines of the program's own code."""
    return np.array(
        [tree.kind[node] == NodeKind.PYTHON and not is_library(tree.place(node)[0]) for node in range(len(tree))]
    )


def by_line(tree: CallTree) -> dict[tuple[str, int], LineTime]:
    """Own times of all nodes by the nearest line of the program above them."""
    nearest, lines = tree.nearest(own_lines(tree)), {}
    behind = np.zeros(len(tree), bool)
    for node in range(1, len(tree)):
        behind[node] = behind[tree.parent[node]] or tree.kind[node] in (NodeKind.LINK, NodeKind.BACKWARD)
        if nearest[node] < 0 or not tree.own[node]:
            continue
        line = lines.setdefault(tree.place(int(nearest[node])), LineTime())
        own = int(tree.own[node])
        if tree.kind[node] == NodeKind.PYTHON:
            line.python += own
            continue
        if behind[node]:
            line.backward += own
        else:
            line.forward += own
        name = tree.names[tree.name[node]]
        line.operators[name] = line.operators.get(name, 0) + own
    return lines


def summary(profile: Profile, most: int = 15) -> Iterator[str]:
    """The text: where the time went, line by line."""
    tree, facts = profile.tree, profile.facts
    seconds = float(tree.inclusive[0]) / 1e9
    python = float(tree.own[tree.kind == NodeKind.PYTHON].sum()) / 1e9
    yield (
        f"{facts.seconds:.2f} s, of which {seconds - python:.2f} s in operators, {python:.2f} s in Python outside of"
        f" them, and {facts.overhead:.2f} s for this profile"
    )
    lines = sorted(by_line(tree).items(), key=lambda item: -item[1].total)
    shares: list[tuple[str, ...]] = [("share", "forward", "backward", "Python", "line", "mostly")]
    for (file, number), line in lines[:most]:
        mostly = max(line.operators, key=lambda name: line.operators[name], default="")
        times = (f"{value / 1e9:.2f} s" if value else "" for value in (line.forward, line.backward, line.python))
        place = f"{_short(file)}:{number}"
        shares.append((f"{line.total / max(tree.inclusive[0], 1):.1%}", *times, place, mostly))
    widths = [max(len(row[column]) for row in shares) for column in range(len(shares[0]))]
    for row in shares:
        left = [text.rjust(width) for text, width in zip(row[:4], widths[:4], strict=True)]
        yield "  ".join([*left, row[4].ljust(widths[4]), row[5]]).rstrip()
    if len(lines) > most:
        yield f"and {len(lines) - most} more lines"
    if facts.lost:
        yield f"{facts.lost} calls found no room in the tree"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
