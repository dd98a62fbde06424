"""What XLA compiled, by the program's lines: the tables that a compiled module carries in its text.

The text of a module has the tables FileNames, FunctionNames, FileLocations and StackFrames; an instruction names the
operation it came from and a frame: `metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=15}`.
Frames are those of whoever had the function traced first, so what is above the function itself is cut off here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_NAMED = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.<>\-]+) (?:\(.*)?(?:->.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"[\])}] ([a-z][\w\-]*)\(")
_METADATA = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"(?:[^}]*?stack_frame_id=(\d+))?')
_CALLS = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_JITTED = re.compile(r"\bp?jit\(([^()]*)\)")

Frames = tuple[tuple[str, int], ...]
"""From the outside in: file<TAB>function, and line."""


@dataclass(frozen=True)
class Operation:
    """What an instruction of a compiled module does."""

    name: str
    """Of the operation in the program, such as `dot_general`; of what XLA added, its own, such as `copy`."""
    frames: Frames
    """Lines from the caller that had it traced first to the operation; empty where the module does not say."""
    inside: int
    """How many of these frames are above the jitted function; -1 where it is not among them."""
    backward: bool
    """Whether it computes a gradient of what these lines do."""


@dataclass
class CompiledProgram:
    """The instructions of a compiled module by name."""

    name: str
    operations: dict[str, Operation] = field(default_factory=dict)


@dataclass
class _Raw:
    opcode: str
    path: str
    frame: int
    calls: str


def parse_program(text: str) -> CompiledProgram:
    """The operations of a module, from the text that XLA prints of it."""
    lines = text.split("\n")
    name = re.match(r"HloModule ([^\s,]+)", lines[0])
    program = CompiledProgram(name[1] if name else "")
    tables, start = _tables(lines)
    computations: dict[str, str] = {}
    raw: dict[str, _Raw] = {}
    computation = ""
    for line in lines[start:]:
        if not line.startswith(" "):
            found = _COMPUTATION.match(line)
            computation = found[1] if found else computation
            continue
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        metadata, opcode, calls = _METADATA.search(line), _OPCODE.search(line), _CALLS.search(line)
        raw[found[2]] = _Raw(
            opcode[1] if opcode else "",
            metadata[1] if metadata else "",
            int(metadata[2] or 0) if metadata else 0,
            calls[1] if calls else "",
        )
        if found[1]:
            computations[computation] = found[2]
    frames = _frames(tables)
    for instruction, each in raw.items():
        program.operations[instruction] = _operation(_described(each, raw, computations), frames)
    return program


def _tables(lines: Sequence[str]) -> tuple[dict[str, list[str]], int]:
    """The lines of each table, and where what follows them begins."""
    tables: dict[str, list[str]] = {}
    table, end = None, 1
    for number, line in enumerate(lines):
        if _TABLE.match(line):
            table = tables.setdefault(line, [])
        elif not line:
            table = None
        elif table is not None:
            table.append(line)
            end = number + 1
        elif tables:
            break
    return tables, end


def _frames(tables: Mapping[str, Sequence[str]]) -> dict[int, Frames]:
    """The stack of each frame. A frame's parent has the number that it names, less one; 0 is none."""

    def named(table: str) -> dict[int, str]:
        found = (_NAMED.match(line) for line in tables.get(table, ()))
        return {int(each[1]): each[2] for each in found if each}

    files, functions = named("FileNames"), named("FunctionNames")
    locations = {
        int(each[1]): (f"{files.get(int(each[2]), '')}\t{functions.get(int(each[3]), '')}", int(each[4]))
        for each in map(_LOCATION.match, tables.get("FileLocations", ()))
        if each
    }
    stacks: dict[int, Frames] = {0: ()}
    for each in map(_FRAME.match, tables.get("StackFrames", ())):
        if each:
            number, location, parent = int(each[1]), int(each[2]), int(each[3] or 1) - 1
            stacks[number] = (*stacks.get(parent, ()), *((locations[location],) if location in locations else ()))
    return stacks


def _described(each: _Raw, raw: Mapping[str, _Raw], roots: Mapping[str, str]) -> _Raw:
    """The instruction itself, or what it calls where it carries no line: a fusion's root."""
    seen = 0
    while not each.frame and each.calls in roots and seen < 8:
        inner = raw[roots[each.calls]]
        each = _Raw(each.opcode, inner.path or each.path, inner.frame, inner.calls)
        seen += 1
    return each


def _operation(each: _Raw, stacks: Mapping[int, Frames]) -> Operation:
    path = each.path.partition(";")[0]
    name = path.rpartition("/")[2]
    frames = stacks.get(each.frame, ())
    name = each.opcode or "unknown" if not name or name.endswith((")", "]")) else name
    return Operation(name, frames, _boundary(frames, path), "transpose(" in path)


def _boundary(frames: Frames, path: str) -> int:
    """The first frame of a function that the path says is jitted; the outermost such function counts."""
    for name in _JITTED.findall(path)[:1]:
        for depth, (place, _) in enumerate(frames):
            if place.rpartition("\t")[2].rpartition(".")[2] == name:
                return depth
    return -1
