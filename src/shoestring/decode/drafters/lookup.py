"""Prompt lookup: what followed when the newest tokens stood in the text before (Saxena, 2023).

Costs no model, and pays where the text repeats its prompt or itself: summaries, edits of code, answers with quotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoestring.decode.drafters.base import Drafter, DraftTokens

if TYPE_CHECKING:
    from shoestring.decode.request import Row

LONGEST = 5
"""Tokens of the longest passage that is searched for; longer ones rarely tell more."""


class _Index:
    """Where each n-gram of a text was last followed by another token. Grows with the text."""

    def __init__(self, history: Sequence[int]) -> None:
        self.history = history
        self.after: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST)]
        self.indexed = 1  # tokens of which it is known what they follow

    def update(self) -> None:
        """Take in the tokens that are new."""
        for end in range(self.indexed, len(self.history)):
            passage = tuple(self.history[max(0, end - LONGEST) : end])
            for length in range(1, len(passage) + 1):
                self.after[length - 1][passage[-length:]] = end
        self.indexed = max(self.indexed, len(self.history))

    def longest(self) -> tuple[int, int]:
        """The tokens of the longest passage at the end that occurred before, and where the newest one continued."""
        newest = tuple(self.history[-LONGEST:])
        for length in range(len(newest), 0, -1):
            place = self.after[length - 1].get(newest[-length:])
            if place is not None:
                return length, place
        return 0, 0


class PromptLookup(Drafter):
    """Drafts what followed the newest occurrence of the longest passage that the text ends with.

    The index grows by the new tokens alone; no step searches the text.
    """

    def __init__(self) -> None:
        self.indices: dict[int, _Index] = {}

    def grades(self, rows: Sequence[Row]) -> Sequence[int]:
        """The length of the passage, which tells much about acceptance; -1 where none occurred before."""
        return [self._find(row)[0] - 1 for row in rows]

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """A continuation that reaches the end of the text continues with itself, as repetitions do."""
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
