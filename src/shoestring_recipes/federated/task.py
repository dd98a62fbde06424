"""Recognition of digits in a domain that no client has: the clients' data, a network that separates class and style,
loss and evaluation.

The encoder, the classifier and the decoder are shared. The style encoder, whose parameters are called `style.*`, stays
with each client (`comm.fedavg.private`).
"""

from __future__ import annotations

from math import isnan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss
from shoestring.core.errors import ConfigError
from shoestring.data.images import Images
from shoestring.training.held_out import HeldOut
from shoestring_recipes.federated.augment import moved, restroked
from shoestring_recipes.federated.codes import DigitEncoder, NoisyDigitEncoder, upsampling
from shoestring_recipes.federated.contrast import by_class, by_style, class_means, correlation
from shoestring_recipes.federated.digits import DOMAINS, domain
from shoestring_recipes.federated.probes import probe, sheet

HELD = 5
"""Every fifth group of a domain that clients have is held out."""
SHOWN = 10
"""Number of images in a row of the report's pictures."""


class Digits(Images):
    """Images of several domains; samples also have `domain`, the index in `DOMAINS`."""

    def __init__(self, images: Tensor, labels: Tensor, domains: Tensor) -> None:
        super().__init__(images, labels)
        self.domains = domains

    def __getitems__(self, indices: Any) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"domain": self.domains[index]}


