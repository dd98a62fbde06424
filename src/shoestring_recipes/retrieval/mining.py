"""Vectors of many texts, and hard negatives: wrong documents that BM25 or an encoder ranks high for a query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.models.loading import load_model
from shoestring_recipes.retrieval.dictionaries import Pair, pairs
from shoestring_recipes.retrieval.lexical import Bm25, Index, Values, hardest

SHARD = 4096
"""Approximate number of documents in which the hard negatives of a query are searched."""
_CHUNK = 500
"""Number of texts that are encoded at a time."""


def mined(taught: Sequence[Pair], count: int, miner: str = "") -> Values:
    """Return the numbers of hard negatives of each pair, (pairs, count): other documents with the best scores by BM25,
    and half of them by the encoder in the run folder `miner`, if it is set."""
    shards = np.array_split(np.arange(len(taught)), max(1, len(taught) // SHARD))
    texts = [([taught[at].query for at in shard], [taught[at].document for at in shard]) for shard in shards]
    by_encoder = count // 2 if miner else 0
    columns = [hardest((Index(own, Bm25()).scores(asked) for asked, own in texts), count - by_encoder)]
    if by_encoder:
        model = load_model(miner)[0]
        dense = (vectors(model, asked) @ vectors(model, own).T for asked, own in texts)
        columns.append(hardest(dense, by_encoder))
    return np.concatenate(columns, 1)


@torch.no_grad()
def encoded(embed: Callable[[Sequence[str]], Tensor], texts: Sequence[str]) -> Values:
    """Return the vectors of texts, float32 (N, dimensions), which `embed` computes chunk by chunk."""
    parts = [embed(texts[start : start + _CHUNK]).float().cpu() for start in range(0, len(texts), _CHUNK)]
    return torch.cat(parts).numpy()


def vectors(model: Any, texts: Sequence[str]) -> Values:
    """Return the vectors of texts by an encoder, float32 (N, dimensions)."""
    device = model.temperature.device
    return encoded(lambda part: model.embed(model.reader.rows(part).to(device)), texts)


def described(model: Any, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return `query`, the vectors of texts, and `entries`, the vectors of the documents of all dictionary pairs."""
    return {"query": torch.from_numpy(vectors(model, texts)), "entries": _of_entries(model)}


@lru_cache(1)
def _of_entries(model: nn.Module) -> Tensor:
    return torch.from_numpy(vectors(model, [pair.document for pair in pairs()]))
