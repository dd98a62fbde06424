"""Computes the accuracy on the test images of Fashion-MNIST, for `run.evaluate`."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from shoestring.data.images import FASHION_MNIST, Images, read_mnist

BATCH = 1000


@cache
def _test() -> Images:
    return read_mnist(FASHION_MNIST, "t10k")


def accuracy(model: nn.Module) -> dict[str, float]:
    """The fraction of the whole test set that the model classifies correctly."""
    images, device = _test(), next(model.parameters()).device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for inputs, targets in zip(images.images.split(BATCH), images.labels.split(BATCH), strict=True):
        correct += (model(inputs.to(device)).argmax(-1) == targets.to(device)).sum()
    return {"accuracy": int(correct) / len(images)}
