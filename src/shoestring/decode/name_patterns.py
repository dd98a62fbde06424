"""Computes complements of regular expressions with finite automata; does not import torch.

As JSON Schema demands, a pattern matches a name if it is found anywhere in the name. Patterns have the same meaning as
in llguidance: `\\d` and `\\w` match only ASCII characters, `.` matches any character except a line feed, and `$`
matches only at the end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shoestring.core.errors import ConfigError
from shoestring.decode.schema_sets import count, refused

Ranges = tuple[tuple[int, int], ...]
"""A set of characters as sorted ranges; a range is the pair of its first and last code points."""
_LAST = 0x10FFFF
_STATES = 64
"""Largest number of states of a deterministic automaton."""
_PARTS = 1000
"""Largest number of parts in all patterns; a repeated part counts once for each repetition."""
_DEPTH = 20
"""Largest nesting depth of groups in a pattern."""
_CHARACTERS = 20_000
"""Largest length of the expression of a complement, in characters."""
_LENGTH = 128
"""Largest length, in characters, of a name that `other_names` excludes."""


def complement_of(patterns: Iterable[str]) -> str | None:
    """A regular expression for the names that match none of the patterns; None if every name matches one of them.

    The work is limited by `bounded`.

    Raises:
        ConfigError: a pattern has syntax that is not supported here, or the complement would be too long.
    """
    automaton = _Automaton()
    for pattern in patterns:
        automaton.add(_Reader(pattern).whole(), _FOUND)
    table, last = _deterministic(automaton, stop=_FOUND)
    return _expression(table, {state for state, states in enumerate(last) if _FOUND not in states})


def disjoint_patterns(patterns: Iterable[str]) -> bool:
    """Whether it is certain that every name matches at most one of the patterns; the work is limited by `bounded`."""
    automaton, matches = _Automaton(), set[int]()
    try:
        for pattern in patterns:
            matches.add(automaton.add_lasting(_Reader(pattern).whole()))
        _, last = _deterministic(automaton)
    except ConfigError:
        return False
    return all(len(matches & states) < 2 for states in last)


def exactly(name: str) -> str:
    """A regular expression that matches only this name."""
    return f"^{''.join(map(_one, name))}$"


def other_names(names: Iterable[str]) -> str:
    """A regular expression that matches all names except these.

    Raises:
        ConfigError: a name has more than `_LENGTH` characters.
    """
    tree: dict[str, Any] = {}
    for name in names:
        if len(name) > _LENGTH:
            raise _too_long()
        place = tree
        for character in name:
            place = place.setdefault(character, {})
        place[""] = True
    return f"^(?:{_other_than(tree)})$" if tree else ""


def _other_than(tree: Mapping[str, Any]) -> str:
    """The expression for all texts that are not names in a tree of characters; the key "" marks the end of a name."""
    following = {character: after for character, after in tree.items() if character}
    other = _class(_others_of(_ranges((ord(character), ord(character)) for character in following)))
    branches = [f"{other}[\\s\\S]*"]
    branches += [f"{_one(character)}{_other_than(after)}" for character, after in following.items()]
    return f"(?:{'|'.join(branches)}){'' if '' in tree else '?'}"


# -- sets of characters ------------------------------------------------------------------------------------------------


def _ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Merge ranges of code points into a sorted set of ranges that do not touch."""
    joined = list[tuple[int, int]]()
    for first, last in sorted(pairs):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


def _others_of(ranges: Ranges) -> Ranges:
    bounds = [-1, *(bound for pair in ranges for bound in pair), _LAST + 1]
    return tuple((low + 1, high - 1) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if high - low > 1)


_SINGLE = re.compile(r"\[[^\]]*\]|\\x..|[^\\]", re.DOTALL)
"""Matches expressions for a single character, as written by `_class`."""
_ANY: Ranges = ((0, _LAST),)
_DIGIT = _ranges([(48, 57)])
_WORD = _ranges([(48, 57), (65, 90), (95, 95), (97, 122)])
_SPACE = _ranges(
    (ord(first), ord(last))
    for first, last in ("\t\r", "  ", "\x85\x85", "\xa0\xa0", "\u1680\u1680", "\u2000\u200a", "\u2028\u2029",
                        "\u202f\u202f", "\u205f\u205f", "\u3000\u3000")
)  # fmt: skip
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): _others_of(ranges) for name, ranges in _CLASSES.items()}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}


def _class(ranges: Ranges) -> str:
    """The expression for any one character of a set."""
    if ranges == _ANY:
        return "[\\s\\S]"
    negated = ranges[-1][1] == _LAST
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not negated:
        return _character(ranges[0][0])
    parts = (
        _character(first) if first == last else f"{_character(first)}-{_character(last)}"
        for first, last in (_others_of(ranges) if negated else ranges)
    )
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _one(character: str) -> str:
    """The expression for this character."""
    return _class(((ord(character), ord(character)),))


