"""Data sets of covered faces: some people for training and others for evaluation, with two kinds of cover left out of
training."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError
from shoestring_recipes.faces.crops import PEOPLE, SIZE, faces
from shoestring_recipes.faces.occluders import KINDS, LOOK_ALIKES, MASKS, cover, spoilt

CELLS = len(MASKS) * len(LOOK_ALIKES)
"""Number of ways to leave out one kind of mask and one look-alike."""
TAUGHT_PEOPLE = 70
CELL = 4
"""Height and width, in pixels, of the cells whose cover the network predicts."""


class CoveredFaces(Dataset[dict[str, Tensor]]):
    """A data set of faces with and without cover; samples are drawn on first access.

    A sample has `inputs`, uint8 (2, SIZE, SIZE), the covered face and the bare face as two cameras show them; `cover`,
    the covered fraction of each cell; `targets`, 1 if the face is masked; `kinds`, the index of the cover in `KINDS`;
    and `people`, the number of the person.

    Args:
        people: numbers of the people. kinds: names of the covers; samples alternate between masks and other kinds.
        views: number of samples of each person. seed: seed of all random choices.
        teacher: the training samples of the model that these samples evaluate. None means that these samples are for
            training: covers have any fill, and half of the samples mix two people's faces into a new person.
    """

    draws = False

    def __init__(
        self, people: list[int], kinds: tuple[str, ...], views: int, seed: int, teacher: CoveredFaces | None = None
    ) -> None:
        self.people, self.views, self.seed, self.teacher = people, views, seed, teacher
        self.kinds = [kind for kind in KINDS if kind in kinds]
        self.fingerprint = f"{people} {kinds} {views} {seed} {teacher is None}"
        self._samples: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self.views * len(self.people)

    def kind(self, index: int) -> str:
        """Return the kind of cover of a sample; masks occur equally often, up to a difference of one, and so do other
        kinds."""
        view, masked = index // len(self.people) // 2, index // len(self.people) % 2
        side = [kind for kind in self.kinds if (kind in MASKS) == bool(masked)]
        return side[(view + index % len(self.people)) % len(side)]

    def person(self, index: int) -> int:
        """Return the number of the person whose photo a sample shows; in training, another face may be mixed in."""
        return self.people[index % len(self.people)]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index not in self._samples:
            self._samples[index] = self._made(index)
        return self._samples[index]

    def _made(self, index: int) -> dict[str, Tensor]:
        draws = np.random.default_rng([self.seed, index])
        person, kind = self.person(index), self.kind(index)
        face = faces()[person].astype(float)
        if self.teacher is None and draws.random() < 0.5:  # mixed faces make more people than there are photos
            face = 0.55 * face + 0.45 * faces()[draws.choice(self.people)][:, :: draws.choice((1, -1))]
            person = PEOPLE + index
        views = [spoilt(cover(face, name, draws, self.teacher is None), draws) for name in (kind, "none")]
        pixels = np.stack([view.picture for view in views])
        covered = views[0].cover.reshape(SIZE // CELL, CELL, SIZE // CELL, CELL).mean((1, 3))
        numbers = {"targets": int(kind in MASKS), "kinds": KINDS.index(kind), "people": person}
        return {
            "inputs": torch.from_numpy((255 * pixels).round().astype(np.uint8)),
            "cover": torch.from_numpy(covered.astype(np.float32)),
            **{name: torch.tensor(number) for name, number in numbers.items()},
        }


def left_out(cell: int) -> tuple[str, str]:
    """Return the kind of mask and the look-alike that the cell number `cell` leaves out of training."""
    if not 0 <= cell < CELLS:
        raise ConfigError(f"data.arguments.cell is {cell}", hint=f"use 0 to {CELLS - 1}")
    return tuple(MASKS)[cell % len(MASKS)], LOOK_ALIKES[cell % len(LOOK_ALIKES)]


def data(cell: int = 0, seed: int = 0, views: int = 64, held_views: int = 20) -> tuple[CoveredFaces, CoveredFaces]:
    """Return training samples of 70 people, without one kind of mask and one look-alike, and test samples of the other
    30 people with all kinds.

    Args:
        cell: number from 0 to 11 that selects the kinds left out of training. seed: seed of the partition of people and
            of the drawn covers.
        views: number of samples of each training person. held_views: number of samples of each test person.
    """
    order = np.random.default_rng(seed).permutation(PEOPLE).tolist()
    kinds = tuple(kind for kind in KINDS if kind not in left_out(cell))
    taught = CoveredFaces(order[:TAUGHT_PEOPLE], kinds, views, 2 * seed)
    return taught, CoveredFaces(order[TAUGHT_PEOPLE:], KINDS, held_views, 2 * seed + 1, taught)
