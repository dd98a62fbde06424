"""Losses that separate the class of a digit from its style; contrastive losses are per sample (N,), the others 0-d."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 0.2
"""Divisor of cosine similarities; a smaller value gives the nearest samples more weight."""


def by_class(codes: Tensor, labels: Tensor) -> Tensor:
    """Supervised contrastive loss (Khosla et al., 2020) of each code: codes of one class attract each other. The
    loss is 0 for a code that is alone in its class.

    Args:
        codes: (N, D). labels: (N,).
    """
    codes = F.normalize(codes.float(), dim=1)
    itself = torch.eye(len(codes), dtype=torch.bool, device=codes.device)
    logits = (codes @ codes.T / TEMPERATURE).masked_fill(itself, -1e9)
    alike = (labels[:, None] == labels) & ~itself
    likely = logits.log_softmax(1).masked_fill(~alike, 0.0).sum(1)
    return -likely / alike.sum(1).clamp(min=1)


def by_style(own: Tensor, other: Tensor) -> Tensor:
    """Contrastive loss of each style code of a client's images, which attracts the code of another image of the client
    and repels codes of images with changed strokes.

    Args:
        own, other: codes of the client's images, and of images with changed strokes, (N, D).
    """
    own, other = F.normalize(own.float(), dim=1), F.normalize(other.float(), dim=1)
    nearest = (own * own.roll(1, 0)).sum(1, keepdim=True)
    return -(torch.cat([nearest, own @ other.T], 1) / TEMPERATURE).log_softmax(1)[:, 0]


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Mean squared correlation of the columns of `first` (N, D) and `second` (N, E) over the samples, 0-d."""
    columns = [one.float() - one.float().mean(0) for one in (first, second)]
    first, second = (one / (one.norm(dim=0) + 1e-6) for one in columns)
    return (first.T @ second).square().mean()


def class_means(codes: Tensor, labels: Tensor) -> Tensor:
    """Variance of the classes' mean codes, as a fraction of the variance of all codes, averaged over columns; 0-d.

    The estimate uses products of two different samples of a class, so few samples do not bias it upwards, and it may be
    negative. Classes with one sample are left out.

    Args:
        codes: (N, D). labels: (N,).
    """
    codes = codes.float()
    codes = (codes - codes.mean(0)) / (codes.std(0, correction=0) + 1e-2)
    classes = F.one_hot(labels).to(codes.dtype)
    counts, sums = classes.sum(0), classes.T @ codes
    pairs = sums.square().sum(1) - classes.T @ codes.square().sum(1)
    means = pairs / (counts * (counts - 1)).clamp(min=1)
    return means.sum() / (counts > 1).sum().clamp(min=1) / codes.shape[1]
