"""Models that skip sublayers while they generate."""

from __future__ import annotations

from torch import Tensor

from shoestring.decode.adapter import Adapter
from shoestring.decode.skipping.choice import Statistics, least_harm, price, within_price
from shoestring.decode.skipping.cost import count_bytes
from shoestring.decode.skipping.importance import Observer
from shoestring.decode.skipping.plan import SkipPlan, check_share, check_skips, gather
from shoestring.models.cache import CachePlace, KVCache
from shoestring.models.sublayers import skipping

LEARNT = 32
"""Tokens after which the first choice is made."""
WATCHED = 20
"""Tokens of decoding after which further feed-forward sublayers are skipped, as in the paper."""


class Skipping(Adapter):
    """A model without some of its sublayers, in every pass: skipped attention takes no keys and values."""

    def __init__(self, inner: Adapter, plan: SkipPlan) -> None:
        super().__init__(inner.model, inner.context)
        check_skips(inner)
        self.inner, self.ratios = inner, dict(plan.ratios)

    def new_cache(self, rows: int, length: int) -> KVCache:
        return self.inner.new_cache(rows, length)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        with skipping(self.model, self.ratios):
            return self.inner.logits(tokens, cache, place, last)


class OnlineSkipping(Adapter):
    """A model that learns from the text itself what to skip of each token that it generates; prompts are read whole.

    The first choice saves `share` of the bytes, by what the sublayers did to the prompt (and to the first tokens, where
    the prompt is short). Over the next tokens the others are watched, and the feed-forward sublayers that turn out to
    cost no more for their bytes than what is skipped already are skipped, too. For one text: what was decoded lacks the
    keys and values of skipped attention, so that the choice is not changed and the cache not used for another text.

    Args:
        context: tokens of context at which bytes are counted.

    Raises:
        ConfigError: the share is out of range, or the sublayers of the model are not known.
    """

    def __init__(self, inner: Adapter, share: float, context: int) -> None:
        super().__init__(inner.model, inner.context)
        check_share(share)
        check_skips(inner)
        self.inner, self.share, self.at = inner, share, context
        self.ratios: dict[str, float] = {}
        self.costs = count_bytes(inner)
        self._observer: Observer | None = Observer(inner.model)
        self._seen = 0
        self._first: Statistics | None = None

    def new_cache(self, rows: int, length: int) -> KVCache:
        return self.inner.new_cache(rows, length)

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        decodes = tokens.shape[1] == 1
        if decodes:
            self._choose()
        with skipping(self.model, self.ratios if decodes else {}):
            if self._observer is None or (self._first is not None and not decodes):
                return self.inner.logits(tokens, cache, place, last)
            self._seen += tokens.shape[1]
            with self._observer:
                return self.inner.logits(tokens, cache, place, last)

    def _choose(self) -> None:
        """Take a choice that is due."""
        if self._observer is None:
            return
        if self._first is None and self._seen >= LEARNT:
            self._first = gather(self._observer, self.costs, self.at)
            self.ratios = dict(least_harm(self._first, self.share * self._first.total))
            self._observer, self._seen = Observer(self.model, leave_out=self.ratios), 0
        elif self._first is not None and self._seen >= WATCHED:
            watched = gather(self._observer, self.costs, self.at)
            self.ratios |= within_price(watched, price(self._first, self.ratios))
            self._observer = None
