"""Runs the classical methods on the samples with which a network is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring_recipes.faces.classical import contest, cosines, described, similarities
from shoestring_recipes.faces.crops import PEOPLE, faces
from shoestring_recipes.faces.measures import report
from shoestring_recipes.faces.occluders import MASKS
from shoestring_recipes.faces.people import CoveredFaces

Values = NDArray[Any]


@dataclass(frozen=True)
class Judged:
    """Results of the classical methods on test samples, and which of the samples are queries in the search for
    people."""

    kinds: list[str]
    """Kind of cover of each face, such as `surgical` or `none`."""
    untaught: list[str]
    """Kinds of cover that were left out of training."""
    queries: Values
    """Whether a sample is a query, which means that its mask is of a kind left out of training; bool, (N,)."""
    own: Values
    """The number of the person in each query, (queries,)."""
    masked: dict[str, Values]
    """Maps a method to its predictions whether faces are masked; bool, (N,)."""
    similarity: dict[str, Values]
    """Maps a method to the similarities of queries and all people's bare faces, (queries, PEOPLE)."""

    def beside(self, masked: Values, embedding: Values, gallery: Values) -> dict[str, Any]:
        """Return the report of a network in comparison with the classical methods.

        Args:
            masked: the network's prediction whether each face is masked; bool, (N,). embedding: embedding of each face,
                (N, dimensions).
            gallery: embeddings of the bare faces, (PEOPLE, dimensions).
        """
        alike = {"network": cosines(embedding[self.queries], gallery), **self.similarity}
        return report({"network": masked, **self.masked}, self.kinds, self.untaught, alike, self.own)


def bare_faces() -> Tensor:
    """Return the bare faces of all people as inputs of the network: uint8 (PEOPLE, 1, SIZE, SIZE)."""
    return torch.from_numpy((255 * faces()).round().astype(np.uint8))[:, None]


def pictures(samples: CoveredFaces, count: int) -> NDArray[np.uint8]:
    """Return the covered faces of the first `count` samples, with shape (count, SIZE, SIZE)."""
    return np.stack([samples[index]["inputs"][0].numpy() for index in range(count)])


@lru_cache(1)
def classical(samples: CoveredFaces, count: int) -> Judged:
    """Train all classical methods on the network's training samples, and run them on the first `count` samples."""
    teacher = samples.teacher
    assert teacher is not None
    taught, judged = pictures(teacher, len(teacher)), pictures(samples, count)
    labels = {
        name: np.array([int(teacher[index][name]) for index in range(len(teacher))]) for name in ("targets", "people")
    }
    kinds = [samples.kind(index) for index in range(count)]
    untaught = [kind for kind in samples.kinds if kind not in teacher.kinds]
    queries = np.array([kind in untaught and kind in MASKS for kind in kinds])
    real = labels["people"] < PEOPLE
    bare = bare_faces()[:, 0].numpy()
    alike = similarities(taught[real], labels["people"][real], judged[queries], bare) if queries.any() else {}
    own = np.array([samples.person(index) for index in np.flatnonzero(queries).tolist()], int)
    answers = contest(described(taught), labels["targets"], described(judged))
    return Judged(kinds, untaught, queries, own, answers, alike)
