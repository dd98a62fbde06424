"""Turns tokens into text that can be sent: it has only whole characters and no part of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shoestring.data.text_stream import TextStream
from shoestring.decode.request import TokenLogprob


class Shown(NamedTuple):
    """A token that is sent, with its log-probability and position."""

    entry: TokenLogprob
    start: int
    """Number of characters that precede the token in the text."""
    first: bool = False
    """Whether the token is the first visible token of its text."""


class TextPiece(NamedTuple):
    """Text that can be sent now, and the tokens that it completes."""

    text: str
    tokens: list[Shown]


class Writing:
    """A growing text. Characters that may begin a stop string are held back until it is clear whether they do.

    If several stop strings occur, the one that ends first ends the text, so the text does not depend on its
    tokenization.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        """Whether a stop string was found; the text ends before the stop string."""
        self._stream, self._stops = stream, stops
        self._held = ""
        self._sent = 0
        self._open: list[Shown] = []  # tokens whose last character is not complete
        self._waiting: deque[tuple[int, Shown]] = deque()
        """Complete tokens that are held back, each with its end position in the text."""

    def add(self, token: int, entry: TokenLogprob | None = None) -> TextPiece:
        """Add a token, and return the text that can be sent now; must not be called once the text has `stopped`."""
        if entry is not None:
            start = self._sent + len(self._held) + self._stream.held_back
            self._open.append(Shown(entry, start, not self._stream.begun))
        return self._grow(self._stream.add(token))

    def end(self) -> TextPiece:
        """End the text, and return its remaining characters; an incomplete character becomes a replacement
        character."""
        if self.stopped:
            return TextPiece("", [])
        last = self._grow(self._stream.rest(), complete=True)
        if self.stopped:
            return last
        rest = self._send(len(self._held))
        return TextPiece(last.text + rest.text, last.tokens + rest.tokens)

    def _grow(self, text: str, complete: bool = False) -> TextPiece:
        if text and self._stream.replaced:
            start, shown = self._sent + len(self._held), list[Shown]()
            for token in self._open:
                shown.append(token._replace(start=start))
                start += self._stream.shows(token.entry.token)
            self._open = shown
        self._held += text
        if text or complete:
            end = self._sent + len(self._held)
            self._waiting += ((end, shown) for shown in self._open)
            self._open = []
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not ends:
            held = self._held  # its last characters stay if they may begin a stop string
            lengths = ((stop, range(1, min(len(stop), len(held) + 1))) for stop in self._stops)
            undecided = (count for stop, counts in lengths for count in counts if held.endswith(stop[:count]))
            return self._send(len(held) - max(undecided, default=0))
        self.stopped = True
        return self._send(min(ends)[1])

    def _send(self, count: int) -> TextPiece:
        text, self._held = self._held[:count], self._held[count:]
        self._sent += count
        tokens = []
        while self._waiting and self._waiting[0][0] <= self._sent:
            tokens.append(self._waiting.popleft()[1])
        return TextPiece(text, tokens)
