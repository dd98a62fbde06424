"""A smaller model as the drafter: it generates tokens one by one, and the large model verifies several in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shoestring.decode.adapter import Adapter
from shoestring.decode.drafters.base import DraftTokens
from shoestring.decode.drafters.stepwise import StepwiseDrafter
from shoestring.decode.settings.generation import Speculation
from shoestring.decode.window import common, window_start

if TYPE_CHECKING:
    from shoestring.decode.request import Row

CHUNK = 512
"""Largest number of tokens of a prompt that are read in one pass."""
SHORT = 8
"""Largest number of unread tokens that the first drafting pass reads. This pass computes logits for every token that it
reads, so longer unread texts are read in passes before it."""


@dataclass
class _Held:
    """The tokens in a row of the drafter's cache: `history[begin:verified]`, followed by `drafted`."""

    history: list[int] = field(default_factory=list)
    begin: int = 0
    verified: int = 0
    drafted: list[int] = field(default_factory=list)

    def kept(self, history: list[int], begin: int) -> int:
        """Number of leading tokens of `history[begin:]` that the cache row already holds. If `history` is the same
        list as before, only the drafted tokens are compared."""
        if begin == self.begin and history is self.history:
            return self.verified - begin + common(self.drafted, history[self.verified :])
        if begin == self.begin:
            return common([*self.history[begin : self.verified], *self.drafted], history[begin:])
        return 0


class ModelDrafter(StepwiseDrafter):
    """Drafts with a smaller model that has its own cache, for all rows of a batch at once.

    Before it drafts, rejected tokens are dropped from its cache; the pass that drafts the first token also reads the
    tokens that are not in the cache yet.
    """

    def __init__(self, model: Adapter, slots: int, speculation: Speculation, room: int | None = None) -> None:
        super().__init__(speculation)
        self.model = model
        self.window = min(model.context, (room or model.context) + speculation.max_draft_length)
        self.margin = min(speculation.max_draft_length, self.window // 2)
        self.cache = model.new_cache(slots, self.window)
        self.held = [_Held() for _ in range(slots)]
        model.model.eval()

    def snapshot(self) -> Callable[[], None]:
        # A repeated round overwrites the cache at the same positions, so keys and values need not be copied.
        held, lengths = list(self.held), list(self.cache.lengths)

        def restore() -> None:
            self.held[:], self.cache.lengths[:] = held, lengths

        return restore

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """Draft for all rows at once, with one pass per token of the longest draft."""
        drafts = super().draft(rows, [min(count, self.margin) for count in counts])
        for row, draft in zip(rows, drafts, strict=True):
            if draft.tokens:  # the smaller model has not read the last token that it drew
                self.held[row.slot].drafted = draft.tokens[:-1]
        return drafts

    def _unread(self, row: Row) -> list[int]:
        """Drop rejected tokens from the cache, and read all new tokens but the last few; returns the tokens left to
        read, at most `SHORT`."""
        history, held = row.history, self.held[row.slot]
        begin = row.begin + window_start(len(history) - row.begin + self.margin, self.window)
        valid = min(held.kept(history, begin), len(history) - begin - 1)
        self.cache.lengths[row.slot] = valid
        self.held[row.slot] = _Held(history, begin, len(history))
        unread = history[begin + valid :]
        while len(unread) > SHORT:
            piece, unread = unread[: min(CHUNK, len(unread) - 1)], unread[min(CHUNK, len(unread) - 1) :]
            place = slice(row.slot, row.slot + 1)
            self.model.read(torch.tensor([piece]), self.cache, rows=place, wanted="last")
        return unread
