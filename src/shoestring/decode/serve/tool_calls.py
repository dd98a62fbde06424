"""Parses tool calls from the text that a model writes. The chat template determines the syntax of the calls. This
module does not import torch.

A call is reported only once it is complete, because text that turns out not to be a call is returned as text, and a
client cannot take back the beginning of a call. White space next to a call is dropped.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

from shoestring.decode.serve.fields import is_text

_LETTERS = string.ascii_letters + string.digits
_BRACKETS, _QUOTED = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_SPACE = re.compile(r"[ \t\r\n]*")
_HEAD = re.compile(r"([\w-]{1,64})(?:\[CALL_ID\]\w{0,64})?\[ARGS\]\s*(?=\{)", re.ASCII)
"""Matches what Mistral's newer models write before the arguments of a call."""
_HEAD_SO_FAR = re.compile(r"[\w-]{1,64}(?:\[[\w\[\]]{0,90}\s*)?", re.ASCII)
"""Matches text that may become a match of `_HEAD` with further characters."""


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """The arguments: JSON text of an object, as the model has written it."""
    id: str
    """Identifier of the call: nine letters and digits, as Mistral's templates demand."""
    index: int
    """Number of calls that precede this one in the same text."""


Content = str | ToolCall
"""A part of an answer: text, or a call."""


@dataclass(frozen=True, kw_only=True)
class Calling:
    """How an answer may call tools."""

    form: str
    """Syntax in which the model writes calls, a key of `FORMS`."""
    names: Sequence[str]
    """Names of the functions that may be called. A call of another function is text."""
    opening: str = ""
    """Text at the end of the prompt that begins a call, so that the answer must contain a call."""
    single: bool = False
    """Whether the answer ends after its first call."""


