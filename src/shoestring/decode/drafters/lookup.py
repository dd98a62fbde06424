"""Prompt lookup: finds an earlier occurrence of the text's newest tokens, and drafts the tokens that followed it there
(Saxena, 2023).

Prompt lookup needs no model, and is effective where a text repeats its prompt or itself, as in summaries, edits of code
and answers with quotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoestring.decode.drafters.base import Drafter, DraftTokens

if TYPE_CHECKING:
    from shoestring.decode.request import Row

LONGEST = 5
"""Length of the longest n-gram that is looked up; longer ones rarely predict better."""


class _Index:
    """Maps each n-gram of a growing text to the position after the n-gram's newest occurrence."""

    def __init__(self, history: Sequence[int]) -> None:
        self.history = history
        self.after: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST)]
        self.indexed = 1  # number of tokens whose preceding n-grams are in the index

    def update(self) -> None:
        """Add the n-grams that precede each new token of the text."""
        for end in range(self.indexed, len(self.history)):
            passage = tuple(self.history[max(0, end - LONGEST) : end])
            for length in range(1, len(passage) + 1):
                self.after[length - 1][passage[-length:]] = end
        self.indexed = max(self.indexed, len(self.history))

    def longest(self) -> tuple[int, int]:
        """Length of the longest n-gram at the end of the text that also occurred earlier, and the position after that
        occurrence; (0, 0) if there is none."""
        newest = tuple(self.history[-LONGEST:])
        for length in range(len(newest), 0, -1):
            place = self.after[length - 1].get(newest[-length:])
            if place is not None:
                return length, place
        return 0, 0


class PromptLookup(Drafter):
    """Finds the longest n-gram at the end of the text that also occurred earlier, and drafts the tokens that followed
    it.

    Each step only adds the new tokens to an index; the text is not searched.
    """

    def __init__(self) -> None:
        self.indices: dict[int, _Index] = {}

    def grades(self, rows: Sequence[Row]) -> Sequence[int]:
        """The length of each row's repeated n-gram minus 1, which predicts acceptance well; -1 if no n-gram is
        repeated."""
        return [self._find(row)[0] - 1 for row in rows]

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """Draft the tokens that followed the earlier occurrence; if the text has fewer of them than requested, they are
        repeated periodically."""
        drafts = []
        for row, count in zip(rows, counts, strict=True):
            length, place = self._find(row)
            period = len(row.history) - place
            tokens = [row.history[place + step % period] for step in range(count)] if length else []
            drafts.append(DraftTokens(tokens))
        return drafts

    def _find(self, row: Row) -> tuple[int, int]:
        index = self.indices.get(row.slot)
        if index is None or index.history is not row.history:
            index = self.indices[row.slot] = _Index(row.history)
        index.update()
        return index.longest()
