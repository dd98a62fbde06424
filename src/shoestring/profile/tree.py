"""The calling-context tree of a profile: call paths from lines of Python to operators, with counts and times.

Times are nanoseconds. A node's own time is its inclusive time minus the inclusive times of its children; all own times
of a tree add up to the inclusive time of its root. Backward functions are below the code that ran them; `link` points
to the operator whose gradient they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoestring.core.errors import DataError

Integers = NDArray[np.int64]
T = TypeVar("T")


class NodeKind(IntEnum):
    """Kinds of nodes; `native/callpaths.cpp` uses the same numbers."""

    ROOT = 0
    PYTHON = 1
    """A line of a Python function."""
    OPERATOR = 2
    BACKWARD = 3
    """A function of the backward pass."""
    SPAN = 4
    """A named part of the program: torch's `record_function`, or a span of shoestring."""
    LINK = 5
    """Parent of the backward functions of one operator of the forward pass."""
    OVERFLOWN = 6
    """Replaces call paths that did not fit into a full tree, or frames left out of a deep stack."""
    KERNEL = 7
    """A kernel or copy on an accelerator, launched by the operator above it; the column `device` contains its time."""
    NATIVE = 8
    """A native function called by an operator or another native function; its own time is estimated from samples."""


COLUMNS = (
    *("parent", "kind", "name", "line", "link", "count", "own", "least", "most"),
    *("bytes", "flops", "device", "idle", "alone", "graphed", "inputs", "variants"),
)
FRACTIONS = ("squares", "count_variance", "own_variance")


OUTER, INNER = 96, 96
"""How many outermost and innermost Python frames of a deep stack are recorded; the same as in
`native/callpaths.cpp`."""
GAP = "… frames left out …"
"""Name of the OVERFLOWN node between the outermost and the innermost frames of a deep stack."""
MOST_NODES, DEEPEST = 1 << 20, 1 << 12
"""Maximum number of nodes and maximum depth of a tree in a file."""
LARGEST_SUM = float(1 << 62)
"""Maximum sum of a column in a file, so that totals fit into 64-bit integers."""


ENGINE = "autograd::engine::evaluate_function: "
"""Prefix that torch's autograd engine adds to the name of a backward function that it evaluates."""


