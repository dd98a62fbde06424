"""A small network that learns to mark lanes from what the Hough transform finds: data, model, loss and evaluation.

The network sees pictures on which the Hough transform is sure of its lanes, spoilt further, and is to mark the same
lanes. It gets no true geometry; only the evaluation compares with it.
"""

from __future__ import annotations

from dataclasses import astuple
from itertools import count
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss
from shoestring_recipes.lanes.hough import Lanes, detect
from shoestring_recipes.lanes.marks import MARKED, edges_of, overlay
from shoestring_recipes.lanes.matching import LaneCounts, compare
from shoestring_recipes.lanes.roads import HEIGHT, KINDS, TAUGHT, WIDTH, Scene, render
from shoestring_recipes.lanes.wearing import spoilt

CELL = 4
"""Height and width in pixels of what the network says one number of."""
SURE = 0.4
"""Quality of the worst lane of a picture above which the Hough transform is sure of the picture."""
MOST = 6
"""Maximum number of lanes of a picture that are taught."""


# -- data --------------------------------------------------------------------------------------------------------------


class Roads(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rendered pictures with the lanes that the Hough transform finds.

    Samples have `inputs`, uint8 (1, HEIGHT, WIDTH), and `lanes`, (MOST, HEIGHT), the columns of lanes, NaN where there
    are none. They are made when they are first asked for.

    Args:
        seed: pictures of two seeds differ.
        kinds: what spoils the pictures, in turn.
        sure: whether to take only pictures on which the Hough transform is sure of two lanes or more.
    """

    draws = False

    def __init__(self, pictures: int, seed: int, kinds: tuple[str, ...], sure: bool) -> None:
        self.pictures, self.seed, self.kinds, self.sure = pictures, seed, kinds, sure
        self.fingerprint = f"{pictures} {seed} {kinds} {sure}"
        self._samples: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self.pictures

    def scene(self, index: int, attempt: int = 0) -> Scene:
        """A picture and the truth about it."""
        rng = np.random.default_rng([self.seed, index, attempt])
        return render(rng, rng.uniform(0, 0.95), self.kinds[index % len(self.kinds)])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index not in self._samples:
            attempts = ((image, detect(image)) for image in (self.scene(index, attempt).image for attempt in count()))
            chosen = (pair for pair in attempts if not self.sure or is_sure(pair[1]))
            self._samples[index] = sample_of(*next(chosen))
        return self._samples[index]


def is_sure(lanes: Lanes) -> bool:
    """Whether the Hough transform is sure of the lanes of a picture."""
    return len(lanes.quality) > 1 and bool(lanes.quality.min() > SURE)


def sample_of(image: np.ndarray, lanes: Lanes) -> dict[str, Tensor]:
    """The sample of a picture (HEIGHT, WIDTH) and the best of its lanes: see `Roads`."""
    columns = np.full((MOST, HEIGHT), np.nan, np.float32)
    columns[: len(lanes.columns)] = lanes.columns[:MOST]
    return {"inputs": torch.from_numpy(image)[None], "lanes": torch.from_numpy(columns)}


def data(pictures: int = 900, held_out: int = 240, seed: int = 1) -> tuple[Roads, Roads]:
    """Pictures to learn from, of the kinds that are taught, and held-out ones of all kinds."""
    return Roads(pictures, 2 * seed, TAUGHT, True), Roads(held_out, 2 * seed + 1, KINDS, False)


# -- model and loss ----------------------------------------------------------------------------------------------------


class Dilated(nn.Module):
    """x + relu(norm(convolution(x)))."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


class Marker(nn.Module):
    """Marks lanes: uint8 pictures (N, 1, HEIGHT, WIDTH) to logits (N, HEIGHT / CELL, WIDTH / CELL).

    Pictures are normalised by the mean and deviation around each pixel, so that light matters little. The dilations
    reach over half of the picture, so that gaps between paint are bridged.
    """

    def __init__(self, width: int = 24, dilations: tuple[int, ...] = (1, 2, 4, 8, 4, 2)) -> None:
        super().__init__()
        marks = nn.Conv2d(width, 1, 1)
        nn.init.constant_(cast(Tensor, marks.bias), -3.0)  # few cells have a lane
        self.network = nn.Sequential(
            nn.Conv2d(1, width // 2, 5, 2, 2, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *(Dilated(width, dilation) for dilation in dilations),
            marks,
        )

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(next(self.parameters()).dtype) / 64
        mean = _around(x)
        deviation = (_around(x * x) - mean * mean).clamp(min=0).sqrt()
        return self.network((x - mean) / (deviation + 0.05))[:, 0]


def _around(x: Tensor) -> Tensor:
    """The mean of about 36 × 36 pixels around each, computed at the size of cells."""
    cells = F.avg_pool2d(F.avg_pool2d(x, CELL), 9, 1, 4, count_include_pad=False)
    return F.interpolate(cells, x.shape[2:], mode="bilinear")


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits of a batch; in training, of spoilt pictures."""
    images = batch["inputs"]
    return model(spoilt(images, batch["lanes"]) if model.training else images)


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy with bumps around the columns of lanes; a sum over pictures, and their number."""
    cells = F.binary_cross_entropy_with_logits(output.float(), bumps(batch["lanes"]), reduction="none")
    return cells.mean((1, 2)).sum(), torch.tensor(len(output), device=output.device)


def bumps(lanes: Tensor) -> Tensor:
    """Targets (N, HEIGHT / CELL, WIDTH / CELL) from 0 to 1: bumps two cells wide at columns (N, lanes, HEIGHT)."""
    places = lanes.unflatten(-1, (-1, CELL)).mean(-1) / CELL - 0.5 + 0.5 / CELL
    distance = torch.arange(WIDTH // CELL, device=lanes.device) - places[..., None]
    return torch.exp(-(distance**2)).nan_to_num(0).amax(1)


# -- evaluation --------------------------------------------------------------------------------------------------------


def lanes_of(images: Tensor, output: Tensor) -> list[Lanes]:
    """The lanes in pictures (N, 1, HEIGHT, WIDTH) where the network marks them."""
    pairs = zip(images[:, 0].cpu().numpy(), edges_of(output), strict=True)
    return [detect(image, edges, settings=MARKED) for image, edges in pairs]


def evaluate(model: nn.Module, held_out: Any) -> dict[str, Any]:
    """F1 of the network and of the Hough transform, by kind of picture, and one picture of each kind with what the
    network finds."""
    roads: Roads = held_out.dataset
    rows: list[list[list[int]]] = []
    pictures: dict[str, ss.Picture] = {}
    for batch in held_out:
        detected = lanes_of(batch["inputs"], held_out.forward(model, batch))
        for lanes, index in zip(detected, batch["ids"].tolist(), strict=True):
            scene, kind = roads.scene(index), roads.kinds[index % len(roads.kinds)]
            pairs = [compare(one.columns, scene.lanes) for one in (lanes, detect(scene.image))]
            rows.append([list(astuple(counts)) for counts in pairs])
            pictures.setdefault(kind, ss.Picture(pixels=overlay(scene.image, lanes), caption=caption(scene)))
    counted = held_out.gather(torch.tensor(rows, dtype=torch.int64).reshape(-1, 2, 3))
    network, hough = (LaneCounts(*row) for row in counted.sum(0).tolist())
    table = [
        (kind, *(LaneCounts(*row).f1 for row in counted[number :: len(roads.kinds)].sum(0).tolist()))
        for number, kind in enumerate(roads.kinds)
    ]
    by_kind = ss.Table(title="F1 by kind of picture", head=("kind", "network", "Hough"), rows=tuple(table))
    return {"f1": network.f1, "precision": network.precision, "f1_hough": hough.f1, "by kind": by_kind, **pictures}


def caption(scene: Scene) -> str:
    """The wear of each lane, from left to right."""
    return f"wear {', '.join(f'{wear:.2f}' for wear in scene.wear)}"
