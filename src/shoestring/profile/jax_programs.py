"""Maps the instructions of a compiled XLA module to the program's lines, using tables in the module's text.

The text of a module has the tables FileNames, FunctionNames, FileLocations and StackFrames; an instruction names the
operation it came from and a frame: `metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=15}`.
The frames are the call path of the first call, which traced the function. `Operation.inside` is the index of the
function's own frame; the frames before this index belong to the first call only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
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
"""Opcodes of instructions that compute nothing."""

_FARTHEST = 64  # maximum number of instructions visited in search of the origin of an instruction that has no frame

Frames = tuple[tuple[str, int], ...]
"""A call path, the outermost frame first; a frame is (`file<TAB>function`, line)."""


@dataclass(frozen=True)
class Operation:
    """The operation of the user's program that an instruction of a compiled module carries out."""

    name: str
    """Name of the operation in the program, such as `dot_general`; for an instruction that XLA added, its opcode, such
    as `copy`."""
    frames: Frames
    """Call path to the operation in the call that traced it; empty if the module does not contain the path."""
    inside: int
    """Number of frames in `frames` that are outside the jitted function; -1 if the function is not in `frames`."""
    backward: bool
    """Whether the operation belongs to the backward pass of the code in `frames`."""


@dataclass
class CompiledProgram:
    """The operations of a compiled module, by instruction name."""

    name: str
    operations: dict[str, Operation] = field(default_factory=dict)


@dataclass
class _Raw:
    """An instruction, as parsed from the line of the module's text that defines it."""

    opcode: str
    path: str
    frame: int
    calls: str
    operands: list[str]


class _Module:
    """The text of a module; its computations and instructions are parsed when first requested."""

    def __init__(self, text: str) -> None:
        self.text = text
        heads = list(_COMPUTATION.finditer(text))
        ends = [*(head.start() for head in heads[1:]), len(text)] if heads else []
        self.blocks = {head[1]: (head.end(), end) for head, end in zip(heads, ends, strict=True)}
        """Start and end offset of each computation's lines in the text."""
        self.lines: dict[str, str] = {}
        self.within: dict[str, str] = {}
        """Maps an instruction to the computation that contains it."""
        self._members: dict[str, list[str]] = {}
        self._raw: dict[str, _Raw] = {}
        self._mentions: dict[str, dict[str, list[str]]] = {}
        """Maps a computation's name and an instruction's name to the instructions whose lines mention the
        instruction."""

    def members(self, computation: str) -> list[str]:
        """The instructions of a computation, in order."""
        if computation not in self._members:
            start, end = self.blocks.get(computation, (0, 0))
            lines = {match[1]: match[0] for match in _INSTRUCTION.finditer(self.text, start, end)}
            self.lines |= lines
            self.within |= dict.fromkeys(lines, computation)
            self._members[computation] = list(lines)
        return self._members[computation]

    def computation(self, instruction: str) -> str:
        """The computation that contains an instruction; empty if there is no such instruction."""
        if match := re.search(rf"^ +(?:ROOT )?%?{re.escape(instruction)} = ", self.text, re.MULTILINE):
            return next(name for name, (start, end) in self.blocks.items() if start <= match.start() < end)
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
        """Instructions of the same computation that have `name` as an operand, each with the operand's index."""
        computation = self.within.get(name, "")
        if computation not in self._mentions:
            mentions = self._mentions[computation] = {}
            for member in self.members(computation):
                for operand in _OPERAND.findall(self.lines[member]):
                    mentions.setdefault(operand, []).append(member)
        users = dict.fromkeys(self._mentions[computation].get(name, ()))
        return [(user, n) for user in users for n, operand in enumerate(self.raw(user).operands) if operand == name]

    def origin(self, name: str) -> _Raw:
        """Find the origin of `name`: the nearest instruction with a frame, or `name` itself if there is none.

        Instructions that XLA adds have no frame. The breadth-first search first follows the users of the result,
        because an added instruction usually prepares its result for its users; then the search follows the operands. In
        a fusion, the last inner instruction with a frame counts.
        """

        def operands_of(name: str) -> list[str]:
            return [operand for operand in self.raw(name).operands if operand in self.lines]

        for neighbours in (self._users_of, operands_of):
            waiting, seen = [name], {name}
            while waiting and len(seen) < _FARTHEST:
                nearest = waiting.pop(0)
                if self.raw(nearest).frame:
                    return self.raw(nearest)
                for inner in reversed(self._fused(nearest)):
                    if "stack_frame_id=" in self.lines[inner]:
                        return self.raw(inner)
                new = [neighbour for neighbour in neighbours(nearest) if neighbour not in seen]
                seen.update(new)
                waiting += new
        return self.raw(name)

    def _fused(self, name: str) -> list[str]:
        """The inner instructions of a fusion; an empty list for other instructions."""
        own = self.raw(name)
        return self.members(own.calls) if own.opcode == "fusion" else []

    def _users_of(self, name: str) -> list[str]:
        """Instructions that use the result of `name`; for a fusion, its inner users of the result, then the fusion."""
        users = []
        for user, position in self.users(name):
            parameters = [inner for inner in self._fused(user) if f" parameter({position})" in self.lines[inner]]
            users += [*(inner for parameter in parameters for inner, _ in self.users(parameter)), user]
        return users


