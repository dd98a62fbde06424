"""One line takes most of the time, and has a cheaper form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def broadcast_distances(queries: Tensor, gallery: Tensor) -> Tensor:
    return (queries[:, None] - gallery[None]).pow(2).sum(-1)  # fault: distances-by-broadcasting


def product_distances(queries: Tensor, gallery: Tensor) -> Tensor:
    return torch.cdist(queries, gallery).square()


@torch.no_grad()
def retrieval(steps: int, broadcast: bool) -> list[float]:
    """Recall among the ten nearest of a gallery, for an encoder of images."""
    random = seeded()
    encoder = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
    ).eval()
    distances = broadcast_distances if broadcast else product_distances
    gallery = F.normalize(torch.randn(1500, 64, generator=random), dim=1)
    labels = torch.randint(0, 50, (1500,), generator=random)
    recalls = []
    for _ in range(steps):
        images, targets = torch.rand(48, 3, 32, 32, generator=random), torch.randint(0, 50, (48,), generator=random)
        queries = F.normalize(encoder(images), dim=1)
        nearest = distances(queries, gallery).topk(10, largest=False).indices
        hits = (labels[nearest] == targets[:, None]).any(dim=1)
        recalls.append(hits.float().mean())
    return torch.stack(recalls).tolist()


class Storyteller(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.embedding(tokens), state)
        return self.head(state), state


def cutoff_by_sort(logits: Tensor, k: int) -> Tensor:
    ordered = torch.sort(logits, dim=-1, descending=True).values  # fault: whole-vocabulary-sorted
    return ordered[:, k - 1 : k]


def cutoff_by_selection(logits: Tensor, k: int) -> Tensor:
    return torch.topk(logits, k).values[:, -1:]


@torch.inference_mode()
def sampling(steps: int, sort: bool) -> Tensor:
    """Top-k sampling of text from a recurrent language model with a large vocabulary."""
    random = seeded()
    model = Storyteller(30_000, 256)
    cutoff = cutoff_by_sort if sort else cutoff_by_selection
    tokens, state = torch.zeros(8, dtype=torch.long), torch.zeros(8, 256)
    written = []
    for _ in range(steps):
        logits, state = model(tokens, state)
        logits = logits.masked_fill(logits < cutoff(logits, 40), float("-inf"))
        tokens = torch.multinomial(logits.softmax(dim=-1), 1, generator=random).squeeze(1)
        written.append(tokens)
    return torch.stack(written, dim=1)


class Detector:
    """Mahalanobis distance of features to those of the training set; samples that are far away are outliers."""

    def __init__(self, features: Tensor, prepared: bool) -> None:
        self.mean = features.mean(dim=0)
        self.covariance = torch.cov(features.T) + 1e-3 * torch.eye(features.shape[1])
        self.precision = torch.linalg.inv(self.covariance) if prepared else None

    def score(self, features: Tensor) -> Tensor:
        precision = self.precision
        if precision is None:
            precision = torch.linalg.inv(self.covariance)  # fault: inverted-for-each-batch
        centered = features - self.mean
        return ((centered @ precision) * centered).sum(dim=1)


@torch.no_grad()
def outliers(steps: int, prepared: bool) -> list[Tensor]:
    random = seeded()
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256)).eval()
    detector = Detector(model(torch.randn(2000, 64, generator=random)), prepared)
    scores = []
    for _ in range(steps):
        scores.append(detector.score(model(torch.randn(128, 64, generator=random))))
    return [*scores, *weights(model)]


PROGRAMS = [
    Planted(
        "distances-by-broadcasting",
        "hotspot",
        lambda steps: retrieval(steps, True),
        lambda steps: retrieval(steps, False),
        steps=24,
        module=__name__,
    ),
    Planted(
        "whole-vocabulary-sorted",
        "hotspot",
        lambda steps: sampling(steps, True),
        lambda steps: sampling(steps, False),
        steps=40,
        module=__name__,
    ),
    Planted(
        "inverted-for-each-batch",
        "hotspot",
        lambda steps: outliers(steps, False),
        lambda steps: outliers(steps, True),
        steps=120,
        module=__name__,
    ),
]
