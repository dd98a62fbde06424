"""Reads messages and clips from files, for `run.read_file`, and finds replies or texts to match, for `run.predict`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shoestring as ss
from shoestring.core.errors import DataError
from shoestring.storage import foreign
from shoestring_recipes.reply.clips import corners, format_of, read_clip
from shoestring_recipes.reply.inventory import ARTS, emoji, pictures
from shoestring_recipes.reply.matching import answered, best
from shoestring_recipes.retrieval.files import read as read_text

SHOWN = 3
"""Number of replies shown for a message, and of texts shown for a clip."""


def read(path: Path) -> dict[str, Any]:
    """Read a message, from plain text or HTML, as `message`; or a clip (GIF, WebP, MP4) as `frames` and `words`, the
    words of its name.

    Raises:
        DataError: the file is neither a message nor a clip, is damaged, or has no words.
    """
    try:
        with foreign.open_file(path) as file:
            head = file.read(16)
    except OSError as error:
        raise DataError(f"`{path.name}` cannot be read: {error.strerror or error}") from error
    if format_of(head):
        return {"frames": read_clip(path), "words": words_of(path)}
    return {"message": read_text(path)["text"]}


def words_of(path: Path) -> str:
    """Return the words of a file's name, which serve as the tags of a clip."""
    return re.sub(r"[\W_]+", " ", path.stem).strip()


def describe(output: dict[str, Tensor], batch: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the best replies to each message: a row for each, with the cosine as its score and the frames of the clip
    beside each other. For clips return the texts that they answer best."""
    queries, candidates, row_of = ("text", "emoji", _reply) if "message" in batch else ("clip", "texts", _text)
    return [
        [{"place": place, **row_of(number), "score": score} for place, (number, score) in enumerate(row, 1)]
        for row in best(output[queries], output[candidates], SHOWN)
    ]


def _reply(number: int) -> dict[str, Any]:
    one = emoji()[number]
    (frames,) = corners(pictures(ARTS[0])[number : number + 1])
    return {"reply": one.character, "name": one.name, "clip": ss.Picture(pixels=torch.cat(list(frames), 2))}


def _text(number: int) -> dict[str, Any]:
    return {"text": answered()[number]}
