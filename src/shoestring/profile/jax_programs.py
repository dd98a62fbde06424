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
_OPCODE = re.compile(r"[\])}] ([a-z][\w\-]*)\(([^()]*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"(?:[^}]*?stack_frame_id=(\d+))?')
_CALLS = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_JITTED = re.compile(r"\bp?jit\(([^()]*)\)")

_FARTHEST = 64  # instructions that are looked at for one that says nothing

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
    operands: list[str]
    parameter: int
    """Which one of its computation's, of a parameter; otherwise -1."""


@dataclass
class _Module:
    """Instructions by name, with what uses them, in the computations that they are in."""

    raw: dict[str, _Raw] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)
    users: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Names of users, and as which operand."""

    def add(self, line: str, computation: str) -> None:
        found = _INSTRUCTION.match(line)
        if found is None:
            return
        metadata, opcode, calls = _METADATA.search(line), _OPCODE.search(line), _CALLS.search(line)
        kind, arguments = (opcode[1], opcode[2]) if opcode else ("", "")
        operands = _OPERAND.findall(arguments)
        self.raw[found[2]] = _Raw(
            kind,
            metadata[1] if metadata else "",
            int(metadata[2] or 0) if metadata else 0,
            calls[1] if calls else "",
            operands,
            int(arguments) if kind == "parameter" and arguments.isdigit() else -1,
        )
        self.members.setdefault(computation, []).append(found[2])
        for position, operand in enumerate(operands):
            self.users.setdefault(operand, []).append((found[2], position))

    def origin(self, name: str) -> _Raw:
        """The instruction that says where this one comes from: itself, or if it does not say, the nearest that does.

        XLA's own instructions say nothing: what is inside of them counts, then what uses their result, which they
        prepare, then what they were made of.
        """
        for nearer in (self._users_of, self._operands_of):
            waiting, seen = [name], {name}
            while waiting and len(seen) < _FARTHEST:
                found = waiting.pop(0)
                if self.raw[found].frame:
                    return self.raw[found]
                if inside := self._inside(found):
                    return inside
                new = [each for each in nearer(found) if each not in seen]
                seen.update(new)
                waiting += new
        return self.raw[name]

    def _inside(self, name: str) -> _Raw | None:
        members = self.members.get(self.raw[name].calls, ()) if self.raw[name].opcode == "fusion" else ()
        return next((self.raw[each] for each in reversed(members) if self.raw[each].frame), None)

    def _users_of(self, name: str) -> list[str]:
        """What uses a result; of fusions, what uses it in there."""
        found = []
        for user, position in self.users.get(name, ()):
            members = self.members.get(self.raw[user].calls, ()) if self.raw[user].opcode == "fusion" else ()
            within = [each for each in members if self.raw[each].parameter == position]
            found += [*(inner for each in within for inner, _ in self.users.get(each, ())), user]
        return found

    def _operands_of(self, name: str) -> list[str]:
        return [each for each in self.raw[name].operands if each in self.raw]


def parse_program(text: str) -> CompiledProgram:
    """The operations of a module, from the text that XLA prints of it."""
    lines = text.split("\n")
    name = re.match(r"HloModule ([^\s,]+)", lines[0])
    program = CompiledProgram(name[1] if name else "")
    tables, start = _tables(lines)
    module, computation = _Module(), ""
    for line in lines[start:]:
        if line.startswith(" "):
            module.add(line, computation)
        elif found := _COMPUTATION.match(line):
            computation = found[1]
    frames = _frames(tables)
    for instruction, own in module.raw.items():
        program.operations[instruction] = _operation(own, module.origin(instruction), frames)
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


def _operation(own: _Raw, origin: _Raw, stacks: Mapping[int, Frames]) -> Operation:
    path = (origin.path or own.path).partition(";")[0]
    name = path.rpartition("/")[2]
    if (origin is not own and own.opcode != "fusion") or not name or name.endswith((")", "]")):
        name = own.opcode or "unknown"
    frames = stacks.get(origin.frame, ())
    return Operation(name, frames, _boundary(frames, path), "transpose(" in path)


def _boundary(frames: Frames, path: str) -> int:
    """The first frame of a function that the path says is jitted; the outermost such function counts."""
    for name in _JITTED.findall(path)[:1]:
        for depth, (place, _) in enumerate(frames):
            if place.rpartition("\t")[2].rpartition(".")[2] == name:
                return depth
    return -1
