"""Tokens drawn from logits, by the sampling that each request asks for and the random numbers of its positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.decode.randomness import race
from shoestring.decode.sampling import penalize, probabilities
from shoestring.decode.settings import Sampling


class Positions(NamedTuple):
    """Positions of one text whose tokens are wanted, T of them."""

    logits: Tensor
    """(T, V), of the tokens that follow the last T of `text`."""
    text: Sequence[int]
    """Prompt, text, and what is drafted, up to and with the last token that was read."""
    sampling: Sampling
    keys: Sequence[int]
    """The random numbers of the positions."""


class Drawn(NamedTuple):
    """Tokens of the positions, and what they were drawn from, (T, V): None where each was the likeliest."""

    tokens: list[int]
    chances: Tensor | None


def draw(rows: Sequence[Positions]) -> list[Drawn]:
    """A token for each position of each row. Rows that sample alike are computed together, and none sees another."""
    alike: dict[Sampling, list[int]] = defaultdict(list)
    for row, positions in enumerate(rows):
        alike[replace(positions.sampling, seed=0)].append(row)
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