class CallParser:
    """Splits a growing text into text and calls. A call is a JSON object with a name and arguments.

    The parser is either outside or inside of calls. Outside, everything up to the next opening mark is text. Inside,
    every valid object is a call. Anything that is neither a call, nor a mark, nor a separator switches the parser to
    the outside; if no call came since the opening mark, everything since this mark is text as well.
    """

    opener: ClassVar[str] = ""
    """Mark that begins calls; empty if calls are found only at the beginning of the answer."""
    closer: ClassVar[str] = ""
    """Mark that ends calls."""
    further_marks: ClassVar[tuple[str, ...]] = ()
    """Marks within calls."""
    separators: ClassVar[str] = ""
    """Characters that may surround a call, besides white space."""
    starts_inside: ClassVar[bool] = False
    """Whether an answer may begin with a call without the opening mark."""
    key: ClassVar[str] = "arguments"
    """Key of the arguments that the model was trained to write; calls with other usual keys are accepted too."""

    def __init__(self, calling: Calling) -> None:
        self.calls = 0
        """Number of calls so far."""
        self.finished = False
        """Whether the answer is over, because it may contain only one call and this call is complete."""
        self._names, self._single = frozenset(calling.names), calling.single
        self._text = ""  # text that was received but not yet reported
        self._at = 0  # inside: number of characters at the start of `_text` that were read as marks and separators
        self._inside = self.starts_inside
        self._called = False  # whether `_text` follows a call
        self._object = _ObjectEnd()
        self.add(calling.opening)

    @classmethod
    def opening(cls, template: str, name: str | None) -> str:
        """The text that begins a call; it ends at a token boundary.

        Args:
            template: source of the chat template.
            name: the function to be called; None leaves the choice to the model.
        """
        return '{"name": "' + ("" if name is None else f'{name}", "{cls.key}":')

    @classmethod
    def marks(cls) -> list[str]:
        """The marks, which the parser must receive as text even if they are special tokens."""
        return [mark for mark in (cls.opener, cls.closer, *cls.further_marks) if mark]

    def add(self, text: str) -> list[Content]:
        """Add text, and return the text and calls that are certain now; must not be called once `finished`."""
        self._text += text
        parts: list[Content] = []
        while not self.finished and (self._read_inside(parts) if self._inside else self._read_outside(parts)):
            pass
        return parts

    def end(self) -> list[Content]:
        """End the text, and return what is left of it, including the beginning of a call that was not completed."""
        rest = self._text
        if self._called and self._inside:
            rest = "" if self.closer.startswith(rest[self._at :]) else rest[self._at :]
        elif self._called:
            rest = rest.lstrip()
        self._text = ""
        return [rest] if rest and not self.finished else []

    def _read_outside(self, parts: list[Content]) -> bool:
        """Report the text before the next opening mark; returns whether there is one."""
        if self._called:
            self._text = self._text.lstrip()
            self._called = not self._text
        if not self.opener:
            self._report(len(self._text), parts)
            return False
        place = self._text.find(self.opener)
        undecided = 0
        if place < 0:  # the last characters of the text may begin the opener
            lengths = range(min(len(self._text), len(self.opener) - 1), 0, -1)
            undecided = next((length for length in lengths if self._text.endswith(self.opener[:length])), 0)
        end = place if place >= 0 else len(self._text) - undecided
        space = end - len(self._text[:end].rstrip())
        self._report(end - space, parts)
        if place < 0:
            return False
        self._inside, self._at = True, space + len(self.opener)
        return True

    def _read_inside(self, parts: list[Content]) -> bool:
        """Read one mark, separator or call, or switch to the outside; returns False if this needs more text."""
        if not self._object.begun:
            rest = self._text[self._at :].lstrip()
            self._at = len(self._text) - len(rest)
            marks = filter(None, (self.opener, self.closer if self._called else ""))
            mark = next((mark for mark in marks if rest.startswith(mark) or mark.startswith(rest)), None)
            if not rest or (mark is not None and len(rest) < len(mark)):
                return False
            if mark is not None and mark == self.closer:
                self._text, self._at, self._inside = self._text[self._at + len(mark) :], 0, False
                return True
            if mark is not None:
                self._pass(len(mark))
                return True
            if rest[0] in self.separators:
                self._at += 1
                return True
            if rest[0] != "{":
                length = self._read_head(rest)
                if length == 0:
                    self._leave(self._at, parts)
                elif length is not None:
                    self._pass(length)
                return length is not None
        end = self._object.find(self._text, self._at)
        if end is None:
            return False
        call = self._parse(self._text[self._at : end])
        self._object = _ObjectEnd()
        if call is None:
            self._leave(end, parts)
            return True
        name, arguments = call
        number = "".join(secrets.choice(_LETTERS) for _ in range(9))
        parts.append(ToolCall(name, arguments, number, self.calls))
        self._text, self._at, self._called = self._text[end:], 0, True
        self.calls += 1
        self.finished = self._single
        return True

    def _pass(self, length: int) -> None:
        """Read `length` characters that begin a call; they become text if no call follows."""
        if self._called:
            self._text, self._at, self._called = self._text[self._at :], 0, False
        self._at += length

    def _read_head(self, rest: str) -> int | None:
        """Read text that may precede the object of a call; returns its length, 0 if no call begins here, or None if
        more text is needed to decide."""
        return 0

    def _leave(self, end: int, parts: list[Content]) -> None:
        """Report the text since the last call, up to `end`, and switch to the outside."""
        if self._called:
            self._text, end = self._text[self._at :], end - self._at
        self._called = self._called and not end
        self._report(end, parts)
        self._inside, self._at = False, 0

    def _report(self, end: int, parts: list[Content]) -> None:
        if end:
            parts.append(self._text[:end])
            self._text = self._text[end:]

    def _parse(self, text: str) -> tuple[str, str] | None:
        """The name and the arguments of a call; None if the object is not a valid call."""
        try:
            members = _members(text)
            if "function" in members and "name" not in members:
                members = _members(members["function"][1])
            value, arguments = members["arguments" if "arguments" in members else "parameters"]
            if isinstance(value, str):  # some models write the arguments as a string of JSON
                value, arguments = _decode(value), value
            name = members["name"][0]
        except (ValueError, LookupError, RecursionError):
            return None
        known = isinstance(name, str) and name in self._names
        return (name, arguments) if known and isinstance(value, dict) and is_text(arguments) else None


