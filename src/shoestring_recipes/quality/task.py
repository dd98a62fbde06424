"""Training on ladders, which are crops at increasing levels of distortion: data, losses that order the levels, and
evaluation."""

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
"""Scale of score differences in the loss: at this difference, the order of a pair is fairly certain."""
WORST = 0.3
"""GMSD that counts as quality 0."""


class Ladders(Dataset[dict[str, Tensor]]):
    """A data set of ladders: crops with five levels of one kind of distortion. A sample has `inputs`, uint8 (6, H, W),
    `quality`, (6,), and `targets`, the number of the kind.

    Args:
        pictures: the ladders, uint8 (N, 6, H, W), from the undistorted crop to the strongest distortion.
        kinds: number of each ladder's kind of distortion, (N,). sources: number of each ladder's photo, (N,).
        seen: whether each ladder's kind occurs in training, (N,).
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
    """Return the numbers of the held-out photos, and the kinds of distortion left out of training."""
    if not 0 <= fold < FOLDS:
        raise ConfigError(f"data.arguments.fold is {fold}", hint=f"use 0 to {FOLDS - 1}")
    order = np.random.default_rng(seed).permutation(len(photos()))
    return set(order[fold::FOLDS].tolist()), FAMILIES[(fold + seed) % FOLDS]


def data(fold: int = 0, seed: int = 0, crops_each: int = 4) -> tuple[Ladders, Ladders]:
    """Return training ladders, from four fifths of the photos with eight kinds, and held-out ladders, from the other
    photos with all kinds.

    Args:
        fold: selects the fifth of the photos and the two kinds that are held out.
        seed: seed of the partition, of the crops and of the distortions.
        crops_each: number of crops per photo.
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
    """Compute the scores (N, L, …) of N ladders, each one picture at L levels of distortion. In training, all pictures
    of a ladder are mirrored alike, at random along both axes."""
    x = batch["inputs"]
    if model.training:
        for axis in (-1, -2):
            flips = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
            x = torch.where(flips, x.flip(axis), x)
    return model(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def ordered(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Loss that orders the levels of each ladder (RankNet, Burges et al., 2005) and keeps scores near the measured
    quality, so that scores of different kinds are comparable."""
    weaker, stronger = torch.triu_indices(output.shape[1], output.shape[1], 1, device=output.device)
    pairs = F.softplus((output[:, stronger] - output[:, weaker]) / TEMPERATURE).mean(1)
    near, count = rated(output, batch)
    return pairs.sum() + near, count


def rated(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Loss that keeps scores near the quality, for images that people have rated."""
    quality = batch["quality"].to(output.dtype)
    return F.smooth_l1_loss(output, quality, reduction="none", beta=TEMPERATURE).mean(1).sum(), len(output)


def kind(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy of classifying the kind of distortion, which trains a backbone without using the order of
    levels."""
    logits, targets = output[:, 1:], batch["targets"][:, None].expand(-1, output.shape[1] - 1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def measure(model: nn.Module, held_out: HeldOut) -> dict[str, Any]:
    """Measure the fraction of pairs in the right order and the agreement with GMSD, for kinds seen in training, for
    other kinds, and for each kind."""
    samples = held_out.dataset
    assert isinstance(samples, Ladders)
    scores = held_out.gather(torch.cat([held_out.forward(model, batch) for batch in held_out])).double().cpu().numpy()
    kinds, seen, quality = (column[: len(scores)].numpy() for column in (samples.kinds, samples.seen, samples.quality))
    return report(scores, kinds, seen, quality, tuple(KINDS))
