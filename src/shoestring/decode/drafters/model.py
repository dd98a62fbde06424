"""A smaller model as the drafter: it generates tokens one by one, and the large model verifies them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shoestring.decode.adapter import Adapter
from shoestring.decode.drafters.base import DraftTokens
from shoestring.decode.drafters.stepwise import StepwiseDrafter
from shoestring.decode.settings import Speculation
from shoestring.decode.window import common, window_start

if TYPE_CHECKING:
    from shoestring.decode.request import Row

CHUNK = 512
"""Tokens that are read in one pass."""
SHORT = 8
"""Unread tokens that are read together with the first draft; logits of more would be computed for nothing."""


@dataclass
class _Held:
    """What a row of the cache holds: `history[begin:verified]`, and then `drafted`."""

    history: list[int] = field(default_factory=list)
    begin: int = 0
    verified: int = 0
    drafted: list[int] = field(default_factory=list)

    def kept(self, history: list[int], begin: int) -> int:
        """How many tokens of `history` from `begin` on it holds; a text that grew is compared where it did."""
        if begin == self.begin and history is self.history:
            return self.verified - begin + common(self.drafted, history[self.verified :])
        if begin == self.begin:
            return common([*self.history[begin : self.verified], *self.drafted], history[begin:])
        return 0


class ModelDrafter(StepwiseDrafter):
    """Drafts by a model with a cache of its own, for all rows of a batch at once.

    Rejected tokens are forgotten, and tokens that it has not read are read in one pass with the first draft.
    """

    def __init__(self, model: Adapter, slots: int, speculation: Speculation, room: int | None = None) -> None:
        super().__init__(speculation)
        self.model = model
        self.window = min(model.context, (room or model.context) + speculation.max_draft_length)
        self.margin = min(speculation.max_draft_length, self.window // 2)
        self.cache = model.new_cache(slots, self.window)
        self.held = [_Held() for _ in range(slots)]
        model.model.eval()

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """One pass for each token of the longest draft, over the rows that still want one."""
        drafts = super().draft(rows, [min(count, self.margin) for count in counts])
        for row, draft in zip(rows, drafts, strict=True):
            if draft.tokens:  # the last token was not read
                self.held[row.slot].drafted = draft.tokens[:-1]
        return drafts

    def _unread(self, row: Row) -> list[int]:
        """Forget what is not in the text, and read what is new but for the last tokens, which are returned."""
        history, held = row.history, self.held[row.slot]
        begin = row.begin + window_start(len(history) - row.begin + self.margin, self.window)
        kept = min(held.kept(history, begin), len(history) - begin - 1)
        self.cache.lengths[row.slot] = kept
        self.held[row.slot] = _Held(history, begin, len(history))
        unread = history[begin + kept :]
        while len(unread) > SHORT:
            piece, unread = unread[: min(CHUNK, len(unread) - 1)], unread[min(CHUNK, len(unread) - 1) :]
            place = slice(row.slot, row.slot + 1)
            self.model.read(torch.tensor([piece]), self.cache, rows=place, wanted="last")
        return unread