class PlainJson(CallParser):
    """Calls at the beginning of the answer: one object, several objects, or an array of objects."""

    starts_inside = True
    separators = ",;[]"


class Hermes(CallParser):
    """Calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    opener, closer = "<tool_call>", "</tool_call>"

    @classmethod
    def opening(cls, template: str, name: str | None) -> str:
        return "<tool_call>\n" + super().opening(template, name)


class Llama(PlainJson):
    """Calls as Llama 3 writes them: `{"name": …, "parameters": {…}}` at the beginning of the answer, or anywhere after
    `<|python_tag|>`; several calls are separated by semicolons."""

    opener, key = "<|python_tag|>", "parameters"


class Mistral(CallParser):
    """Calls as Mistral's models write them: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or
    `[TOOL_CALLS]name[ARGS]{…}` in newer models."""

    opener = "[TOOL_CALLS]"
    further_marks = ("[ARGS]", "[CALL_ID]")
    separators = ",[]"
    _named: str | None = None

    @classmethod
    def opening(cls, template: str, name: str | None) -> str:
        if "[ARGS]" in template:
            return cls.opener + ("" if name is None else f"{name}[ARGS]")
        space = " " if "[TOOL_CALLS] " in template else ""
        return f"{cls.opener}{space}[{super().opening(template, name)}"

    def _read_head(self, rest: str) -> int | None:
        match = _HEAD.match(rest)
        if match is not None and match[1] in self._names:
            self._named = match[1]
            return match.end()
        return None if match is None and _HEAD_SO_FAR.fullmatch(rest) else 0

    def _parse(self, text: str) -> tuple[str, str] | None:
        if self._named is None:
            return super()._parse(text)
        name, self._named = self._named, None
        try:
            _members(text)
        except (ValueError, LookupError, RecursionError):
            return None
        return name, text


FORMS: dict[str, type[CallParser]] = {"hermes": Hermes, "mistral": Mistral, "llama": Llama, "json": PlainJson}
"""Parsers by the name of the call syntax."""


def find_form(template: str) -> str:
    """The call syntax, a key of `FORMS`, of a model with this chat template."""
    marked = (name for name, parser in FORMS.items() if parser.opener and parser.opener in template)
    return next(marked, "json")


class _ObjectEnd:
    """Finds the end of a JSON object in growing text; examines every character only once."""

    def __init__(self) -> None:
        self.begun = False
        self._at, self._depth, self._quoted = 0, 0, False

    def find(self, text: str, start: int) -> int | None:
        """The index after the object that begins at `start`; None if the object is not complete."""
        at, self.begun = self._at if self.begun else start, True
        while (match := (_QUOTED if self._quoted else _BRACKETS).search(text, at)) is not None:
            at = match.end()
            if match[0] == "\\":
                if at == len(text):
                    self._at = at - 1
                    return None
                at += 1
            elif match[0] == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    return at
        self._at = len(text)
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_decode = _DECODER.decode


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object by key, each as its value and its JSON text.

    Raises:
        ValueError, LookupError, RecursionError: the text is not a JSON object.
    """
    if not isinstance(_decode(text), dict):  # also checks the syntax, which the code below relies on
        raise ValueError("not an object")
    members: dict[str, tuple[Any, str]] = {}
    at = _skip_space(text, _skip_space(text, 0) + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, _skip_space(text, at))
        start = _skip_space(text, _skip_space(text, at) + 1)
        value, end = _DECODER.raw_decode(text, start)
        members[key] = (value, text[start:end])
        at = _skip_space(text, end)
        at += text[at] == ","
    return members


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
