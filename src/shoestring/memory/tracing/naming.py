"""Gives every block its name: of the tensor that lies there, or else of what allocated it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from shoestring.memory.tracing import native_table
from shoestring.memory.tracing.labels import Label, ModuleNames
from shoestring.memory.tracing.native_table import ALIVE, IN_GRAPH, SURVIVED, Activity, CodePart
from shoestring.memory.tracing.recording import BlockName


def is_inside(arguments: Any) -> bool:
    """Whether there is a tensor among a call's arguments."""
    return any(isinstance(each, Tensor) for each in arguments)


class Namer:
    """Names of contexts, as the native observer numbers them."""

    def __init__(self, modules: ModuleNames) -> None:
        self.modules = modules
        self.contexts = native_table.contexts()
        self.spelled = cache(native_table.spelled)

    def of_context(self, context: int, survived: bool, in_graph: bool = False) -> BlockName:
        """What a block is that holds no tensor with a name.

        Args:
            survived: it outlived the outermost operator that made it.
            in_graph: that operator is differentiated.
        """
        phase, module, outer, inner, place, part = (int(each) for each in self.contexts[context])
        operator = self._operator(outer, inner)
        name = self.modules.names[module] if module < len(self.modules.names) else ""
        line = short(self.spelled(place)) if place else ""
        if part == CodePart.COMMUNICATION or module in self.modules.wires:
            return BlockName("communication buffer", name or line, operator)
        if part == CodePart.CHECKPOINT:
            return BlockName("checkpoint", line, operator)
        if phase == Activity.OPTIMIZER:
            return BlockName("temporary", "optimizer step", operator)
        if phase == Activity.BACKWARD:
            return BlockName("temporary", f"backward of {name or line or 'the loss'}", operator)
        if phase in (Activity.FORWARD, Activity.RECOMPUTED):
            again = "recomputed: " if phase == Activity.RECOMPUTED else ""
            return BlockName("activation" if survived else "temporary", again + name, operator)
        if not (operator or line):
            return BlockName("unnamed", "allocated before recording began" if phase == Activity.BEFORE else "")
        if in_graph:
            return BlockName("activation", line, operator)
        return BlockName("other" if survived else "temporary", line, operator)

    def _operator(self, outer: int, inner: int) -> str:
        one, other = (
            self.spelled(each).removeprefix("autograd::engine::evaluate_function: ") for each in (outer, inner)
        )
        return one if one == other or not other else f"{one} ({other})"


def short(place: str) -> str:
    """A line of a file, without the folders that say little: those above the last package."""
    path, _, line = place.rpartition(":")
    return f"{'/'.join(path.split('/')[-2:])}:{line}"


def named(
    blocks: np.ndarray, begun: int, where: Sequence[Label], namer: Namer
) -> tuple[dict[str, np.ndarray], list[BlockName]]:
    """The columns of a window, which began at `begun`, and its names.

    A block in which several tensors have names is one block for each of them, and one for what lies between.
    """
    contexts, place = np.unique(
        np.stack([blocks["context"], blocks["flags"] & (SURVIVED | IN_GRAPH)]), axis=1, return_inverse=True
    )
    names: dict[BlockName, int] = {}
    of_context = np.array(
        [
            names.setdefault(namer.of_context(int(context), bool(flags & SURVIVED), bool(flags & IN_GRAPH)), len(names))
            for context, flags in contexts.T
        ],
        np.int64,
    )
    name = of_context[place.reshape(-1)] if len(blocks) else np.zeros(0, np.int64)
    columns = {key: blocks[key].astype(np.int64) for key in ("born", "died", "born_at", "died_at", "address", "bytes")}
    columns["name"] = name
    alive = blocks["died"] == ALIVE
    columns["died"][alive] = columns["died_at"][alive] = -1
    columns["born_at"] = np.maximum(columns["born_at"] - begun, 0)
    columns["died_at"][~alive] -= begun
    at = dict(zip(blocks["address"][alive].tolist(), np.flatnonzero(alive).tolist(), strict=True))
    inside: dict[int, list[Label]] = {}
    for label in where:
        if (index := at.get(label.address)) is not None:
            inside.setdefault(index, []).append(label)
    extra: list[tuple[int, int, int, int]] = []
    for index, several in inside.items():
        _split(columns, index, sorted(several, key=lambda label: label.offset), names, extra)
    if extra:
        source, offset, size, number = (np.array(each, np.int64) for each in zip(*extra, strict=True))
        for key in columns:
            columns[key] = np.concatenate([columns[key], columns[key][source]])
        columns["address"][-len(extra) :] += offset
        columns["bytes"][-len(extra) :] = size
        columns["name"][-len(extra) :] = number
    return columns, list(names)


def _split(
    columns: dict[str, np.ndarray],
    index: int,
    inside: Sequence[Label],
    names: dict[BlockName, int],
    extra: list[tuple[int, int, int, int]],
) -> None:
    """Take what has a name out of a block; a block that one tensor fills, but for padding, is that tensor."""
    total = int(columns["bytes"][index])
    if len(inside) == 1 and inside[0].nbytes > 0.9 * total:
        columns["name"][index] = names.setdefault(BlockName(inside[0].kind, inside[0].name), len(names))
        return
    end = 0
    for label in inside:
        start = max(label.offset, end)
        stop = min(label.offset + label.nbytes, total)
        if stop > start:
            extra.append((index, start, stop - start, names.setdefault(BlockName(label.kind, label.name), len(names))))
            columns["bytes"][index] -= stop - start
            end = stop
