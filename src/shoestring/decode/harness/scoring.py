"""Log-probabilities of continuations, computed for many texts at once.

A context that several texts share, such as the question before several choices, is read once, into one row of the
cache; this row is then copied to the rows of the other texts. Continuations that differ only in their last token share
a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import Adapter, Whole

Tokens = tuple[int, ...]


class Score(NamedTuple):
    """The likelihood of a continuation after its context."""

    logprob: float
    """Natural logarithm of the continuation's probability."""
    greedy: bool
    """Whether each token of the continuation is the likeliest one at its position."""


@dataclass(frozen=True)
class _TargetWindow:
    """Tokens to score, which fit into the model's context together with the tokens before them."""

    pair: int
    """Index of the pair that the tokens belong to."""
    context: Tokens
    targets: Tokens
    last: bool
    """Whether this is the last window of its pair."""


@dataclass(frozen=True)
class _Row:
    """Tokens to read for one or several windows, whose targets differ only in the last token."""

    context: Tokens
    targets: Tokens
    """The targets that the windows have in common: all but the last target of a window."""
    windows: list[_TargetWindow]

    @property
    def tokens(self) -> Tokens:
        return self.context + self.targets


def score(
    adapter: Adapter,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch: int,
    done: Callable[[int], object] = lambda _: None,
) -> list[Score]:
    """Score the continuations of (context, continuation) pairs of tokens; the pairs may be in any order.

    If a pair does not fit into the model's context, the oldest tokens of its own context are left out. A continuation
    that does not fit is scored in windows that begin with as many earlier tokens as fit; every token is scored once.

    Args:
        pairs: contexts have at least one token; an empty continuation has the log-probability 0.
        batch: number of texts in a forward pass.
        done: called after each pass with the number of pairs whose last window was scored.

    Raises:
        ConfigError: a token is not in the model's vocabulary.
    """
    windows: list[_TargetWindow] = []
    size = adapter.context
    for index, (context, continuation) in enumerate(pairs):
        text = (*context, *continuation)
        for start in range(len(context), len(text), size):
            end = min(start + size, len(text))
            # A window may have `size` + 1 tokens, because its last token is scored but not read.
            before = text[max(0, end - size - 1) : start]
            windows.append(_TargetWindow(index, before, text[start:end], end == len(text)))
    # Refuse tokens outside the vocabulary; on a GPU, an index out of range would end the process.
    largest = max((max(window.context + window.targets) for window in windows), default=0)
    if adapter.vocabulary is not None and largest >= adapter.vocabulary:
        raise ConfigError(
            f"the text holds token {largest}, but the model has {adapter.vocabulary} tokens",
            hint="use the tokenizer that the model was trained with",
        )
    scores = [Score(0.0, True)] * len(pairs)
    shares = adapter.pieces and not isinstance(adapter, Whole)
    for rows in _batches(windows, batch, shares=shares):
        for row, logits in zip(rows, _read(adapter, rows, shares=shares), strict=True):
            # The log-probabilities are computed in at least float32, because softmax in a narrower type loses digits.
            logits = logits if logits.dtype == torch.float64 else logits.float()
            total, best = logits.logsumexp(-1), logits.argmax(-1)
            for window in row.windows:
                targets = torch.tensor(window.targets, device=logits.device)
                logprob = (logits.gather(-1, targets[:, None])[:, 0] - total).sum()
                earlier = scores[window.pair]
                scores[window.pair] = Score(
                    earlier.logprob + float(logprob), earlier.greedy and bool((best == targets).all())
                )
        done(sum(window.last for row in rows for window in row.windows))
    return scores


def _batches(windows: Sequence[_TargetWindow], size: int, *, shares: bool) -> Iterator[list[_Row]]:
    """Arrange windows in batches of at most `size` rows, longest first: if memory suffices for the first batch, it
    suffices for all. In a batch, the first row of each distinct context comes before all other rows.

    Args:
        shares: whether to put rows with the same context into the same batch if possible, to read the context once.
    """
    rows: dict[tuple[Tokens, Tokens], _Row] = {}
    for window in windows:
        targets = window.targets[:-1]
        rows.setdefault((window.context, targets), _Row(window.context, targets, [])).windows.append(window)
    groups: dict[Tokens, list[_Row]] = {}
    for row in sorted(rows.values(), key=lambda row: (-len(row.targets), row.targets)):
        groups.setdefault(row.context if shares else row.tokens, []).append(row)
    # The order depends on the tokens alone, not on the order of the pairs.
    longest_first = sorted(groups.items(), key=lambda group: (-max(len(row.tokens) for row in group[1]), group[0]))
    ordered = [row for _, rows in longest_first for row in rows]
    for start in range(0, len(ordered), size):
        leaders = {row.context: row for row in reversed(ordered[start : start + size])}
        yield sorted(ordered[start : start + size], key=lambda row: leaders[row.context] is not row)


def _read(adapter: Adapter, rows: Sequence[_Row], *, shares: bool) -> list[Tensor]:
    """Logits (T, V) after the last token of each row's context and after each of its targets.

    Args:
        rows: with `shares`, the first rows have distinct contexts, and each other row has one of these contexts.
    """
    cache = adapter.new_cache(len(rows), max(len(row.tokens) for row in rows))
    # Logits are computed only from the last context token on, because logits over a large vocabulary take most of the
    # memory.
    heads = [row.context[:-1] if shares else () for row in rows]
    if any(heads):
        contexts = list(dict.fromkeys(row.context for row in rows))
        counts = [len(context) - 1 for context in contexts]
        first = _padded(heads[: len(contexts)])
        adapter.read(first, cache, rows=slice(0, len(contexts)), counts=counts, wanted="last")
        for index in range(len(contexts), len(rows)):
            cache.copy(contexts.index(rows[index].context), index, len(heads[index]))
    tails = [row.tokens[len(head) :] for row, head in zip(rows, heads, strict=True)]
    logits = adapter.read(_padded(tails), cache, counts=[len(tail) for tail in tails])
    return [
        logits[index, len(tail) - len(row.targets) - 1 : len(tail)]
        for index, (row, tail) in enumerate(zip(rows, tails, strict=True))
    ]


def _padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """Pad texts of different lengths to one tensor (B, T), int64."""
    length = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (length - len(text))] for text in texts])