def data(left_out: str = "uci", clients: int = 2, most: int = 0, seed: int = 0) -> tuple[dict[str, Digits], Digits]:
    """Return the data sets of clients, and the held-out samples: the domain that no client has, and about a fifth of
    each other domain.

    Args:
        left_out: domain that no client has, one of `DOMAINS`; empty to give all domains to clients.
        clients: number of clients of each other domain.
        most: maximum number of held-out samples; 0 takes all.
        seed: seed of the order of the held-out samples.
    """
    if left_out and left_out not in DOMAINS:
        hint = f"use {', '.join(DOMAINS)}, or leave it empty"
        raise ConfigError(f"data.arguments.left_out is `{left_out}`", hint=hint)
    if not 1 <= clients <= 10:
        raise ConfigError(f"data.arguments.clients is {clients}", hint="give each domain 1 to 10")
    parts: dict[str, Digits] = {}
    held: list[tuple[Tensor, ...]] = []
    for number, name in enumerate(DOMAINS):
        images, labels, groups = domain(name)
        columns = images, labels, torch.full_like(labels, number)
        taught = (groups % HELD != HELD - 1) & (name != left_out)
        held.append(tuple(column[~taught] for column in columns))
        for client in range(clients if name != left_out else 0):
            own = taught & ((groups - groups // HELD) % clients == client)
            parts[f"{name}-{client + 1}"] = Digits(*(column[own] for column in columns))
    columns = tuple(map(torch.cat, zip(*held, strict=True)))
    order = torch.randperm(len(columns[0]), generator=torch.Generator().manual_seed(seed))[: most or None]
    return parts, Digits(*(column[order] for column in columns))


class Separated(nn.Module):
    """Classifies digits, and encodes the class and the style of a digit separately.

    Args:
        width: channels of the first convolution, a multiple of 8.
        features, styles: lengths of the two codes.
        disentangle: whether to use a style encoder, a decoder and noisy codes; otherwise, the model only classifies.
        augment: whether the encoder is trained on two augmented views of each image in place of the image.
        contrast, style, remake, decorrelate, independent: weights of the further losses, relative to the cross-entropy.
        bottleneck, style_bottleneck: weights of the information in the two codes, per nat.
    """

    def __init__(
        self,
        width: int = 16,
        features: int = 64,
        styles: int = 16,
        disentangle: bool = True,
        augment: bool = True,
        contrast: float = 0.3,
        style: float = 0.3,
        remake: float = 10.0,
        decorrelate: float = 0.3,
        independent: float = 0.5,
        bottleneck: float = 0.02,
        style_bottleneck: float = 0.005,
    ) -> None:
        super().__init__()
        self.augment, self.weights = augment, (contrast, style, remake, decorrelate, independent)
        self.bottlenecks = bottleneck, style_bottleneck
        self.encoder = (NoisyDigitEncoder if disentangle else DigitEncoder)(width, features)
        self.classify = nn.Linear(features, 10)
        self.style = NoisyDigitEncoder(width // 2, styles, spread=-3.0) if disentangle else None
        self.decoder = upsampling(features + styles) if disentangle else None

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Encode and classify uint8 images (N, 1, S, S); in training, with labels, also compute the further losses.

        Returns:
            `features` (V, N, F) and `logits` (V, N, 10) of V views of each image in training, otherwise (N, F) and
            (N, 10); `further` (N,), the weighted sum of the further losses, if there are any.
        """
        x = images.to(self.classify.weight.dtype) / 255
        views = [restroked(moved(x)) for _ in range(2)] if self.training and self.augment else [x]
        features, means, held = self.encoder(torch.cat(views))
        output = {"features": features, "logits": self.classify(features if self.training else means)}
        if labels is None or not self.training:
            return output
        output = {name: value.unflatten(0, (len(views), -1)) for name, value in output.items()}
        if self.style is not None:
            contrast, style, remake, decorrelate, independent = self.weights
            plain, _, held_plain = self.encoder(x)
            codes, means, held_style = self.style(torch.cat([x, restroked(moved(x), always=True)]))
            own, (own_mean, other_mean) = codes[: len(x)], means.chunk(2)
            by_classes = by_class(features, labels.repeat(len(views))).view(len(views), -1).mean(0)
            remade = (self.decode(plain, own).float() - x.float()).square().mean((1, 2, 3))
            further = contrast * by_classes + style * by_style(own_mean, other_mean) + remake * remade
            further = further + decorrelate * correlation(plain, own) + independent * class_means(own_mean, labels)
            in_features = (held.view(len(views), -1).mean(0) + held_plain) / 2
            whole, in_style = self.bottlenecks
            output["further"] = further + whole * in_features + in_style * held_style[: len(x)]
        return output

    def decode(self, features: Tensor, styles: Tensor) -> Tensor:
        """Draw digits (N, 1, S, S) with values from 0 to 1 from features (N, F) and style codes (N, E)."""
        assert self.decoder is not None
        return self.decoder(torch.cat([features, styles], 1))


def forward(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the model on a batch."""
    return model(batch["inputs"], batch.get("targets"))


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the loss, summed over samples, and the number of samples. The loss is the cross-entropy, averaged over the
    views, plus the further losses."""
    logits, labels = output["logits"].float(), batch["targets"]
    views = logits[None] if logits.ndim == 2 else logits
    targets = labels.repeat(len(views))
    total = F.cross_entropy(views.flatten(0, 1), targets, reduction="sum") / len(views)
    return total + output["further"].sum() if "further" in output else total, len(labels)


def evaluate(model: Separated, held_out: HeldOut) -> dict[str, Any]:
    """Return the accuracy on each domain, the accuracies of linear probes of both codes, and digits of other domains,
    drawn in the style of each of this rank's clients."""
    samples = held_out.dataset
    assert isinstance(samples, Digits)
    outputs = [held_out.forward(model, batch) for batch in held_out]
    both = tuple(torch.cat([output[key] for output in outputs]) for key in ("logits", "features"))
    logits, features = held_out.gather(both)
    images, labels, domains = (
        column[: len(logits)].to(logits.device) for column in (samples.images, samples.labels, samples.domains)
    )
    right, names = (logits.argmax(1) == labels).double(), list(DOMAINS)
    chosen = {name: domains == number for number, name in enumerate(names)}
    numbers = {f"accuracy_{name}": float(right[own].mean()) for name, own in chosen.items() if own.any()}
    numbers["domain_from_features"] = probe(features, domains)
    rows = [("domain from features", numbers["domain_from_features"], 1 / len(names))]
    pictures: dict[str, ss.Picture] = {}
    for client in held_out.clients:
        if (style := model.style) is None:
            break
        own = chosen[client.rpartition("-")[0]]
        with held_out.acting(client):
            codes = style(images.to(model.classify.weight.dtype) / 255)[0]
        rows.append((f"class from style, {client}", probe(codes[own], labels[own]), 0.1))
        rows.append((f"domain from style, {client}", probe(codes, domains), 1 / len(names)))
        if shown := min(SHOWN, int(own.sum()), int((~own).sum())):
            made = model.decode(features[~own][:shown], codes[own][:shown])
            caption = f"Digits of other domains; the same in the style of {client}; digits with this style."
            lines = images[~own][:shown] / 255, made, images[own][:shown] / 255
            pictures[client] = ss.Picture(pixels=sheet(lines), caption=caption)
    if len(rows) > 1:
        for name, values in (("class_from_style", rows[1::2]), ("domain_from_style", rows[2::2])):
            numbers[name] = sum(value for _, value, _ in values) / len(values)
    table = ss.Table(title="What linear probes read", head=("probe", "balanced accuracy", "chance"), rows=tuple(rows))
    return {name: value for name, value in numbers.items() if not isnan(value)} | {"probes": table, **pictures}
