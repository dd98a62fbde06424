"""Ladders of distorted crops, the loss that puts their levels in order, and its measures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError
from shoestring.training.held_out import HeldOut
from shoestring_recipes.quality.distortions import FAMILIES, KINDS, ladder
from shoestring_recipes.quality.measures import gmsd, report
from shoestring_recipes.quality.photos import crops, photos

FOLDS = len(FAMILIES)
TEMPERATURE = 0.1
"""Difference of scores at which a pair is more or less certain."""
WORST = 0.3
"""GMSD of the quality 0."""


class Ladders(Dataset[dict[str, Tensor]]):
    """Crops with their levels of one kind of distortion; a sample has `inputs`, uint8 (6, H, W), `quality`, (6,), and
    the number of the kind.

    Args:
        pictures: uint8 (N, 6, H, W), from the weakest to the strongest distortion.
        kinds: number of each ladder's kind, (N,). sources: number of its photo.
        seen: whether kinds were taught.
    """

    draws = False

    def __init__(self, pictures: Tensor, kinds: Tensor, sources: Tensor, seen: Tensor) -> None:
        self.pictures, self.kinds, self.sources, self.seen = pictures, kinds, sources, seen
        self.quality = torch.stack([1 - gmsd(one[:1].expand_as(one), one) / WORST for one in pictures])
        self.fingerprint = hashlib.blake2b(pictures.numpy().tobytes(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.pictures[index], "quality": self.quality[index], "targets": self.kinds[index]}


def partition(fold: int, seed: int) -> tuple[set[int], tuple[str, ...]]:
    """The numbers of the photos that are held out, and the kinds that are not taught."""
    if not 0 <= fold < FOLDS:
        raise ConfigError(f"data.arguments.fold is {fold}", hint=f"use 0 to {FOLDS - 1}")
    order = np.random.default_rng(seed).permutation(len(photos()))
    return set(order[fold::FOLDS].tolist()), FAMILIES[(fold + seed) % FOLDS]


def data(fold: int = 0, seed: int = 0, crops_each: int = 4) -> tuple[Ladders, Ladders]:
    """Ladders to train on, of four fifths of the photos and eight kinds; and all kinds of the other photos.

    Args:
        fold: which fifth of the photos, and which two kinds, are held out.
        seed: seed of the partition, of the crops and of the distortions.
        crops_each: number of crops of each photo.
    """
    held_out, left_out = partition(fold, seed)
    draws = np.random.default_rng(seed)
    rows: dict[bool, list[tuple[Tensor, int, int, bool]]] = {False: [], True: []}
    for source, photo in enumerate(photos().values()):
        for crop in crops(photo, crops_each, draws):
            for number, kind in enumerate(KINDS):
                pictures = torch.from_numpy(ladder(crop.numpy(), kind, int(draws.integers(2**31))))
                rows[source in held_out].append((pictures, number, source, kind not in left_out))
    return _ladders([row for row in rows[False] if row[3]]), _ladders(rows[True])


def _ladders(rows: Sequence[tuple[Tensor, int, int, bool]]) -> Ladders:
    pictures, *columns = zip(*rows, strict=True)
    return Ladders(torch.stack(pictures), *map(torch.tensor, columns))


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Scores (N, L, …) of ladders; in training a ladder is mirrored as a whole, at random along both axes."""
    x = batch["inputs"]
    if model.training:
        for axis in (-1, -2):
            flips = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
            x = torch.where(flips, x.flip(axis), x)
    return model(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def ordered(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Each level above all stronger ones of its ladder (RankNet, Burges et al., 2005), and scores near the measured
    quality, which makes those of several kinds comparable."""
    weaker, stronger = torch.triu_indices(output.shape[1], output.shape[1], 1, device=output.device)
    pairs = F.softplus((output[:, stronger] - output[:, weaker]) / TEMPERATURE).mean(1)
    near, count = rated(output, batch)
    return pairs.sum() + near, count


def rated(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Scores near the quality, for pictures that people have rated."""
    quality = batch["quality"].to(output.dtype)
    return F.smooth_l1_loss(output, quality, reduction="none", beta=TEMPERATURE).mean(1).sum(), len(output)


def kind(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The cross-entropy of naming each level's kind of distortion, which teaches a backbone without levels."""
    logits, targets = output[:, 1:], batch["targets"][:, None].expand(-1, output.shape[1] - 1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def measure(model: nn.Module, held_out: HeldOut) -> dict[str, Any]:
    """Pairs in the right order and agreement with GMSD, of taught kinds and of others, and of each kind."""
    samples = held_out.dataset
    assert isinstance(samples, Ladders)
    scores = held_out.gather(torch.cat([held_out.forward(model, batch) for batch in held_out])).double().cpu().numpy()
    kinds, seen, quality = (column[: len(scores)].numpy() for column in (samples.kinds, samples.seen, samples.quality))
    return report(scores, kinds, seen, quality, tuple(KINDS))
