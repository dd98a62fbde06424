"""Self-speculative drafting: the model itself drafts without some of its sublayers, so that no second model or cache is
needed.

Drafts are written into the model's own cache, after the text. The pass that verifies a draft runs every sublayer at the
same positions, and so overwrites everything that drafting wrote (Draft & Verify, Zhang et al., 2024). The drafter skips
the sublayers that change the text's residual stream least, relative to the bytes that they move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shoestring.decode.adapter import Adapter
from shoestring.decode.drafters.base import DraftTokens
from shoestring.decode.drafters.model import StepwiseDrafter
from shoestring.decode.settings.generation import Speculation
from shoestring.decode.skipping.choice import Ratios
from shoestring.decode.skipping.plan import check_skips, make_plan
from shoestring.models.cache import KVCache
from shoestring.models.sublayers import skipping, sublayers

if TYPE_CHECKING:
    from shoestring.decode.engine import Row

SHARE = 0.4
"""Default fraction of the bytes moved per token that a drafting pass avoids by skipping sublayers."""
LEAST, MOST = 32, 256
"""Smallest and largest number of a text's tokens that are used to choose the sublayers to skip."""


class SkippingDrafter(StepwiseDrafter):
    """Drafts with the verifying model itself, without some of its sublayers, for all rows of a batch at once.

    Args:
        ratios: the sublayers to skip, each with its factor r (see `Ratios`). By default, the drafter chooses them by a
            pass over the newest tokens of a text, as soon as a text is long enough.
        share: fraction of the bytes moved per token that drafting avoids; used only if `ratios` is None.

    Raises:
        ConfigError: raised by `attach` if the sublayers of the model are not known.
    """

    def __init__(self, speculation: Speculation, *, ratios: Ratios | None = None, share: float = SHARE) -> None:
        super().__init__(speculation)
        self.ratios, self.share = ratios, share

    def attach(self, model: Adapter, cache: KVCache) -> None:
        """Connect the drafter with the engine's model and cache, which it uses for drafting as well."""
        check_skips(model)
        sublayers(model.model)
        self.model, self.cache = model, cache

    def grades(self, rows: Sequence[Row]) -> Sequence[int]:
        """The grades: 0 for every row, or -1 until some text is long enough to choose the sublayers from."""
        ready = self.ratios is not None or any(len(row.history) >= LEAST for row in rows)
        return [0 if ready else -1] * len(rows)

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        if self.ratios is None:
            history = max((row.history for row in rows), key=len)
            newest = torch.tensor([history[-min(MOST, self.model.context) :]])
            self.ratios = make_plan(self.model, [newest], self.share, context=len(history), measure=False).ratios
        lengths = list(self.cache.lengths)
        try:
            with skipping(self.model.model, self.ratios):
                return super().draft(rows, counts)
        finally:
            self.cache.lengths[:] = lengths

    def _unread(self, row: Row) -> list[int]:
        return row.history[-1:]
