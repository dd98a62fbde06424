"""The model itself, without some of its sublayers, as the drafter: no second model, and no second cache.

Drafts are read into the model's own cache, behind the text. The pass that verifies them reads the same positions with
every sublayer, so it overwrites all that drafting wrote (Zhang et al., Draft & Verify, 2024). What is skipped is chosen
from the text itself, as it changes the residual stream least for the bytes that it moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shoestring.decode.adapter import Adapter
from shoestring.decode.drafters.base import DraftTokens
from shoestring.decode.drafters.model import StepwiseDrafter
from shoestring.decode.settings import Speculation
from shoestring.decode.skipping.choice import Ratios
from shoestring.decode.skipping.plan import check_skips, make_plan
from shoestring.models.cache import KVCache
from shoestring.models.sublayers import skipping, sublayers

if TYPE_CHECKING:
    from shoestring.decode.engine import Row

SHARE = 0.4
"""Share of the bytes moved for a token that drafting saves, unless a plan says what to skip."""
LEAST, MOST = 32, 256
"""Tokens of text from which the choice is learnt."""


class SkippingDrafter(StepwiseDrafter):
    """Drafts by the model that verifies, for all rows of a batch at once.

    Args:
        ratios: of the sublayers to skip; by default they are learnt from the first text that is long enough, by one
            pass over its newest tokens.
        share: of the bytes moved for a token that drafting saves, where they are learnt.

    Raises:
        ConfigError: at `share`, the sublayers of the model are not known.
    """

    def __init__(self, speculation: Speculation, *, ratios: Ratios | None = None, share: float = SHARE) -> None:
        super().__init__(speculation)
        self.ratios, self.share = ratios, share

    def attach(self, model: Adapter, cache: KVCache) -> None:
        """Draft in the engine's own cache."""
        check_skips(model)
        sublayers(model.model)
        self.model, self.cache = model, cache

    def grades(self, rows: Sequence[Row]) -> Sequence[int]:
        """None is drafted before there is text to learn from."""
        ready = self.ratios is not None or any(len(row.history) >= LEAST for row in rows)
        return [0 if ready else -1] * len(rows)

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        if self.ratios is None:
            self.ratios = self._learn(max((row.history for row in rows), key=len))
        lengths = list(self.cache.lengths)
        try:
            with skipping(self.model.model, self.ratios):
                return super().draft(rows, counts)
        finally:
            self.cache.lengths[:] = lengths

    def _learn(self, history: Sequence[int]) -> Ratios:
        newest = torch.tensor([history[-min(MOST, self.model.context) :]])
        return make_plan(self.model, [newest], self.share, context=len(history), measure=False).ratios

    def _unread(self, row: Row) -> list[int]:
        return row.history[-1:]
