"""Reading pickles without running them.

A pickle is a program for a stack machine, whose instructions import and call things. Here each of those leaves a note
of what it asks for, and nothing is imported or called; what to make of the notes is the reader's choice.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from reprlib import repr
from typing import Any

from shoestring.core.errors import CheckpointError

NODES = (
    1_000_000  # of the values of one checkpoint; a list that holds itself, or another one a million times, is refused
)
DEPTH = 100  # of what is nested
INSTRUCTIONS = 8_000_000
"""Of one pickle: each may make an object. The description of some 75,000 tensors, or 400,000 pieces, has as many."""


@dataclass(frozen=True)
class Name:
    """Something that the pickle would import."""

    name: str
    """package.module.name"""


@dataclass(eq=False)
class Call:
    """Something that the pickle would call, and the state that it would then give to what came of it."""

    target: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class Outside:
    """Something that lies beside the pickle; `key` says what."""

    key: Any


def inert(data: bytes, source: str) -> Any:
    """The value of a pickle, made of Python's own plain types and the notes above.

    Raises:
        CheckpointError: it is no pickle, or has instructions that plain data does not need.
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
    """A value of `inert` that is nothing but nested lists, tuples, mappings and scalars.

    Args:
        budget: has an item for each that it may still be made of; several values may share one.

    Raises:
        CheckpointError: it is not.
    """
    try:
        return _copied(value, iter(range(NODES)) if budget is None else budget, DEPTH)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"`{source}` is not plain data: {error}") from error


def spend(budget: Iterator[int]) -> None:
    """Take one item of a budget; ValueError where nothing is left of it."""
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
            return [_copied(each, budget, depth - 1) for each in value]
        case tuple():
            return tuple(_copied(each, budget, depth - 1) for each in value)
        case dict():
            return {_copied(key, budget, depth - 1): _copied(each, budget, depth - 1) for key, each in value.items()}
    raise ValueError(f"it holds {repr(value.target if isinstance(value, Call) else value)}")


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
        """One instruction."""
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
                _list(self.stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._pop(2) if code == "SETITEM" else self._to_mark()
                self._set(zip(items[::2], items[1::2], strict=True))
            case _:
                self._note(code, argument)

    def _note(self, code: str, argument: Any) -> None:
        """What an unpickler would import or call."""
        match code:
            case "GLOBAL":
                self.stack.append(Name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                module, name = self._pop(2)
                self.stack.append(Name(f"{module}.{name}"))
            case "REDUCE" | "NEWOBJ":
                target, arguments = self._pop(2)
                ordered = target.name == "collections.OrderedDict" and not arguments  # as good as any other mapping
                self.stack.append({} if ordered else Call(target.name, tuple(arguments)))
            case "BUILD":
                (state,) = self._pop(1)
                self.stack[-1].state = state
            case "BINPERSID":
                self.stack.append(Outside(self.stack.pop()))
            case _:
                raise ValueError(f"the instruction {code}")

    def _set(self, items: Iterator[tuple[Any, Any]]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise ValueError("items of what is no mapping")
        self.stack[-1].update(items)

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("it takes more than there is")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marked.pop()
        return items


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("more of what is no list")
    return value
