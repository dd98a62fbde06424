"""From tokens to the text that is sent: characters once they are complete, and nothing of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shoestring.data.tokenizer import TextStream
from shoestring.decode.request import TokenLogprob


class Shown(NamedTuple):
    """A token that is sent, with its log-probability."""

    entry: TokenLogprob
    start: int
    """Characters of the text before it."""


class TextPiece(NamedTuple):
    """What can be sent now."""

    text: str
    tokens: list[Shown]


class Writing:
    """One text as it grows. Text that may be the beginning of a stop string is held back until that is decided.

    The stop string that ends first decides, so the text does not depend on how it is cut into tokens.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        """A stop string was found; the text ends before it."""
        self._stream, self._stops = stream, stops
        self._held = ""
        self._sent = 0
        self._open: list[Shown] = []  # tokens whose characters are not complete
        self._waiting: deque[tuple[int, Shown]] = deque()  # where their text ends, and complete tokens

    def add(self, token: int, entry: TokenLogprob | None = None) -> TextPiece:
        """What can be sent with one more token; nothing is to be added once it has `stopped`."""
        if entry is not None:
            self._open.append(Shown(entry, self._sent + len(self._held)))
        return self._grow(self._stream.add(token))

    def end(self) -> TextPiece:
        """The rest, with replacement characters where a character is incomplete; nothing after a stop string."""
        if self.stopped:
            return TextPiece("", [])
        last = self._grow(self._stream.rest(), complete=True)
        if self.stopped:
            return last
        rest = self._send(len(self._held))
        return TextPiece(last.text + rest.text, last.tokens + rest.tokens)

    def _grow(self, text: str, complete: bool = False) -> TextPiece:
        self._held += text
        if text or complete:
            end = self._sent + len(self._held)
            self._waiting += ((end, shown) for shown in self._open)
            self._open = []
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not ends:
            return self._send(len(self._held) - self._undecided())
        self.stopped = True
        return self._send(min(ends)[1])

    def _undecided(self) -> int:
        """Characters at the end that may begin a stop string."""
        held = self._held
        return max(
            (
                count
                for stop in self._stops
                for count in range(1, min(len(stop), len(held) + 1))
                if held.endswith(stop[:count])
            ),
            default=0,
        )

    def _send(self, count: int) -> TextPiece:
        text, self._held = self._held[:count], self._held[count:]
        self._sent += count
        tokens = []
        while self._waiting and self._waiting[0][0] <= self._sent:
            tokens.append(self._waiting.popleft()[1])
        return TextPiece(text, tokens)
