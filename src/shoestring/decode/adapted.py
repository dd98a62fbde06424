"""Generation with several low-rank adapters (LoRA) over one model: each row of the cache may have its own adapter.

In this package, an `Adapter` (see `decode.adapter`) wraps a model for generation, and a `LoadedAdapter` holds the
low-rank weights of LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import Adapter, OwnCached, Wanted, Whole, side_by_side
from shoestring.models.adapters_by_row import AdaptedPass, LoadedAdapter, adaptable_layers, load_adapter
from shoestring.models.cache import CachePlace, KVCache

PASSES = 4
"""Number of cached `AdaptedPass` objects: one for each recent combination of adapters in a batch."""
ROWS, TOKENS = 3, 2
"""Numbers of rows and of tokens per row in the pass that detects which layers can be adapted."""


class AdaptedRows(Adapter):
    """A model that reads each row of a cache with the low-rank adapter that was assigned to the row, if any.

    If `inner` reads each text in a separate pass, it still does so; otherwise, rows with different adapters are read in
    one pass.

    Raises:
        ConfigError: passes are captured or compiled, or no layer of the model supports a separate adapter for each row.
    """

    def __init__(self, inner: Adapter) -> None:
        if inner.captured:
            raise ConfigError(
                "captured or compiled passes cannot use a different adapter for each text",
                hint="give --passes plain",
            )
        super().__init__(inner.model, inner.context)
        self.inner, self.skips, self.pieces, self.shares = inner, inner.skips, inner.pieces, inner.shares
        self.apart = isinstance(inner, OwnCached) or (isinstance(inner, Whole) and inner.apart)
        """Whether each row is read in a separate pass."""
        cache = self.inner.new_cache(1 if self.apart else ROWS, TOKENS)
        layers = adaptable_layers(self.model, lambda tokens: self.inner.read(tokens, cache), cache.rows, TOKENS)
        if not layers:
            raise ConfigError(
                f"no layer of {type(self.model).__name__} can use a different adapter for each text",
                hint="merge an adapter into the model, and serve the merged model",
            )
        self.layers = layers
        """The layers that may have adapters, by name."""
        # The combination of adapters changes only when a text begins or ends, so few combinations need to be cached.
        self._pass = lru_cache(PASSES)(lambda adapters: AdaptedPass(self.layers, adapters))

    def new_cache(self, rows: int, length: int) -> KVCache:
        return self.inner.new_cache(rows, length)

    def assign(self, cache: KVCache, row: int, adapter: LoadedAdapter | None) -> None:
        if adapter is not None and not adapter.factors.keys() <= self.layers.keys():
            raise ConfigError("the adapter belongs to another model")
        cache.adapters[row] = adapter

    def load(self, folder: Path) -> LoadedAdapter:
        """Load the adapter in a folder; may run in any thread, also during a pass.

        Raises:
            CheckpointError: the folder holds no adapter, or one that does not fit this model; see `load_adapter`.
        """
        return load_adapter(folder, self.model, self.layers)

    def forget(self) -> None:
        """Drop the cached factors of earlier batches, so that the memory of removed adapters is freed; may run in any
        thread, also during a pass."""
        self._pass.cache_clear()

    @torch.inference_mode()
    def read(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        rows: slice | None = None,
        counts: Sequence[int] | None = None,
        wanted: Wanted = "all",
    ) -> Tensor:
        own = cache.adapters[slice(None) if rows is None else rows]
        lengths = [tokens.shape[1]] * len(own) if counts is None else counts
        adapters = tuple(adapter if length else None for adapter, length in zip(own, lengths, strict=True))
        if not any(adapters):
            return self.inner.read(tokens, cache, rows=rows, counts=counts, wanted=wanted)
        if not self.apart:
            with self._pass(adapters):
                return self.inner.read(tokens, cache, rows=rows, counts=counts, wanted=wanted)
        results: list[Tensor | None] = []
        for index, row in enumerate(range(cache.rows)[slice(None) if rows is None else rows]):
            one, results = tokens[index : index + 1, : lengths[index]], [*results, None]
            if lengths[index]:
                with self._pass(adapters[index : index + 1]):
                    results[-1] = self.inner.read(one, cache, rows=slice(row, row + 1), wanted=wanted)
        return side_by_side(results, 1 if wanted == "last" else tokens.shape[1])

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        return self.inner.logits(tokens, cache, place, last)