def _character(code: int) -> str:
    return chr(code) if code > 255 or (code < 128 and chr(code).isalnum()) else f"\\x{code:02x}"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A part of a parsed expression: a set of characters, an anchor, a sequence, a choice or a repetition."""

    kind: str
    """One of "set", "^", "$", "sequence", "choice" and "repeat"."""
    parts: tuple[_Part, ...] = ()
    ranges: Ranges = ()
    least: int = 0
    most: int | None = None


class _Reader:
    """Parses the regular expression syntax that Python, ECMAScript and llguidance have in common."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.place, self.depth = pattern, 0, 0

    def whole(self) -> _Part:
        part = self._choice()
        if self.place < len(self.pattern):
            raise self._unknown()
        return part

    def _unknown(self) -> ConfigError:
        return refused(f"`additionalProperties` beside the pattern {self.pattern[:80]!r}")

    def _take(self, expression: str) -> re.Match[str] | None:
        """Match an expression at the current place, and move the place after the match; None if it does not match."""
        if (match := re.compile(expression, re.DOTALL).match(self.pattern, self.place)) is not None:
            self.place = match.end()
        return match

    def _choice(self) -> _Part:
        branches = [self._sequence()]
        while self._take(r"\|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _Part("choice", tuple(branches))

    def _sequence(self) -> _Part:
        parts = list[_Part]()
        while self.pattern[self.place : self.place + 1] not in ("", "|", ")"):
            part = self._atom()
            if (match := self._take(r"[*+?]|\{(\d{1,4})(,(\d{0,4}))?\}")) is not None:
                if part.kind in ("^", "$"):
                    raise self._unknown()
                least, most = _times(match)
                if most is not None and most < least:
                    raise self._unknown()
                part = _Part("repeat", (part,), (), least, most)
                if self._take(r"\?") is None and self._take(r"[*+{]"):
                    raise self._unknown()
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Part("sequence", tuple(parts))

    def _atom(self) -> _Part:
        if self._take(r"\((\?:)?(?!\?)"):
            self.depth += 1
            if self.depth > _DEPTH:
                raise self._unknown()
            part = self._choice()
            if not self._take(r"\)"):
                raise self._unknown()
            self.depth -= 1
            return part
        if anchor := self._take(r"[$^]"):
            return _Part(anchor[0])
        if self._take(r"\."):
            return _Part("set", ranges=_others_of(((10, 10),)))
        if self._take(r"\[(?!\^?\])"):
            return _Part("set", ranges=self._bracket())
        return _Part("set", ranges=self._one(r"[^\\*+?{(\[]"))

    def _bracket(self) -> Ranges:
        """Parse a set of characters in brackets, after its opening bracket."""
        negated, known = self._take(r"\^") is not None, list[tuple[int, int]]()
        while not self._take(r"\]"):
            if self._take(r"(?=&&|--|~~)"):
                raise self._unknown()
            first = self._one(r"[^\\\[]")
            if self._take(r"-(?!\])"):
                last = self._one(r"[^\\\[]")
                (low, other), (same, high) = first[0], last[0]
                if low != other or same != high or len(first) + len(last) > 2 or high < low:
                    raise self._unknown()
                first = ((low, high),)
            known += first
        return _others_of(_ranges(known)) if negated else _ranges(known)

    def _one(self, plain: str) -> Ranges:
        """Parse an escape sequence, or a character that `plain` matches; returns a set of characters."""
        if match := self._take(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})"):
            code = int(match[1] or match[2], 16)
        elif match := self._take(r"\\([dwsDWS])"):
            return _CLASSES[match[1]]
        elif match := self._take(r"\\([nrtfv])"):
            code = _CONTROLS[match[1]]
        elif match := self._take(r"\\([^\w])") or self._take(f"({plain})"):
            code = ord(match[1])
        else:
            raise self._unknown()
        if 0xD800 <= code < 0xE000:
            raise self._unknown()
        return ((code, code),)


def _times(match: re.Match[str]) -> tuple[int, int | None]:
    """The minimum and the maximum number of repetitions; a maximum of None means that there is no limit."""
    if match[0] in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[match[0]]
    least = int(match[1])
    return least, least if match[2] is None else int(match[3]) if match[3] else None


# -- automata ----------------------------------------------------------------------------------------------------------

_START, _FOUND = 0, 1


