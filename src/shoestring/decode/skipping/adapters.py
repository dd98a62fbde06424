"""Adapters for models that skip sublayers during generation."""

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
"""Number of tokens that are observed before the first choice of sublayers to skip."""
WATCHED = 20
"""Number of decoded tokens that are observed before further feed-forward sublayers are skipped, as in AdaSkip (He et
al., 2025)."""


class Skipping(Adapter):
    """A model that skips the sublayers of a plan in every pass; skipped attention stores no keys and values."""

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
    """A model that skips sublayers while it decodes a text, and chooses these sublayers by observing the same text;
    prompts are read with every sublayer.

    The first choice avoids `share` of the bytes moved per token. This choice relies on how much each sublayer changed
    the residual stream over the prompt (and over the first decoded tokens, if the prompt is short). The other sublayers
    are observed over the next `WATCHED` tokens. A second choice then adds the feed-forward sublayers whose harm per
    byte is at most the largest harm per byte among the skipped sublayers. An object serves one text only, because the
    choice depends on the text, and the cache lacks the keys and values of skipped attention.

    Args:
        share: fraction of the bytes moved per token that the first choice avoids.
        context: context length at which bytes are counted.

    Raises:
        ConfigError: the share is out of range, or the sublayers of the model are not supported.
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
        if decodes and self._observer is not None:
            if self._first is None and self._seen >= LEARNT:  # choose the sublayers for the first time
                self._first = gather(self._observer, self.costs, self.at)
                self.ratios = dict(least_harm(self._first, self.share * self._first.total))
                self._observer, self._seen = Observer(self.model, leave_out=self.ratios), 0
            elif self._first is not None and self._seen >= WATCHED:  # skip further sublayers, once
                watched = gather(self._observer, self.costs, self.at)
                self.ratios |= within_price(watched, price(self._first, self.ratios))
                self._observer = None
        with skipping(self.model, self.ratios if decodes else {}):
            if self._observer is None or (self._first is not None and not decodes):
                return self.inner.logits(tokens, cache, place, last)
            self._seen += tokens.shape[1]
            with self._observer:
                return self.inner.logits(tokens, cache, place, last)
