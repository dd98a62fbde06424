"""What XLA compiled, by the program's lines: the tables that a compiled module carries in its text.

The text of a module has the tables FileNames, FunctionNames, FileLocations and StackFrames; an instruction names the
operation it came from and a frame: `metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=15}`.
Frames are those of whoever had the function traced first, so what is above the function itself is cut off here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$", re.MULTILINE)
_NAMED = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.<>\-]+) (?:\(.*)?(?:->.*)?\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = .*", re.MULTILINE)
_OPCODE = re.compile(r"[\])}] ([a-z][\w\-]*)\(([^()]*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"(?:[^}]*?stack_frame_id=(\d+))?')
_CALLS = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_JITTED = re.compile(r"\bp?jit\(([^()]*)\)")

_NOTHING = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})
"""Opcodes of instructions that only say where something is."""

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


class _Module:
    """Instructions by name, in the computations that they are in; their lines are read as far as somebody asks."""

    def __init__(self, text: str) -> None:
        self.text = text
        heads = list(_COMPUTATION.finditer(text))
        ends = [*(head.start() for head in heads[1:]), len(text)] if heads else []
        self.blocks = {head[1]: (head.end(), end) for head, end in zip(heads, ends, strict=True)}
        """Where the lines of each computation are."""
        self.lines: dict[str, str] = {}
        self.within: dict[str, str] = {}
        """The computation of each instruction."""
        self._members: dict[str, list[str]] = {}
        self._raw: dict[str, _Raw] = {}
        self._naming: dict[str, dict[str, list[str]]] = {}
        """By computation and name, the instructions whose lines have the name."""

    def members(self, computation: str) -> list[str]:
        """The instructions of a computation, in their order."""
        if computation not in self._members:
            start, end = self.blocks.get(computation, (0, 0))
            found = {each[1]: each[0] for each in _INSTRUCTION.finditer(self.text, start, end)}
            self.lines |= found
            self.within |= dict.fromkeys(found, computation)
            self._members[computation] = list(found)
        return self._members[computation]

    def computation(self, instruction: str) -> str:
        """The one that an instruction is in; empty if there is no such instruction."""
        if found := re.search(rf"^ +(?:ROOT )?%?{re.escape(instruction)} = ", self.text, re.MULTILINE):
            return next(name for name, (start, end) in self.blocks.items() if start <= found.start() < end)
        return ""

    def raw(self, name: str) -> _Raw:
        if name not in self._raw:
            line = self.lines[name]
            metadata, opcode, calls = _METADATA.search(line), _OPCODE.search(line), _CALLS.search(line)
            kind, arguments = (opcode[1], opcode[2]) if opcode else ("", "")
            self._raw[name] = _Raw(
                kind,
                metadata[1] if metadata else "",
                int(metadata[2] or 0) if metadata else 0,
                calls[1] if calls else "",
                _OPERAND.findall(arguments),
            )
        return self._raw[name]

    def users(self, name: str) -> list[tuple[str, int]]:
        """Instructions of the same computation that it is an operand of, and as which."""
        computation = self.within.get(name, "")
        if computation not in self._naming:
            naming = self._naming[computation] = {}
            for each in self.members(computation):
                for named in _OPERAND.findall(self.lines[each]):
                    naming.setdefault(named, []).append(each)
        users = dict.fromkeys(self._naming[computation].get(name, ()))
        return [(each, n) for each in users for n, operand in enumerate(self.raw(each).operands) if operand == name]

    def origin(self, name: str) -> _Raw:
        """The instruction that says where this one comes from: itself, or if it does not say, the nearest that does.

        XLA's own instructions say nothing: what is inside of them counts, then what uses their result, which they
        prepare, then what they were made of.
        """
        for nearer in (self._users_of, self._operands_of):
            waiting, seen = [name], {name}
            while waiting and len(seen) < _FARTHEST:
                found = waiting.pop(0)
                if self.raw(found).frame:
                    return self.raw(found)
                if inside := self._inside(found):
                    return inside
                new = [each for each in nearer(found) if each not in seen]
                seen.update(new)
                waiting += new
        return self.raw(name)

    def _fused(self, name: str) -> list[str]:
        """What is in a fusion; of other instructions nothing."""
        own = self.raw(name)
        return self.members(own.calls) if own.opcode == "fusion" else []

    def _inside(self, name: str) -> _Raw | None:
        telling = (each for each in reversed(self._fused(name)) if "stack_frame_id=" in self.lines[each])
        return next((self.raw(each) for each in telling), None)

    def _users_of(self, name: str) -> list[str]:
        """What uses a result; of fusions, what uses it in there."""
        found = []
        for user, position in self.users(name):
            within = [each for each in self._fused(user) if f" parameter({position})" in self.lines[each]]
            found += [*(inner for each in within for inner, _ in self.users(each)), user]
        return found

    def _operands_of(self, name: str) -> list[str]:
        return [each for each in self.raw(name).operands if each in self.lines]


def parse_program(text: str, ran: Collection[str] = ()) -> CompiledProgram:
    """The operations of a module, from the text that XLA prints of it.

    Args:
        ran: instructions that ran, in the same computations as all that may run. Others, which are most of a large
            module, are what fusions contain, and are not read; if none are named, all are.
    """
    name = re.match(r"HloModule ([^\s,]+)", text)
    program = CompiledProgram(name[1] if name else "")
    module, frames = _Module(text), _frames(_tables(text))
    missing, read = set(ran), [] if ran else list(module.blocks)
    while missing:
        computation = module.computation(missing.pop())
        missing.difference_update(module.members(computation))
        read.append(computation)
    for instruction in (each for computation in read for each in module.members(computation)):
        own = module.raw(instruction)
        if own.opcode not in _NOTHING or instruction in ran:
            program.operations[instruction] = _operation(own, module.origin(instruction), frames)
    return program


def _tables(text: str) -> dict[str, list[str]]:
    """The lines of each table."""
    found = _TABLE.finditer(text)
    return {each[1]: text[each.end() + 1 : text.find("\n\n", each.end())].split("\n") for each in found}


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
