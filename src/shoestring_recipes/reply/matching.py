"""Vectors of many texts and clips, and of those that a text or a clip of one's own may match."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shoestring_recipes.reply.clips import corners
from shoestring_recipes.reply.inventory import ARTS, emoji, pictures
from shoestring_recipes.retrieval.mining import vectors

_CHUNK = 256
"""Number of clips that are encoded at a time."""


def of_texts(model: Any, texts: Sequence[str]) -> Tensor:
    """Return the vectors of texts, float32 (N, dimensions)."""
    return torch.from_numpy(vectors(model.texts, texts))


@torch.no_grad()
def of_clips(model: Any, tags: Sequence[str], frames: Tensor) -> Tensor:
    """Return the vectors of clips, float32 (N, dimensions).

    Args:
        tags: words of each clip; they may be empty.
        frames: uint8 (N, QUARTERS, 3, SIDE, SIDE).
    """
    device, parts = model.texts.temperature.device, []
    for start in range(0, len(tags), _CHUNK):
        rows = model.texts.reader.rows(tags[start : start + _CHUNK])
        parts.append(model.clip(rows.to(device), frames[start : start + _CHUNK].to(device)).float().cpu())
    return torch.cat(parts)


def described(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the vectors of messages and of all emoji, `text` and `emoji`; or those of clips and of all texts that
    emoji answer, `clip` and `texts`."""
    if "message" in batch:
        return {"text": of_texts(model, batch["message"]), "emoji": _of_emoji(model)}
    return {"clip": of_clips(model, batch["words"], batch["frames"].cpu()), "texts": _of_answered(model)}


def best(queries: Tensor, candidates: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the numbers and cosines of the best candidates for each query, the best first.

    Args:
        queries, candidates: vectors of norm 1, (N, D).
    """
    top = (queries @ candidates.T).topk(min(count, len(candidates)), dim=1)
    columns = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in columns]


@lru_cache(1)
def _of_emoji(model: nn.Module) -> Tensor:
    return of_clips(model, [one.tags for one in emoji()], corners(pictures(ARTS[0])))


@lru_cache(1)
def _of_answered(model: nn.Module) -> Tensor:
    return of_texts(model, answered())


def answered() -> list[str]:
    """Return the texts that emoji answer, each once."""
    return list(dict.fromkeys(text for one in emoji() for text in one.texts))
