"""Draws tokens from logits, with each request's sampling settings and the random numbers of each position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.decode.randomness import race
from shoestring.decode.sampling import penalize, probabilities
from shoestring.decode.settings.generation import Sampling


class Positions(NamedTuple):
    """T consecutive positions of a text for which tokens are to be drawn."""

    logits: Tensor
    """(T, V) logits after each of the last T tokens of `text`."""
    text: Sequence[int]
    """Prompt, generated tokens and drafted tokens, up to the last token that the model has read."""
    sampling: Sampling
    keys: Sequence[int]
    """Key of the random numbers of each position; see `randomness.key`."""


class Drawn(NamedTuple):
    """Drawn tokens, and the distributions (T, V) that they were drawn from; `chances` is None if sampling is greedy."""

    tokens: list[int]
    chances: Tensor | None


def draw(rows: Sequence[Positions]) -> list[Drawn]:
    """Draw a token for each position of each row. Rows with equal sampling settings are computed in one batch, in which
    they do not influence each other."""
    alike: dict[Sampling, list[int]] = defaultdict(list)
    for row, positions in enumerate(rows):
        alike[replace(positions.sampling, seed=0) if len(rows) > 1 else positions.sampling].append(row)
    drawn: dict[int, Drawn] = {}
    for sampling, group in alike.items():
        logits = torch.cat([penalize(rows[row].logits, rows[row].text, sampling.repetition_penalty) for row in group])
        if sampling.greedy:
            tokens, chances = logits.argmax(-1).tolist(), None
        else:
            chances = probabilities(logits, sampling)
            tokens = race(chances, [key for row in group for key in rows[row].keys])
        start = 0
        for row in group:
            end = start + len(rows[row].logits)
            drawn[row] = Drawn(tokens[start:end], None if chances is None else chances[start:end])
            start = end
    return [drawn[row] for row in range(len(rows))]