def parse_program(text: str, ran: Collection[str] = ()) -> CompiledProgram:
    """Parse the operations of a module from its text.

    Args:
        ran: names of instructions that ran. Only the computations that contain these instructions are parsed, because
            most computations of a large module are the bodies of fusions. If `ran` is empty, all computations are
            parsed.
    """
    head = re.match(r"HloModule ([^\s,]+)", text)
    program = CompiledProgram(head[1] if head else "")
    module, frames = _Module(text), _frames(text)
    missing, read = set(ran), [] if ran else list(module.blocks)
    while missing:
        computation = module.computation(missing.pop())
        missing.difference_update(module.members(computation))
        read.append(computation)
    for instruction in (member for computation in read for member in module.members(computation)):
        own = module.raw(instruction)
        if own.opcode not in _NOTHING or instruction in ran:
            origin = module.origin(instruction)
            path, stack = (origin.path or own.path).partition(";")[0], frames.get(origin.frame, ())
            name = path.rpartition("/")[2]
            if (origin is not own and own.opcode != "fusion") or not name or name.endswith((")", "]")):
                name = own.opcode or "unknown"
            jitted = _JITTED.findall(path)[:1]  # the outermost jitted function
            functions = (place.rpartition("\t")[2].rpartition(".")[2] for place, _ in stack)
            inside = next((depth for depth, function in enumerate(functions) if function in jitted), -1)
            program.operations[instruction] = Operation(name, stack, inside, "transpose(" in path)
    return program


def _frames(text: str) -> dict[int, Frames]:
    """Map a frame's number to its call path; number 0, which means "no frame", has an empty path."""
    tables = {
        head[1]: text[head.end() + 1 : text.find("\n\n", head.end())].split("\n") for head in _TABLE.finditer(text)
    }

    def named(table: str) -> dict[int, str]:
        rows = (_NAMED.match(line) for line in tables.get(table, ()))
        return {int(row[1]): row[2] for row in rows if row}

    files, functions = named("FileNames"), named("FunctionNames")
    locations = {
        int(row[1]): (f"{files.get(int(row[2]), '')}\t{functions.get(int(row[3]), '')}", int(row[4]))
        for row in map(_LOCATION.match, tables.get("FileLocations", ()))
        if row
    }
    stacks: dict[int, Frames] = {0: ()}
    for row in map(_FRAME.match, tables.get("StackFrames", ())):
        if row:
            # `parent_frame_id` is the parent's number plus one
            number, location, parent = int(row[1]), int(row[2]), int(row[3] or 1) - 1
            stacks[number] = (*stacks.get(parent, ()), *((locations[location],) if location in locations else ()))
    return stacks
