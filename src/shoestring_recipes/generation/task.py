"""Generation of clothes in a prescribed style from Fashion-MNIST's edges: data, loss and evaluation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss
from shoestring.core.errors import DataError
from shoestring.data.images import Images, fashion_mnist
from shoestring_recipes.generation.clothes import Clothes
from shoestring_recipes.generation.measures import features, frechet, sheet
from shoestring_recipes.generation.styles import STYLES, TAUGHT

MEANS, LIGHT = 20.0, 10.0
"""Weights of the differences `means` and `light` in the loss, relative to the discriminator's scores."""
SHOWN = 6
"""Number of samples of each style in the report."""
CAPTION = "From left to right: map, swatch, real picture, two made ones."


def data(seed: int = 0, held_out: int = 1000) -> tuple[Clothes, Clothes]:
    """Return the training images in the styles `TAUGHT`, and the first `held_out` test images in all styles."""
    train, test = fashion_mnist()
    test = Images(test.images[:held_out], test.labels[:held_out])
    return Clothes(train, TAUGHT, 2 * seed), Clothes(test, STYLES, 2 * seed + 1)


def forward(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the model on a batch; each sample may contain several maps and swatches.

    In training, the generator and the discriminator see random windows of the swatches, otherwise the windows at
    `corners`.
    """
    maps, swatch = (batch[key].flatten(0, -4) for key in ("inputs", "swatch"))
    fixed = batch.get("corners", torch.tensor([[0.0, 0.0], [1.0, 1.0]], device=maps.device))
    corners = torch.rand(len(maps), 2, 2, device=maps.device) if model.training else fixed.expand(len(maps), 2, 2)
    return model(maps, swatch, corners, batch.get("image"))


def hinge(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the loss, summed over samples, and the number of samples. The loss consists of the hinge losses of both
    networks (Lim and Ye, 2017) and the differences `means` and `light`."""
    scores = F.relu(1 - output["real"]) + F.relu(1 + output["fake"]) - output["fooled"]
    return (scores.mean(1) + MEANS * output["means"] + LIGHT * output["light"]).sum(), len(scores)


def measure(model: nn.Module, held_out: Any) -> dict[str, Any]:
    """Measure the Fréchet distance of generated and real images, and the difference of images with the same map and
    swatch; also return a sheet of samples of each style.

    Raises:
        DataError: a map has a colour that no label has.
    """
    rows: list[tuple[Tensor, ...]] = []
    sheets: dict[str, list[list[Tensor]]] = {}
    names: tuple[str, ...] = held_out.dataset.styles
    for batch in held_out:
        output = held_out.forward(model, batch)
        elsewhere = batch | {"corners": torch.tensor([[0.4, 0.7], [1.0, 1.0]], device=batch["image"].device)}
        made, again = output["made"], held_out.forward(model, elsewhere)["made"]
        real = batch["image"].to(made.dtype) / 255
        others = batch["again"].to(made.dtype) / 255
        diversity = torch.stack([(one - other).abs().mean((1, 2, 3)) for one, other in ((made, again), (real, others))])
        rows.append((features(made), features(real), diversity.T, batch["style"], output["unknown"]))
        for shown in zip(batch["style"].tolist(), batch["inputs"], batch["swatch"], real, made, again, strict=True):
            style = sheets.setdefault(names[shown[0]], [])
            if len(style) < SHOWN:
                style.append(list(shown[1:]))
    made, real, diversity, styles, unknown = held_out.gather(tuple(map(torch.cat, zip(*rows, strict=True))))
    if unknown.any():
        number = int(unknown.nonzero()[0])
        raise DataError(f"the map of held-out sample {number} has a colour of no label", hint="name it in model.colors")
    table = [
        (name, float(frechet(made[chosen], real[chosen])), *diversity[chosen].mean(0).tolist())
        for name, chosen in ((name, styles == number) for number, name in enumerate(names))
        if chosen.any()
    ]
    title, head = "Made and real pictures by style", ("style", "distance", "diversity", "of real ones")
    pictures = {name: ss.Picture(pixels=sheet(rows), caption=CAPTION) for name, rows in sheets.items()}
    overall = {"distance": frechet(made, real), "distance_real": frechet(real[::2], real[1::2])}
    by_style = ss.Table(title=title, head=head, rows=tuple(table))
    differing = dict(zip(("diversity", "diversity_real"), diversity.mean(0), strict=True))
    return overall | differing | {"by style": by_style, **pictures}
