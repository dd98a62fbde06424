"""Classical methods on the samples that a network is judged by."""

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
    """What classical methods say of samples, and which of them are queries for their people."""

    kinds: list[str]
    """What covers each face."""
    untaught: list[str]
    """Kinds that were left out of training."""
    queries: Values
    """Whether a sample is a query, masked by a kind that was left out: (N,) of bool."""
    own: Values
    """The person of each query, (queries,)."""
    masked: dict[str, Values]
    """Whether each face is masked by each method: (N,) of bool."""
    similarity: dict[str, Values]
    """How alike queries and the bare faces of all people are by each method: (queries, PEOPLE)."""

    def beside(self, masked: Values, embedding: Values, gallery: Values) -> dict[str, Any]:
        """The report of a network, beside those methods.

        Args:
            masked: whether each face is masked, (N,) of bool. embedding: of each face, (N, dimensions).
            gallery: embeddings of the bare faces, (PEOPLE, dimensions).
        """
        alike = {"network": cosines(embedding[self.queries], gallery), **self.similarity}
        return report({"network": masked, **self.masked}, self.kinds, self.untaught, alike, self.own)


def bare_faces() -> Tensor:
    """The bare faces of all people as the network takes them: uint8 (PEOPLE, 1, SIZE, SIZE)."""
    return torch.from_numpy((255 * faces()).round().astype(np.uint8))[:, None]


def pictures(samples: CoveredFaces, count: int) -> NDArray[np.uint8]:
    """The covered faces of the first samples: (count, SIZE, SIZE)."""
    return np.stack([samples[index]["inputs"][0].numpy() for index in range(count)])


@lru_cache(1)
def classical(samples: CoveredFaces, count: int) -> Judged:
    """All classical methods on the first samples, taught by what the network was taught by."""
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
