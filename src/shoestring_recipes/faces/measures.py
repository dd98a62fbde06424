"""Measures mask classification and the recognition of people, as numbers, tables and images."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.core.errors import DataError
from shoestring.core.feature import Table
from shoestring_recipes.faces.occluders import KINDS, MASKS

Values = NDArray[Any]


def recalls(masked: Values, kinds: Sequence[str]) -> dict[str, float]:
    """Return the fraction of correctly classified faces (masked or not) for each kind of cover that occurs.

    Args:
        masked: prediction for each face; bool, (N,). kinds: name of the cover of each face.
    """
    names = np.asarray(kinds)
    return {kind: float((masked[names == kind] == (kind in MASKS)).mean()) for kind in KINDS if (names == kind).any()}


def balanced(recall: Mapping[str, float], kinds: Collection[str]) -> float:
    """Return the balanced accuracy over `kinds`: the average of the mean recall of masks and the mean recall of other
    kinds. The result is NaN if there are no masks or no other kinds."""
    sides = [[recall[kind] for kind in kinds if kind in recall and (kind in MASKS) == side] for side in (True, False)]
    return float(np.mean([float(np.mean(side)) if side else np.nan for side in sides]))


def ranks(similarity: Values, own: Values) -> Values:
    """Return the rank of each query's own face in the gallery by similarity, counted from 1; among equal similarities
    the own face comes last.

    Args:
        similarity: (queries, gallery). own: index of each query's own face in the gallery, (queries,).

    Raises:
        DataError: a similarity is NaN.
    """
    if np.isnan(similarity).any():
        raise DataError("a similarity is not a number", hint="lower the learning rate")
    return (similarity >= similarity[np.arange(len(own)), own][:, None]).sum(1)


def report(
    masked: Mapping[str, Values],
    kinds: Sequence[str],
    untaught: Collection[str],
    similarity: Mapping[str, Values],
    own: Values,
) -> dict[str, Any]:
    """Return the metrics of the first method, except those for which samples are missing, and tables of all methods.

    Args:
        masked: prediction of each method for each face; bool, (N,). kinds: name of the cover of each face. untaught:
            kinds of cover that were left out of training.
        similarity: similarities of masked faces and the gallery by each method, (queries, gallery). own: see `ranks`.
    """
    by_method = {name: recalls(answers, kinds) for name, answers in masked.items()}
    taught = [kind for kind in KINDS if kind not in untaught]
    accuracy = {name: (balanced(recall, taught), balanced(recall, untaught)) for name, recall in by_method.items()}
    first = next(iter(masked))
    head = ("kind", "taught", *by_method)
    rows = tuple(
        (kind, "no" if kind in untaught else "yes", *(recall[kind] for recall in by_method.values()))
        for kind in by_method[first]
    )
    results: dict[str, Any] = {
        "methods": Table(
            title="Masked or not: balanced accuracy on other people",
            head=("method", "taught kinds", "other kinds"),
            rows=tuple((name, *values) for name, values in accuracy.items()),
        ),
        "kinds": Table(title="Recall by what covers the face", head=head, rows=rows),
    }
    numbers = dict(zip(("taught", "untaught"), accuracy[first], strict=True))
    if len(own):
        places = {name: ranks(rows, own) for name, rows in similarity.items()}
        shares = {name: [float((place <= most).mean()) for most in (1, 5)] for name, place in places.items()}
        numbers["rank_1"] = shares[first][0]
        results["people"] = Table(
            title="Masked people found among all",
            head=("method", "first", "among five"),
            rows=tuple((name, *values) for name, values in shares.items()),
            note="Masks of the kind that was not taught, people who were not taught, probes from the same photos.",
        )
    return {name: value for name, value in numbers.items() if np.isfinite(value)} | results


def overlay(image: Values, covered: Values) -> Values:
    """Draw a face, uint8 (H, W), and beside it the same face with the cover in red: uint8 (H, 2 W, 3).

    Args:
        covered: covered fraction of each cell, from 0 to 1, (H / cell, W / cell).
    """
    grey = np.repeat(image[:, :, None], 3, 2)
    cell = len(image) // len(covered)
    share = np.kron(covered, np.ones((cell, cell)))[:, :, None]
    return np.concatenate([grey, grey * (1 - 0.6 * share) + 0.6 * share * (255, 0, 0)], 1).round().astype(np.uint8)
