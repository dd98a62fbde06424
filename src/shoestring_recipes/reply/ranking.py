"""Ranks of the right reply by several methods, and measures computed from the ranks for groups of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import shoestring as ss
from shoestring_recipes.retrieval.lexical import Index, Values, chosen
from shoestring_recipes.retrieval.words import terms

Text = tuple[int, str]
"""The number of the reply that belongs to a text, and the text."""
TOP, DEPTH = 10, 30
"""Numbers of best replies that recall and the discounted cumulative gain take into account."""
HELD_OUT = "held-out texts"
SHARED, UNSHARED = f"{HELD_OUT} that share a word with the tags", f"{HELD_OUT} that share no word with the tags"
UNTAUGHT = "texts of emoji that were not taught"
"""Names of groups of texts. `HELD_OUT` consists of `SHARED` and `UNSHARED`."""
OURS, BM25, FROZEN = "two encoders", "BM25 over tags", "the frozen encoder over tags"


def recall(places: Values) -> Values:
    """Return whether the right reply is among the first `TOP`, for ranks from 1."""
    return (places <= TOP).astype(float)


def gain(places: Values) -> Values:
    """Return the normalized discounted cumulative gain of the first `DEPTH` replies, one of which is right: 1 divided
    by log2(1 + rank)."""
    return np.where(places <= DEPTH, 1 / np.log2(1 + places), 0.0)


MEASURES = {"recall_10": recall, "ndcg_30": gain}


def ranks(scores: Values, own: Sequence[int]) -> Values:
    """Return the rank of each text's own reply, from 1. Among equal scores the own reply comes last, so that constant
    scores find nothing.

    Args:
        scores: (texts, replies). own: number of the own reply of each text.
    """
    right = np.take_along_axis(scores, np.asarray(own)[:, None], 1)
    return (scores >= right).sum(1)


def by_words(texts: Sequence[str], tags: Sequence[str], validation: Sequence[Text]) -> Values:
    """Return BM25's scores of replies by their tags, (texts, replies), with the settings that are best for
    `validation`, which has at most one text for each reply."""
    first = [number for number, _ in validation]
    others = sorted(set(range(len(tags))) - set(first))
    settings = chosen(tuple(text for _, text in validation), tuple(tags[number] for number in [*first, *others]))
    return Index(tags, settings).scores(texts)


def groups_of(
    texts: Sequence[str], own: Sequence[int], tags: Sequence[str], untaught: Sequence[int]
) -> dict[str, Values]:
    """Map the name of each group to whether each text belongs to it, bool (texts,)."""
    stems = [set(terms(words)) for words in tags]
    shared = np.array([bool(set(terms(text)) & stems[number]) for text, number in zip(texts, own, strict=True)], bool)
    new = np.isin(np.asarray(own), np.asarray(untaught))
    return {HELD_OUT: ~new, SHARED: shared & ~new, UNSHARED: ~shared & ~new, UNTAUGHT: new}


@dataclass(frozen=True)
class ReplyComparison:
    """Ranks of the right reply by several methods."""

    ranks: dict[str, Values]
    """Maps a method's name to the ranks, from 1, (texts,)."""
    groups: dict[str, Values]
    """Maps a group's name to its texts, bool (texts,)."""

    def figure(self, method: str, group: str, measure: str) -> float:
        """Return the mean of a measure over the texts of a group; NaN if there are none."""
        values = MEASURES[measure](self.ranks[method][self.groups[group]])
        return float(values.mean()) if len(values) else float("nan")

    def report(self) -> dict[str, Any]:
        """Return the figures and tables of an evaluation."""
        figures = {measure: self.figure(OURS, HELD_OUT, measure) for measure in MEASURES}
        for measure in MEASURES:
            figures[f"{measure}_unshared"] = self.figure(OURS, UNSHARED, measure)
            figures[f"{measure}_untaught"] = self.figure(OURS, UNTAUGHT, measure)
            figures[f"{measure}_bm25"] = self.figure(BM25, HELD_OUT, measure)
        tables = {
            group: ss.Table(
                title=f"Replies to {group}: {int(texts.sum()):,}",
                head=("method", f"recall at {TOP}", f"nDCG at {DEPTH}"),
                rows=tuple((method, *(self.figure(method, group, one) for one in MEASURES)) for method in self.ranks),
            )
            for group, texts in self.groups.items()
            if texts.any()
        }
        return {name: value for name, value in figures.items() if value == value} | tables


def compared(
    texts: Sequence[Text],
    tags: Sequence[str],
    scores: Mapping[str, Values],
    untaught: Sequence[int],
    validation: Sequence[Text],
) -> ReplyComparison:
    """Compare methods with BM25 over tags.

    Args:
        texts: number of the right reply of each text, and the text.
        tags: words of each reply.
        scores: (texts, replies), by the methods' names.
        untaught: numbers of the replies none of whose texts were taught.
        validation: texts on which BM25 is tuned; see `by_words`.
    """
    own, words = zip(*texts, strict=True)
    methods = {BM25: by_words(words, tags, validation)} | dict(scores)
    places = {name: ranks(rows, own) for name, rows in methods.items()}
    return ReplyComparison(places, groups_of(words, own, tags, untaught))
