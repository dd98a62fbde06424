"""Vectors of many texts and clips, and of the emoji and texts that a user's message or clip may match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shoestring_recipes.reply.clips import corners
from shoestring_recipes.reply.inventory import ARTS, emoji, pictures
from shoestring_recipes.retrieval.mining import vectors
from shoestring_recipes.retrieval.words import terms

CHUNK = 256
"""Number of clips that are encoded at a time."""
_READ = 8192
"""Maximum number of characters of a message that are read."""


def vocabulary(texts: Iterable[str]) -> frozenset[str]:
    """Return the stems of all words of texts."""
    return frozenset(stem for text in texts for stem in terms(text))


def known_words(text: str, known: frozenset[str]) -> str:
    """Leave out the words of a text whose stems are not `known`, because an encoder maps a word that it has never seen
    to a random vector; if no word is known, return the text."""
    return " ".join(word for word in text[:_READ].split() if known & set(terms(word))) or text


def read_by(model: Any, text: str, known: frozenset[str]) -> str:
    """Return what a model's encoder reads of a text: all of it if it is pretrained, otherwise the `known_words`."""
    return text if model.texts.reader.folder else known_words(text, known)


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
    for start in range(0, len(tags), CHUNK):
        rows = model.texts.reader.rows(tags[start : start + CHUNK])
        parts.append(model.clip(rows.to(device), frames[start : start + CHUNK].to(device)).float().cpu())
    return torch.cat(parts)


def described(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the vectors of messages and of all emoji, `text` and `emoji`; or those of clips and of all texts that
    emoji answer, `clip` and `texts`."""
    if "message" in batch:
        messages = [read_by(model, message, taught()) for message in batch["message"]]
        return {"text": of_texts(model, messages), "emoji": _of_emoji(model)}
    return {"clip": of_clips(model, batch["words"], batch["frames"].cpu()), "texts": _of_answered(model)}


def best(queries: Tensor, candidates: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the numbers and cosines of the best candidates for each query, the best first.

    Args:
        queries, candidates: vectors of norm 1, (N, D).
    """
    top = (queries @ candidates.T).topk(min(count, len(candidates)), dim=1)
    columns = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in columns]


@cache
def taught() -> frozenset[str]:
    """Return the stems of the words of all emoji's tags and texts."""
    return vocabulary([*answered(), *(one.tags for one in emoji())])


@lru_cache(1)
def _of_emoji(model: nn.Module) -> Tensor:
    return of_clips(model, [one.tags for one in emoji()], corners(pictures(ARTS[0])))


@lru_cache(1)
def _of_answered(model: nn.Module) -> Tensor:
    return of_texts(model, answered())


def answered() -> list[str]:
    """Return the texts that emoji answer, without repetitions."""
    return list(dict.fromkeys(text for one in emoji() for text in one.texts))
