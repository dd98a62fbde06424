"""The calling-context tree of a profile: call paths from Python's lines through operators, with what they took.

Times are nanoseconds. A node's own time is its inclusive time less that of its children; all own times of a tree add up
to the time of its root. Backward functions are where they ran; `link` names the operator whose gradient they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.core.errors import DataError

Integers = NDArray[np.int64]


class NodeKind(IntEnum):
    """What a node is; numbers as `native/callpaths.cpp` has them."""

    ROOT = 0
    PYTHON = 1
    """A line of a Python function."""
    OPERATOR = 2
    BACKWARD = 3
    """A function of the backward pass."""
    SPAN = 4
    """A part that the program names (`record_function`, or a span of shoestring's own)."""
    LINK = 5
    """Above the backward functions of one operator of the forward pass."""
    OVERFLOWN = 6
    """Call paths that found no room."""
    KERNEL = 7
    """What an accelerator ran for the operator above: its time is in `device`, and in no other column."""
    NATIVE = 8
    """A native function that an operator, or another one, calls: samples say how its own time is shared out."""


COLUMNS = (
    *("parent", "kind", "name", "line", "link", "count", "own", "least", "most"),
    *("bytes", "flops", "device", "idle", "alone", "graphed", "inputs", "variants"),
)
FRACTIONS = ("squares", "count_variance", "own_variance")


ENGINE = "autograd::engine::evaluate_function: "
"""What torch puts before the name of a backward function where it runs the whole of it."""


@dataclass(frozen=True)
class CallTree:
    """Columns of N nodes; a node comes after its parent, and the first is the root."""

    names: list[str]
    """Of operators and spans; of Python functions `file<TAB>qualified name`, of native ones `library<TAB>name`."""
    parent: Integers
    """The root's is -1."""
    kind: Integers
    name: Integers
    """Index of `names`."""
    line: Integers
    """Of Python nodes, from 1; 0 is not known."""
    link: Integers
    """Of LINK nodes, the node whose gradient is computed below; otherwise -1."""
    count: Integers
    own: Integers
    least: Integers
    most: Integers
    bytes: Integers
    """Bytes of the tensors that an operator was given, over all calls; 0 is not known. See `collector.py`."""
    flops: Integers
    """Floating-point operations of matrix products, convolutions and attention, over all calls; 0 is not known."""
    device: Integers
    """Nanoseconds on an accelerator: of KERNEL nodes, their own; of others 0."""
    idle: Integers
    """Of KERNEL nodes, nanoseconds that the accelerator had nothing to run just before them."""
    alone: Integers
    """Of KERNEL nodes that copy, nanoseconds in which no kernel ran beside them."""
    graphed: Integers
    """Calls that recorded a function for the backward pass."""
    inputs: Integers
    """Index of `names`: the arguments of a call, such as `float32[8,64], float32[64,64]`; 0 is not known."""
    variants: Integers
    """Different arguments seen, at least: by shape, type or layout; 0 is not known."""
    squares: NDArray[np.float64]
    """Sums of the squares of inclusive times."""
    count_variance: NDArray[np.float64]
    """Of `count`, as an estimate; 0 where every call was recorded."""
    own_variance: NDArray[np.float64]
    """Of `own`, as an estimate: of Python's own time, which is sampled, and of operators in a sampled profile."""

    def __post_init__(self) -> None:
        size = len(self.parent)
        sizes = {name: len(getattr(self, name)) for name in (*COLUMNS, *FRACTIONS)}
        if size == 0 or set(sizes.values()) != {size}:
            raise DataError(f"a profile with columns of {sizes} nodes")
        before = np.arange(size)
        fits = self.parent[0] == -1 and bool((self.parent[1:] >= 0).all() and (self.parent[1:] < before[1:]).all())
        within = all(bool(((of >= 0) & (of < len(self.names))).all()) for of in (self.name, self.inputs))
        linked = bool((self.link >= -1).all() and (self.link < size).all())
        if not (fits and within and linked):
            raise DataError("a profile whose nodes name parents, links or names that are not there")

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def inclusive(self) -> Integers:
        """With what is below."""
        return totals(self.parent, self.own)

    @cached_property
    def depth(self) -> Integers:
        """Of each node, from 0."""
        depth = np.zeros(len(self), np.int64)
        for node in range(1, len(self)):
            depth[node] = depth[self.parent[node]] + 1
        return depth

    def label(self, node: int) -> str:
        """What a person calls a node."""
        name = self.names[self.name[node]]
        if self.kind[node] == NodeKind.PYTHON:
            file, _, function = name.partition("\t")
            return f"{function} ({file.rsplit('/', 1)[-1]}:{self.line[node]})"
        if self.kind[node] == NodeKind.LINK:
            return f"backward of {self.label(int(self.link[node]))}" if self.link[node] >= 0 else "backward"
        if self.kind[node] == NodeKind.NATIVE:
            library, _, function = name.partition("\t")
            return f"{function} ({library.rsplit('/', 1)[-1]})"
        name = name.removeprefix(ENGINE)
        return name or NodeKind(int(self.kind[node])).name.lower()

    def place(self, node: int) -> tuple[str, int]:
        """The file and line of a Python node."""
        return self.names[self.name[node]].partition("\t")[0], int(self.line[node])

    def nearest(self, wanted: NDArray[np.bool_]) -> Integers:
        """Of each node the nearest node at or above it that is wanted, -1 where there is none.

        Below a link the search goes on from the operator of the forward pass, so backward functions have its lines.
        """
        found = np.full(len(self), -1, np.int64)
        for node in range(len(self)):
            if wanted[node]:
                found[node] = node
            elif self.link[node] >= 0 and self.link[node] < node and found[self.link[node]] >= 0:
                found[node] = found[self.link[node]]
            elif node:
                found[node] = found[self.parent[node]]
        return found


def totals(parent: Integers, own: Integers) -> Integers:
    """Inclusive times from own ones."""
    inclusive = own.copy()
    for node in range(len(parent) - 1, 0, -1):
        inclusive[parent[node]] += inclusive[node]
    return inclusive


_SUMS = ("count", "own", "bytes", "flops", "device", "idle", "alone", "graphed")
_FRESH: Mapping[str, float] = {"least": 2**62} | dict.fromkeys((*_SUMS, *FRACTIONS, "most", "variants", "inputs"), 0)


class TreeBuilder:
    """Builds a tree from others: call paths that are equal become one node."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {"": 0}
        self.nodes: dict[tuple[int, int, int, int, int], int] = {}
        self.rows: list[list[int]] = [[-1, 0, 0, 0, -1]]
        self.numbers: list[dict[str, float]] = [dict(_FRESH)]

    def text(self, name: str) -> int:
        """The index of a name."""
        return self.names.setdefault(name, len(self.names))

    def node(self, parent: int, kind: int, name: str, line: int = 0, link: int = -1) -> int:
        """The node of this kind below `parent`."""
        key = (parent, kind, self.text(name), line, link)
        if key not in self.nodes:
            self.nodes[key] = len(self.rows)
            self.rows.append([*key])
            self.numbers.append(dict(_FRESH))
        return self.nodes[key]

    def add(
        self,
        node: int,
        *,
        least: int = 2**62,
        most: int = 0,
        inputs: str = "",
        variants: int = 0,
        **sums: float,
    ) -> None:
        """Add calls to a node; `sums` are the columns that add up: `count`, `own`, `bytes`, `squares` and so on."""
        numbers = self.numbers[node]
        for name, value in sums.items():
            numbers[name] += value
        numbers["least"] = min(numbers["least"], least)
        numbers["most"] = max(numbers["most"], most)
        if variants > numbers["variants"]:  # of those who saw more
            numbers["variants"], numbers["inputs"] = variants, self.text(inputs)

    def graft(self, tree: CallTree, onto: int = 0) -> list[int]:
        """Add all of a tree below a node; returns where its nodes are now."""
        places = [onto]
        for node in range(len(tree)):
            if node:
                link = int(tree.link[node])
                places.append(
                    self.node(
                        places[tree.parent[node]],
                        int(tree.kind[node]),
                        tree.names[tree.name[node]],
                        int(tree.line[node]),
                        places[link] if 0 <= link < node else -1,
                    )
                )
            self.add(
                places[node],
                least=int(tree.least[node]) if tree.count[node] else 2**62,
                most=int(tree.most[node]),
                inputs=tree.names[tree.inputs[node]],
                variants=int(tree.variants[node]),
                **{name: getattr(tree, name)[node].item() for name in (*_SUMS, *FRACTIONS)},
            )
        return places

    def build(self) -> CallTree:
        """The tree."""
        rows = np.array(self.rows, np.int64)
        numbers: dict[str, Any] = {
            name: np.array([of[name] for of in self.numbers], float if name in FRACTIONS else np.int64)
            for name in _FRESH
        }
        parent = rows[:, 0]
        return CallTree(
            names=list(self.names),
            parent=parent,
            kind=rows[:, 1],
            name=rows[:, 2],
            line=rows[:, 3],
            link=rows[:, 4],
            **(numbers | {"least": np.where(numbers["count"] > 0, numbers["least"], 0)}),
        )


def without_native(tree: CallTree) -> CallTree:
    """The tree as it is where native functions are not recorded: operators have all of their own time."""
    native = tree.kind == NodeKind.NATIVE
    if not native.any():
        return tree
    above = tree.nearest(~native)
    place = np.cumsum(~native) - 1
    own = np.zeros_like(tree.own)
    np.add.at(own, above, tree.own)
    left: dict[str, Any] = {name: column[~native] for name, column in columns(tree).items()}
    left["own"] = own[~native]
    for name in ("parent", "link"):
        left[name] = np.where(left[name] >= 0, place[left[name]], -1)
    return CallTree(names=tree.names, **left)


def merged(trees: Iterable[CallTree]) -> CallTree:
    """One tree of several: of ranks, or of runs."""
    builder = TreeBuilder()
    for tree in trees:
        builder.graft(tree)
    return builder.build()


def columns(tree: CallTree) -> Mapping[str, Any]:
    """The columns by name."""
    return {name: getattr(tree, name) for name in (*COLUMNS, *FRACTIONS)}
