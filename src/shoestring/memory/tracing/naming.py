"""Names every block of memory after the named tensor in the block, or else after the code that allocated the block."""

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
    """Whether a call has a tensor among its arguments."""
    return any(isinstance(argument, Tensor) for argument in arguments)


class Namer:
    """Names blocks by their allocation context, which the native observer recorded."""

    def __init__(self, modules: ModuleNames) -> None:
        self.modules = modules
        self.contexts = native_table.contexts()
        self.spelled = cache(native_table.spelled)

    def of_context(self, context: int, survived: bool, in_graph: bool = False) -> BlockName:
        """Name a block that contains no named tensor.

        Args:
            context: index of the allocation context in the native observer's table.
            survived: whether the block outlived the outermost operator that allocated it.
            in_graph: whether the outermost operator that allocated the block is part of autograd's graph.
        """
        phase, module, outer, inner, place, part = (int(number) for number in self.contexts[context])
        # the outermost operator, followed by the innermost operator in parentheses if the two differ
        outermost, innermost = (
            self.spelled(name).removeprefix("autograd::engine::evaluate_function: ") for name in (outer, inner)
        )
        operator = outermost if outermost == innermost or not innermost else f"{outermost} ({innermost})"
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


def short(place: str) -> str:
    """Shorten a place to FILE:LINE, with only the last folder of the path."""
    path, _, line = place.rpartition(":")
    return f"{'/'.join(path.split('/')[-2:])}:{line}"


def named(
    blocks: np.ndarray, begun: int, where: Sequence[Label], namer: Namer
) -> tuple[dict[str, np.ndarray], list[BlockName]]:
    """Name the blocks of a window; return the window's columns and list of names.

    A block that contains several named tensors is split into one block per tensor and one block for the remaining
    memory.

    Args:
        blocks: rows of the native observer's table of blocks.
        begun: start of the window in nanoseconds.
        where: labels of all named tensors.
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
    extra: list[tuple[int, int, int, int]] = []  # parts split off: index of the block, offset, bytes, index of the name
    for index, several in inside.items():
        total = int(columns["bytes"][index])
        if len(several) == 1 and several[0].nbytes > 0.9 * total:  # the tensor fills the block, apart from padding
            columns["name"][index] = names.setdefault(BlockName(several[0].kind, several[0].name), len(names))
            continue
        end = 0
        for label in sorted(several, key=lambda label: label.offset):
            start = max(label.offset, end)
            stop = min(label.offset + label.nbytes, total)
            if stop > start:
                number = names.setdefault(BlockName(label.kind, label.name), len(names))
                extra.append((index, start, stop - start, number))
                columns["bytes"][index] -= stop - start
                end = stop
    if extra:
        source, offset, size, of_name = (np.array(column, np.int64) for column in zip(*extra, strict=True))
        for key in columns:
            columns[key] = np.concatenate([columns[key], columns[key][source]])
        columns["address"][-len(extra) :] += offset
        columns["bytes"][-len(extra) :] = size
        columns["name"][-len(extra) :] = of_name
    return columns, list(names)
