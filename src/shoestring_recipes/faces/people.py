"""Covered faces of people: those to teach by, and those of other people to judge by, with two kinds never taught."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError
from shoestring_recipes.faces.crops import PEOPLE, SIZE, faces
from shoestring_recipes.faces.occluders import KINDS, LOOK_ALIKES, MASKS, cover, spoilt

CELLS = len(MASKS) * len(LOOK_ALIKES)
"""Number of ways to leave out a kind of mask and a look-alike."""
TAUGHT_PEOPLE = 70
CELL = 4
"""Height and width in pixels of what the network says whether it is covered."""


class CoveredFaces(Dataset[dict[str, Tensor]]):
    """Faces with something over them or nothing, made when they are first asked for.

    Samples have `inputs`, uint8 (2, SIZE, SIZE), the face as one camera shows it, covered, and as another does, bare;
    `cover`, the covered share of each cell; `targets`, 1 if it is masked; `kinds`, its place in `KINDS`; `people`.

    Args:
        people: the numbers of the people. kinds: names of what covers them; masks and others take turns.
        views: number of samples of each person. seed: samples of two seeds differ.
        teacher: the samples that a model was taught by which these judge. None teaches by these: with any fill, and
            with two people mixed to a third in half of the samples.
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
        """What covers the face of a sample: each kind of a side as often, give or take one."""
        view, masked = index // len(self.people) // 2, index // len(self.people) % 2
        side = [kind for kind in self.kinds if (kind in MASKS) == bool(masked)]
        return side[(view + index % len(self.people)) % len(side)]

    def person(self, index: int) -> int:
        """Whose face a sample shows, of those to judge by."""
        return self.people[index % len(self.people)]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index not in self._samples:
            self._samples[index] = self._made(index)
        return self._samples[index]

    def _made(self, index: int) -> dict[str, Tensor]:
        draws = np.random.default_rng([self.seed, index])
        person, kind = self.person(index), self.kind(index)
        face = faces()[person].astype(float)
        if self.teacher is None and draws.random() < 0.5:  # more people than there are photos
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
    """The kind of mask and the look-alike that a cell leaves out of training."""
    if not 0 <= cell < CELLS:
        raise ConfigError(f"data.arguments.cell is {cell}", hint=f"use 0 to {CELLS - 1}")
    return tuple(MASKS)[cell % len(MASKS)], LOOK_ALIKES[cell % len(LOOK_ALIKES)]


def data(cell: int = 0, seed: int = 0, views: int = 64, held_views: int = 20) -> tuple[CoveredFaces, CoveredFaces]:
    """Faces of 70 people to train on, without a kind of mask and a look-alike; and of the other 30, with all kinds.

    Args:
        cell: which kinds are left out: 0 to 11. seed: seed of the partition of people and of what is drawn.
        views: number of samples of each taught person. held_views: of each other person.
    """
    order = np.random.default_rng(seed).permutation(PEOPLE).tolist()
    kinds = tuple(kind for kind in KINDS if kind not in left_out(cell))
    taught = CoveredFaces(order[:TAUGHT_PEOPLE], kinds, views, 2 * seed)
    return taught, CoveredFaces(order[TAUGHT_PEOPLE:], KINDS, held_views, 2 * seed + 1, taught)