@dataclass(frozen=True)
class CallTree:
    """A tree of N nodes as columns of N entries; the first node is the root, and every node comes after its parent."""

    names: list[str]
    """Names of nodes: `file<TAB>qualified name` for Python functions, `library<TAB>name` for native functions."""
    parent: Integers
    """Index of the parent node; -1 for the root."""
    kind: Integers
    name: Integers
    """Index into `names`."""
    line: Integers
    """Line of a Python node, from 1; 0 if unknown."""
    link: Integers
    """For a LINK node, the node whose gradient is computed below it; otherwise -1."""
    count: Integers
    own: Integers
    least: Integers
    most: Integers
    bytes: Integers
    """Bytes of an operator's tensor arguments, summed over its calls; 0 if unknown."""
    flops: Integers
    """Floating-point operations of matrix products, convolutions and attention, summed over calls; 0 if unknown."""
    device: Integers
    """Nanoseconds of a KERNEL node on the accelerator; 0 for other nodes."""
    idle: Integers
    """For a KERNEL node, nanoseconds in which the accelerator was idle directly before the kernel."""
    alone: Integers
    """For a KERNEL node that copies, nanoseconds in which no kernel ran at the same time."""
    graphed: Integers
    """Number of calls that recorded a function for the backward pass."""
    inputs: Integers
    """Index into `names`: the arguments of a call, such as `float32[8,64], float32[64,64]`; 0 if unknown."""
    variants: Integers
    """Lower bound of the number of distinct arguments that calls passed (by shape, type and layout); 0 if unknown."""
    squares: NDArray[np.float64]
    """Sum over calls of the squared inclusive time."""
    count_variance: NDArray[np.float64]
    """Variance of the estimate in `count`; 0 if every call was recorded."""
    own_variance: NDArray[np.float64]
    """Variance of the estimate in `own`: time in Python is always sampled, and operators are sampled if the share is
    below 1."""

    def __post_init__(self) -> None:
        size = len(self.parent)
        sizes = {name: len(getattr(self, name)) for name in (*COLUMNS, *FRACTIONS)}
        flat = all(getattr(self, name).ndim == 1 for name in sizes)
        if size == 0 or not flat or set(sizes.values()) != {size}:
            raise DataError(f"columns of a profile are empty or have different lengths, in nodes: {sizes}")
        before = np.arange(size)
        fits = self.parent[0] == -1 and bool((self.parent[1:] >= 0).all() and (self.parent[1:] < before[1:]).all())
        within = all(bool(((index >= 0) & (index < len(self.names))).all()) for index in (self.name, self.inputs))
        linked = bool((self.link >= -1).all() and (self.link < size).all())
        if not (fits and within and linked):
            raise DataError("nodes of a profile refer to parents, links or names that do not exist")

    def check_values(self) -> None:
        """Raise an error for values that no recording produces, but that a damaged file may contain.

        Raises:
            DataError: a kind, number or link is invalid, or the tree is too large or too deep.
        """
        if len(self) > MOST_NODES or int(self.depth.max()) > DEEPEST:
            raise DataError(f"a profile of {len(self):,} nodes, {int(self.depth.max()):,} deep, exceeds the limits")
        kinds = bool(((self.kind >= 0) & (self.kind <= max(NodeKind))).all())
        targets = self.kind[np.maximum(self.link, 0)]
        linked = not bool(((self.link >= 0) & (targets == NodeKind.LINK)).any())
        whole = all(float(np.abs(getattr(self, name).astype(float)).sum()) <= LARGEST_SUM for name in _SUMS)
        counted = all(bool((getattr(self, name) >= 0).all()) for name in ("count", "line", "variants"))
        finite = all(bool(np.isfinite(getattr(self, name)).all()) for name in FRACTIONS)
        if not (kinds and linked and whole and counted and finite):
            raise DataError("a profile has kinds, links or numbers that no recording produces")

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def inclusive(self) -> Integers:
        """Total nanoseconds of each node and all nodes below it."""
        return totals(self.parent, self.own)

    @cached_property
    def depth(self) -> Integers:
        """Depth of each node: the number of nodes above it."""
        depth = np.zeros(len(self), np.int64)
        for node in range(1, len(self)):
            depth[node] = depth[self.parent[node]] + 1
        return depth

    def label(self, node: int) -> str:
        """The name of a node for display."""
        name = self.names[self.name[node]]
        if self.kind[node] == NodeKind.PYTHON:
            file, _, function = name.partition("\t")
            return f"{function} ({file.rsplit('/', 1)[-1]}:{self.line[node]})"
        if self.kind[node] == NodeKind.LINK:
            link = int(self.link[node])
            forward = link >= 0 and self.kind[link] != NodeKind.LINK
            return f"backward of {self.label(link)}" if forward else "backward"
        if self.kind[node] == NodeKind.NATIVE:
            library, _, function = name.partition("\t")
            return f"{function} ({library.rsplit('/', 1)[-1]})"
        name = name.removeprefix(ENGINE)
        return name or NodeKind(int(self.kind[node])).name.lower()

    def place(self, node: int) -> tuple[str, int]:
        """The file and line of a Python node."""
        return self.names[self.name[node]].partition("\t")[0], int(self.line[node])

    def nearest(self, wanted: NDArray[np.bool_]) -> Integers:
        """Map each node to the nearest node, at or above it, that the mask `wanted` selects; -1 if there is none.

        At a link, the search continues from the operator of the forward pass, so a backward function is mapped to the
        line that called its operator.
        """
        nearest = np.full(len(self), -1, np.int64)
        for node in range(len(self)):
            if wanted[node]:
                nearest[node] = node
            elif self.link[node] >= 0 and self.link[node] < node and nearest[self.link[node]] >= 0:
                nearest[node] = nearest[self.link[node]]
            elif node:
                nearest[node] = nearest[self.parent[node]]
        return nearest


