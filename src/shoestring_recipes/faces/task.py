"""A network that predicts whether a face is masked, which cells are covered, and who the person is: model, loss and
evaluation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss
from shoestring_recipes.faces.contest import bare_faces, classical
from shoestring_recipes.faces.crops import SIZE
from shoestring_recipes.faces.measures import overlay
from shoestring_recipes.faces.occluders import KINDS
from shoestring_recipes.faces.people import CELL, CoveredFaces

TEMPERATURE = 0.1
"""Temperature of the similarities of faces in the loss."""
WHO = 0.25
"""Weight of the loss term that distinguishes people."""


class MaskedFaces(nn.Module):
    """Maps grey faces, uint8 (N, SIZE, SIZE), to `masked`, logits (N,); `cover`, logits (N, SIZE / CELL, SIZE / CELL);
    and `embedding`, vectors of norm 1 (N, dimensions).

    `masked` is computed from the predicted cover alone, so that the look of a mask, which depends on its kind, has no
    influence. The embedding ignores covered cells, because they contain no information about the person.
    """

    def __init__(self, width: int = 24, dimensions: int = 64) -> None:
        super().__init__()
        cells = SIZE // CELL
        self.near = nn.Sequential(*_halving(1, width), *_halving(width, 2 * width), *_same(2 * width, 4 * width))
        self.cover = nn.Conv2d(4 * width, 1, 1)
        self.masked = nn.Sequential(nn.Linear(cells**2, 32), nn.ReLU(), nn.Linear(32, 1))
        self.far = nn.Sequential(nn.MaxPool2d(2), *_same(4 * width, 4 * width), nn.Flatten(), nn.Dropout(0.2))
        self.who = nn.Linear(4 * width * (cells // 2) ** 2, dimensions)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = images.to(self.who.weight.dtype)[:, None] / 255
        deviation, mean = torch.std_mean(x, (1, 2, 3), keepdim=True)
        x = self.near((x - mean) / (deviation + 0.02))
        cover = self.cover(x)
        covered = cover.sigmoid()
        embedding = F.normalize(self.who(self.far(x * (1 - covered))).float(), dim=-1)
        return {"masked": self.masked(covered.flatten(1))[:, 0], "cover": cover[:, 0], "embedding": embedding}


def _same(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU()


def _halving(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return *_same(inputs, outputs), nn.MaxPool2d(2)


def forward(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's output for each view of each sample, (N, views, …). If the true cover is known, the output
    also has `amiss`, (N,), the cross-entropy of the first view's cover."""
    views = batch["inputs"]
    output = {name: rows.unflatten(0, views.shape[:2]) for name, rows in model(views.flatten(0, 1)).items()}
    if "cover" in batch:
        cells = F.binary_cross_entropy_with_logits(output["cover"][:, 0].float(), batch["cover"], reduction="none")
        output["amiss"] = cells.mean((1, 2))
    return output


@ss.whole_batch
def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropies, and the number of samples. The terms are: masked or not, the cover of each
    cell, and the assignment of covered to bare faces in the batch, in both directions. Other faces of the same person
    are not used as negatives."""
    logits, targets, people = output["masked"][:, 0].float(), batch["targets"].float(), batch["people"]
    masked = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    covered, bare = output["embedding"].unbind(1)
    scores, own = covered @ bare.T / TEMPERATURE, torch.arange(len(people), device=people.device)
    scores = scores.masked_fill((people == people[:, None]) & (own != own[:, None]), -torch.inf)
    who = F.cross_entropy(scores, own, reduction="sum") + F.cross_entropy(scores.T, own, reduction="sum")
    return masked + output["amiss"].sum() + WHO * who, torch.tensor(len(people), device=people.device)


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluate(model: nn.Module, held_out: Any) -> dict[str, Any]:
    """Compare the network with classical methods: balanced accuracy on kinds seen in training and on the two kinds left
    out, and the fraction of people recognised under the mask left out. The result also has an image of each kind with
    the cover that the network predicts."""
    samples: CoveredFaces = held_out.dataset
    rows: list[tuple[Tensor, Tensor]] = []
    pictures: dict[str, ss.Picture] = {}
    for batch in held_out:
        output = held_out.forward(model, batch)
        rows.append((output["masked"][:, 0].float(), output["embedding"][:, 0]))
        shown = zip(
            batch["kinds"].tolist(), batch["inputs"][:, 0].cpu(), output["cover"][:, 0].float().cpu(), strict=True
        )
        for number, image, cells in shown:
            pixels = overlay(image.numpy(), cells.sigmoid().numpy())
            pictures.setdefault(KINDS[number], ss.Picture(pixels=pixels))
    columns = map(torch.cat, zip(*rows, strict=True))
    masked, embedding = (column.cpu().numpy() for column in held_out.gather(tuple(columns)))
    bare = bare_faces().to(rows[0][0].device)
    gallery = held_out.forward(model, {"inputs": bare})["embedding"][:, 0].cpu().numpy()
    return classical(samples, len(masked)).beside(masked > 0, embedding, gallery) | pictures
