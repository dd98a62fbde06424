"""Parses pickles without running their instructions.

A pickle is a program for a stack machine, with instructions that import objects and call functions. This parser imports
and calls nothing. For these instructions, the parser only creates placeholders (`Name`, `Call`, `Outside`), which
describe the import or call. The caller interprets the placeholders.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from reprlib import repr
from typing import Any

from shoestring.core.errors import CheckpointError

NODES = 1_000_000
"""Maximum number of values in a checkpoint. The limit prevents endless copying of a list that contains itself."""
DEPTH = 100
"""Maximum nesting depth of values."""
INSTRUCTIONS = 8_000_000
"""Maximum number of instructions in a pickle, each of which may create an object; enough for about 75,000 tensors or
400,000 pieces."""


@dataclass(frozen=True)
class Name:
    """Placeholder for an object that unpickling would import."""

    name: str
    """Qualified name of the object: package.module.name."""


@dataclass(eq=False)
class Call:
    """Placeholder for the result of a call that unpickling would make, and the state that unpickling would set on the
    result."""

    target: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class Outside:
    """Placeholder for a reference to data outside the pickle (a persistent id), such as a tensor's storage."""

    key: Any


def inert(data: bytes, source: str) -> Any:
    """Parse a pickle to a value that consists of plain Python types and the placeholders above.

    Raises:
        CheckpointError: the data is not a pickle, or has instructions that plain data and tensors do not need.
    """
    machine = _Machine()
    try:
        for count, (code, argument, _) in enumerate(pickletools.genops(data)):
            if count == INSTRUCTIONS:
                raise ValueError(f"it has more than {INSTRUCTIONS:,} instructions")
            machine.do(code.name, argument)
        (value,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"`{source}` is damaged, or not what torch writes: {error}") from error
    return value


def plain(value: Any, source: str, budget: Iterator[int] | None = None) -> Any:
    """Copy a value returned by `inert`, and check that it consists only of nested lists, tuples, mappings and scalars.

    Args:
        budget: iterator whose length limits the number of objects in the value; several values may share the iterator.

    Raises:
        CheckpointError: the value contains anything else, or is too large.
    """
    try:
        return _copied(value, iter(range(NODES)) if budget is None else budget, DEPTH)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"`{source}` is not plain data: {error}") from error


def spend(budget: Iterator[int]) -> None:
    """Take one item from a budget; raises ValueError if the budget is exhausted."""
    if next(budget, None) is None:
        raise ValueError("it is too large")


def _copied(value: Any, budget: Iterator[int], depth: int) -> Any:
    spend(budget)
    if not depth:
        raise ValueError(f"it is nested more than {DEPTH} deep")
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_copied(item, budget, depth - 1) for item in value]
        case tuple():
            return tuple(_copied(item, budget, depth - 1) for item in value)
        case dict():
            return {_copied(key, budget, depth - 1): _copied(item, budget, depth - 1) for key, item in value.items()}
    raise ValueError(f"it contains {repr(value.target if isinstance(value, Call) else value)}")


_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_FIXED = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass
class _Machine:
    stack: list[Any] = field(default_factory=list)
    marked: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def do(self, code: str, argument: Any) -> None:
        """Execute one instruction of the pickle."""
        if code in _LITERALS:
            self.stack.append(argument)
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in _FIXED:
            self.stack.append(tuple(self._pop(_FIXED[code])))
        elif code in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self.memo[len(self.memo) if code == "MEMOIZE" else argument] = self.stack[-1]
        elif code in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[argument])
        elif code not in ("PROTO", "FRAME", "STOP"):
            self._build(code, argument)

    def _build(self, code: str, argument: Any) -> None:
        """Execute an instruction that builds a list, tuple or mapping."""
        match code:
            case "MARK":
                self.marked.append(self.stack)
                self.stack = []
            case "EMPTY_LIST" | "EMPTY_DICT":
                self.stack.append([] if code == "EMPTY_LIST" else {})
            case "TUPLE" | "LIST":
                items = self._to_mark()
                self.stack.append(tuple(items) if code == "TUPLE" else items)
            case "APPEND" | "APPENDS":
                items = self._pop(1) if code == "APPEND" else self._to_mark()
                if not isinstance(self.stack[-1], list):
                    raise ValueError("items appended to something that is not a list")
                self.stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._pop(2) if code == "SETITEM" else self._to_mark()
                if not isinstance(self.stack[-1], dict):
                    raise ValueError("items set in something that is not a mapping")
                self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case _:
                self._note(code, argument)

    def _note(self, code: str, argument: Any) -> None:
        """Create the placeholder for an instruction that would make an unpickler import or call something."""
        match code:
            case "GLOBAL":
                self.stack.append(Name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                module, name = self._pop(2)
                self.stack.append(Name(f"{module}.{name}"))
            case "REDUCE" | "NEWOBJ":
                target, arguments = self._pop(2)
                ordered = target.name == "collections.OrderedDict" and not arguments  # this is a plain mapping
                self.stack.append({} if ordered else Call(target.name, tuple(arguments)))
            case "BUILD":
                (state,) = self._pop(1)
                self.stack[-1].state = state
            case "BINPERSID":
                self.stack.append(Outside(self.stack.pop()))
            case _:
                raise ValueError(f"it has the instruction {code}")

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("an instruction takes more values than the stack has")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _to_mark(self) -> list[Any]:
        """Pop all values that were pushed since the newest mark."""
        items, self.stack = self.stack, self.marked.pop()
        return items