@dataclass
class _Automaton:
    """A nondeterministic automaton that starts in the state `_START` and searches for several patterns at once."""

    edges: list[list[tuple[str | Ranges, int]]] = field(default_factory=lambda: [[], []])
    """For each state, its transitions: a label (a set of characters, an anchor, or "" for none) and the next state."""
    size: int = 0
    """Number of parts of patterns that were added."""

    def add(self, part: _Part, end: int) -> None:
        """Add a pattern to search for; the automaton reaches the state `end` where the pattern ends."""
        begin = self._state()
        self._edge(_START, "", begin)
        self._edge(self._built(part, begin), "", end)

    def add_lasting(self, part: _Part) -> int:
        """Add a pattern to search for; returns a state that the automaton stays in once the pattern is found."""
        end = self._state()
        self.add(part, end)
        self._edge(end, _ANY, end)
        return end

    def _state(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def _edge(self, begin: int, label: str | Ranges, end: int) -> None:
        self.edges[begin].append((label, end))

    def _built(self, part: _Part, begin: int) -> int:
        """Add a part of a pattern, beginning at the state `begin`; returns the state after the part."""
        self.size += 1
        if self.size > _PARTS:
            raise _too_long()
        if part.kind == "sequence":
            for inner in part.parts:
                begin = self._built(inner, begin)
            return begin
        if part.kind == "repeat":
            (inner,) = part.parts
            for _ in range(part.least):
                begin = self._built(inner, begin)
            end = self._state()
            self._edge(begin, "", end)
            if part.most is None:
                again = self._state()
                self._edge(end, "", again)
                self._edge(self._built(inner, again), "", end)
            for _ in range(part.least, part.most or 0):
                begin = self._built(inner, begin)
                self._edge(begin, "", end)
            return end
        end = self._state()
        if part.kind == "choice":
            for inner in part.parts:
                self._edge(self._built(inner, begin), "", end)
        else:
            self._edge(begin, part.ranges or part.kind, end)
        return end

    def reached(self, states: Iterable[int], anchor: str) -> frozenset[int]:
        """All states that can be reached from `states` without reading a character, including `states`.

        Args:
            anchor: "^" at the beginning of a name, "$" at its end, "^$" in an empty name.
        """
        known, left = set(states), list(states)
        while left:
            for label, end in self.edges[left.pop()]:
                if isinstance(label, str) and label in ("", *anchor) and end not in known:
                    known.add(end)
                    left.append(end)
        return frozenset(known)


Table = list[dict[int, list[tuple[int, int]]]]
"""For each state of a deterministic automaton, maps each next state to the ranges of code points that lead to it."""


def _deterministic(automaton: _Automaton, stop: int | None = None) -> tuple[Table, list[frozenset[int]]]:
    """Make an automaton deterministic; its first state is 0. Also returns, for each of its states, the states of the
    original automaton in which a name may end.

    Args:
        stop: a state of the original automaton; transitions that lead to it are left out.
    """
    labels = {label for edges in automaton.edges for label, _ in edges if not isinstance(label, str)}
    bounds = sorted({0, _LAST + 1, *(bound for ranges in labels for low, high in ranges for bound in (low, high + 1))})
    first = automaton.reached([_START], "^")
    numbers, table, last = {first: 0}, Table(), list[frozenset[int]]()
    waiting = [] if stop in first else [first]
    for states in waiting:
        table.append({})
        last.append(automaton.reached(states, "^$" if states is first else "$"))
        moves = [
            (label, end) for state in states for label, end in automaton.edges[state] if not isinstance(label, str)
        ]
        for low, high in pairwise(bounds):
            for _ in range(1 + len(moves) // 64):
                count()
            ends = [end for label, end in moves if any(one <= low <= other for one, other in label)]
            after = automaton.reached([_START, *ends], "")
            if stop in after:
                continue
            if after not in numbers:
                numbers[after] = len(numbers)
                waiting.append(after)
                if len(waiting) > _STATES:
                    raise _too_long()
            table[numbers[states]].setdefault(numbers[after], []).append((low, high - 1))
    return table, last


def _too_long() -> ConfigError:
    return refused("`additionalProperties` beside patterns whose complement is long")


def _expression(table: Table, ends: set[int]) -> str | None:
    """Convert an automaton to a regular expression by removing its states one by one; None if it matches nothing."""
    begin, end = -1, -2
    paths = {
        (state, after): _class(_ranges(pairs)) for state, moves in enumerate(table) for after, pairs in moves.items()
    }
    paths |= {(begin, 0): ""} | {(state, end): "" for state in ends}
    left = set(range(len(table)))
    while left:
        # Remove the state that the fewest paths cross, because each path into it is joined with each path out of it.
        ways_in = Counter(after for one, after in paths if one != after)
        ways_out = Counter(one for one, after in paths if one != after)
        state = min(left, key=lambda one: (ways_in[one] * ways_out[one], one))
        left.remove(state)
        loop = paths.pop((state, state), None)
        again = "" if loop is None else f"{_group(loop)}*"
        before = {one: path for (one, after), path in paths.items() if after == state}
        behind = {after: path for (one, after), path in paths.items() if one == state}
        paths = {key: path for key, path in paths.items() if state not in key}
        for one, opening in before.items():
            for after, closing in behind.items():
                path = opening + again + closing
                known = paths.get((one, after))
                if known and path:
                    path = f"(?:{known}|{path})"
                elif known is not None:  # one of the two paths reads no character
                    path = f"{_group(known or path)}?"
                paths[one, after] = path
        if sum(map(len, paths.values())) > _CHARACTERS:
            raise _too_long()
    whole = paths.get((begin, end))
    return None if whole is None else f"^(?:{whole})$"


def _group(path: str) -> str:
    return path if _SINGLE.fullmatch(path) else f"(?:{path})"
