"""Training with raters' labels instead of true ones: data, loss and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss
from shoestring.core.errors import ConfigError, DataError, nearest
from shoestring.data.images import Images, fashion_mnist
from shoestring_recipes.annotation.agreement import described
from shoestring_recipes.annotation.exchange import labels_of, read_csv
from shoestring_recipes.annotation.planted import NAMES, planted
from shoestring_recipes.annotation.raters import Labels, Review, majority, review, votes

PREFIX = "fashion-mnist/"
"""Prefix of an image's address in a table of labels; the image's number among the training images follows."""
KINDS = ("soft", "votes", "majority")
BINS = 15
"""Number of bins of the calibration error."""


class RatedImages(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images whose `targets` are the probabilities of the classes, (classes,), instead of one class."""

    draws = False

    def __init__(self, images: Images, soft: Tensor, names: Sequence[str] = (), reviewed: Review | None = None) -> None:
        self.images, self.soft, self.names, self.reviewed = images, soft, names, reviewed
        self.fingerprint = f"{images.fingerprint} {soft.double().sum(0).tolist()} {soft[::97].argmax(1).sum()}"

    def __len__(self) -> int:
        return len(self.soft)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.images.images[index], "targets": self.soft[index]}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        at = torch.as_tensor(indices)
        rows = zip(self.images.images[at], self.soft[at], strict=True)
        return [{"inputs": image, "targets": target} for image, target in rows]


def targets(labels: Labels, kind: str, seed: int = 0) -> tuple[np.ndarray, Review | None]:
    """Return the class probabilities of each item, (items, classes), and for `soft` the review of the raters.

    Args:
        kind: `soft` for the raters' consensus, `votes` for the shares of votes, or `majority` for one class.
    """
    if kind == "soft":
        reviewed = review(labels)
        return reviewed.consensus.soft, reviewed
    if kind == "votes":
        return votes(labels), None
    return np.eye(labels.classes)[majority(labels, seed)], None


def data(
    labels: str = "soft",
    raters: int = 12,
    per_image: int = 3,
    noise: float = 0.3,
    images: int = 12000,
    held_out: int = 10000,
    seed: int = 0,
    table: str = "",
) -> tuple[RatedImages, RatedImages]:
    """Return the first training images with raters' labels, and the first test images with true ones.

    Args:
        labels: how targets are computed from the raters' labels: the `kind` of `targets`.
        raters: number of simulated raters. per_image: number of raters who label each image.
        noise: mean share of wrong labels of the simulated raters.
        images: number of training images. held_out: number of test images.
        table: CSV file with the columns url, rater and label, which replaces the simulated raters.
    """
    if labels not in KINDS:
        raise ConfigError(f"data.arguments.labels is `{labels}`", hint=nearest(labels, KINDS))
    if not 0 < per_image <= raters:
        raise ConfigError(f"data.arguments.per_image is {per_image}", hint=f"from 1 to the number of raters, {raters}")
    train, test = fashion_mnist()
    if table:
        rated, numbers, names = read_table(Path(table), len(train))
    else:
        rated = planted(train.labels[:images].numpy(), raters, per_image, noise, seed)
        numbers, names = list(range(rated.items)), [f"rater {number}" for number in range(raters)]
    soft, reviewed = targets(rated, labels, seed)
    chosen = Images(train.images[numbers], train.labels[numbers])
    test = Images(test.images[:held_out], test.labels[:held_out])
    clean = F.one_hot(test.labels, len(NAMES)).float()
    return RatedImages(chosen, torch.from_numpy(soft).float()), RatedImages(test, clean, names, reviewed)


def read_table(path: Path, images: int) -> tuple[Labels, list[int], list[str]]:
    """Read raters' labels of training images from CSV; also return the images' numbers and the raters' names.

    Raises:
        DataError: the file is not such a table, or names an unknown image or class.
    """
    rows = []
    for line, row in read_csv(path, ("url", "rater", "label")):
        number = row["url"].removeprefix(PREFIX)
        if not row["url"].startswith(PREFIX) or not number.isdecimal() or int(number) >= images:
            raise DataError(
                f"`{path}`, line {line}: no image `{row['url']}`", hint=f"{PREFIX}0 to {PREFIX}{images - 1}"
            )
        if row["label"] not in (*NAMES, ""):
            raise DataError(f"`{path}`, line {line}: no class `{row['label']}`", hint=nearest(row["label"], NAMES))
        if row["label"]:  # an empty label is a skipped image
            rows.append((row["url"], row["rater"], row["label"]))
    if not rows:
        raise DataError(f"`{path}` has no labels")
    labels, urls, names = labels_of(rows, NAMES)
    return labels, [int(url.removeprefix(PREFIX)) for url in urls], names


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the cross-entropy with the target probabilities, summed over images, and the number of images."""
    return F.cross_entropy(output.float(), batch["targets"], reduction="sum"), len(output)


def measure(model: nn.Module, held_out: Any) -> dict[str, Any]:
    """Return the log-loss, accuracy and calibration error on true labels, and a table of the raters."""
    parts = [(held_out.forward(model, batch).float().log_softmax(1), batch["targets"].argmax(1)) for batch in held_out]
    logs, truth = held_out.gather(tuple(map(torch.cat, zip(*parts, strict=True))))
    sure, best = logs.exp().max(1)
    right = best == truth
    bins = (sure * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=logs.device).index_add_(
        0, bins, right.double() - sure.double()
    )
    figures: dict[str, Any] = {
        "log_loss": -logs.gather(1, truth[:, None]).double().mean(),
        "accuracy": right.double().mean(),
        "calibration": gaps.abs().sum() / len(logs),
    }
    dataset: RatedImages = held_out.dataset
    if dataset.reviewed is None:
        return figures
    rows = [
        (dataset.names[one.rater], one.labels, described(one.kappa, (one.low, one.high)), one.note)
        for one in dataset.reviewed.judgements
    ]
    head = ("rater", "labels", "kappa with the others", "note")
    return figures | {"raters": ss.Table(title="Raters", head=head, rows=tuple(rows))}
