"""A small network that marks lanes, trained on the Hough transform's detections: data, model, loss and evaluation.

The training images are images on which the Hough transform detects lanes with high quality. The images are degraded
further, and the network has to mark the same lanes. The network never sees the true geometry, which only the evaluation
uses.
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
"""Height and width, in pixels, of the cells; the network outputs one number per cell."""
SURE = 0.4
"""Quality that all lanes of an image must exceed for the detection to count as sure."""
MOST = 6
"""Maximum number of lanes per image that are used in training."""


# -- data --------------------------------------------------------------------------------------------------------------


class Roads(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A data set of rendered images with the lanes that the Hough transform detects.

    A sample has `inputs`, uint8 (1, HEIGHT, WIDTH), and `lanes`, the columns of lanes, (MOST, HEIGHT), with NaN for
    missing lanes and rows. Samples are rendered on first access.

    Args:
        seed: seed of the random choices in all images.
        kinds: kinds of disturbance, which the images have in turn.
        sure: whether to take only images for which `is_sure` holds.
    """

    draws = False

    def __init__(self, pictures: int, seed: int, kinds: tuple[str, ...], sure: bool) -> None:
        self.pictures, self.seed, self.kinds, self.sure = pictures, seed, kinds, sure
        self.fingerprint = f"{pictures} {seed} {kinds} {sure}"
        self._samples: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self.pictures

    def scene(self, index: int, attempt: int = 0) -> Scene:
        """Render the image with this index, with its true lanes."""
        rng = np.random.default_rng([self.seed, index, attempt])
        return render(rng, rng.uniform(0, 0.95), self.kinds[index % len(self.kinds)])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index not in self._samples:
            attempts = ((image, detect(image)) for image in (self.scene(index, attempt).image for attempt in count()))
            chosen = (pair for pair in attempts if not self.sure or is_sure(pair[1]))
            self._samples[index] = sample_of(*next(chosen))
        return self._samples[index]


def is_sure(lanes: Lanes) -> bool:
    """Whether an image has at least two detected lanes, all with a quality above `SURE`."""
    return len(lanes.quality) > 1 and bool(lanes.quality.min() > SURE)


def sample_of(image: np.ndarray, lanes: Lanes) -> dict[str, Tensor]:
    """Build the sample of an image (HEIGHT, WIDTH) from the best of its lanes; see `Roads`."""
    columns = np.full((MOST, HEIGHT), np.nan, np.float32)
    columns[: len(lanes.columns)] = lanes.columns[:MOST]
    return {"inputs": torch.from_numpy(image)[None], "lanes": torch.from_numpy(columns)}


def data(pictures: int = 900, held_out: int = 240, seed: int = 1) -> tuple[Roads, Roads]:
    """Return training images with the disturbances `TAUGHT`, and held-out images with all kinds of disturbance."""
    return Roads(pictures, 2 * seed, TAUGHT, True), Roads(held_out, 2 * seed + 1, KINDS, False)


# -- model and loss ----------------------------------------------------------------------------------------------------


class Dilated(nn.Module):
    """Residual block with a dilated convolution: x + relu(norm(convolution(x)))."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


class Marker(nn.Module):
    """Marks lanes: maps uint8 images (N, 1, HEIGHT, WIDTH) to logits (N, HEIGHT / CELL, WIDTH / CELL).

    Images are normalised by the mean and standard deviation around each pixel, so that lighting has little effect. The
    receptive field of the dilated convolutions spans over half of the image, which bridges gaps in the paint.
    """

    def __init__(self, width: int = 24, dilations: tuple[int, ...] = (1, 2, 4, 8, 4, 2)) -> None:
        super().__init__()
        marks = nn.Conv2d(width, 1, 1)
        nn.init.constant_(cast(Tensor, marks.bias), -3.0)  # initial logits are low, because few cells have a lane
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
    """Return the mean of about 36 × 36 pixels around each pixel, computed at the resolution of cells."""
    cells = F.avg_pool2d(F.avg_pool2d(x, CELL), 9, 1, 4, count_include_pad=False)
    return F.interpolate(cells, x.shape[2:], mode="bilinear")


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of a batch; in training, the images are degraded first."""
    images = batch["inputs"]
    return model(spoilt(images, batch["lanes"]) if model.training else images)


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy with the targets of `bumps`, summed over images, and the number of images."""
    cells = F.binary_cross_entropy_with_logits(output.float(), bumps(batch["lanes"]), reduction="none")
    return cells.mean((1, 2)).sum(), torch.tensor(len(output), device=output.device)


def bumps(lanes: Tensor) -> Tensor:
    """Return targets (N, HEIGHT / CELL, WIDTH / CELL) from 0 to 1, with bumps about two cells wide at the lanes'
    columns (N, lanes, HEIGHT)."""
    places = lanes.unflatten(-1, (-1, CELL)).mean(-1) / CELL - 0.5 + 0.5 / CELL
    distance = torch.arange(WIDTH // CELL, device=lanes.device) - places[..., None]
    return torch.exp(-(distance**2)).nan_to_num(0).amax(1)


# -- evaluation --------------------------------------------------------------------------------------------------------


def lanes_of(images: Tensor, output: Tensor) -> list[Lanes]:
    """Detect the lanes in images (N, 1, HEIGHT, WIDTH) from the network's marks."""
    pairs = zip(images[:, 0].cpu().numpy(), edges_of(output), strict=True)
    return [detect(image, edges, settings=MARKED) for image, edges in pairs]


def evaluate(model: nn.Module, held_out: Any) -> dict[str, Any]:
    """Return the F1 of the network and of the Hough transform, by kind of disturbance, and one image of each kind with
    the lanes that the network detects."""
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
    """Return a text with the wear of each lane, from left to right."""
    return f"wear {', '.join(f'{wear:.2f}' for wear in scene.wear)}"