def totals(parent: Integers, own: Integers) -> Integers:
    """Compute inclusive times from own times."""
    inclusive = own.copy()
    for node in range(len(parent) - 1, 0, -1):
        inclusive[parent[node]] += inclusive[node]
    return inclusive


_SUMS = ("count", "own", "bytes", "flops", "device", "idle", "alone", "graphed")
_FRESH: Mapping[str, float] = {"least": 2**62} | dict.fromkeys((*_SUMS, *FRACTIONS, "most", "variants", "inputs"), 0)


def both_ends(path: Sequence[T]) -> list[T | None]:
    """Shorten a deep stack of frames: None replaces the frames in the middle."""
    return list(path) if len(path) <= OUTER + INNER else [*path[:OUTER], None, *path[-INNER:]]


class TreeBuilder:
    """Builds a call tree in which equal call paths share a node."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {"": 0}
        self.nodes: dict[tuple[int, int, int, int, int], int] = {}
        self.rows: list[list[int]] = [[-1, 0, 0, 0, -1]]
        self.numbers: list[dict[str, float]] = [dict(_FRESH)]

    def text(self, name: str) -> int:
        """Return the index of a name, after adding the name if it is new."""
        return self.names.setdefault(name, len(self.names))

    def node(self, parent: int, kind: int, name: str, line: int = 0, link: int = -1) -> int:
        """Return the node with these properties below `parent`, after adding the node if it is new."""
        key = (parent, kind, self.text(name), line, link)
        if key not in self.nodes:
            self.nodes[key] = len(self.rows)
            self.rows.append([*key])
            self.numbers.append(dict(_FRESH))
        return self.nodes[key]

    def line(self, parent: int, frame: tuple[str, int] | None) -> int:
        """Return the node of a frame (`file<TAB>qualified name`, line), or of a gap (None), below `parent`."""
        if frame is None:
            return self.node(parent, NodeKind.OVERFLOWN, GAP)
        return self.node(parent, NodeKind.PYTHON, *frame)

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
        """Add calls to a node; `sums` are values to add to columns that sum over calls, such as `count` and `own`."""
        numbers = self.numbers[node]
        for name, value in sums.items():
            numbers[name] += value
        numbers["least"] = min(numbers["least"], least)
        numbers["most"] = max(numbers["most"], most)
        if variants > numbers["variants"]:  # not summed, because trees may have variants in common
            numbers["variants"], numbers["inputs"] = variants, self.text(inputs)

    def graft(self, tree: CallTree, onto: int = 0) -> list[int]:
        """Add the nodes of a tree below the node `onto`; return their new numbers, in the order of the added tree."""
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
        """Return the finished tree.

        Raises:
            DataError: a sum exceeds 64 bits.
        """
        rows = np.array(self.rows, np.int64)
        try:
            numbers: dict[str, Any] = {
                name: np.array([values[name] for values in self.numbers], float if name in FRACTIONS else np.int64)
                for name in _FRESH
            }
        except OverflowError as error:
            raise DataError("the sum of the times of these profiles exceeds 64 bits") from error
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
    """Remove the nodes of native functions from a tree, and add their time to the operators above them."""
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
    """Merge the trees of several ranks or runs into one."""
    builder = TreeBuilder()
    for tree in trees:
        builder.graft(tree)
    return builder.build()


def columns(tree: CallTree) -> Mapping[str, Any]:
    """Map the names of columns to the columns of a tree."""
    return {name: getattr(tree, name) for name in (*COLUMNS, *FRACTIONS)}
