"""Local steps written by hand: copies of a model in one process, and how the ranks of a pool train the same."""

from __future__ import annotations

from typing import Any

import merging
import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.testing import Pool, jobs
from shoestring.testing.scenarios import encode

Weights = dict[str, Tensor]


def train(pool: Pool, *features: Any, **arguments: Any) -> list[dict[str, Any]]:
    return pool.call(merging.train, features=[encode(each) for each in features], **arguments)


def apart(one: list[float], other: list[float]) -> float:
    return float((torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)).abs().max())


class Replicas:
    """`size` copies of the tiny model in one process, in double precision, each with its share of the batch."""

    def __init__(self, size: int, *, ragged: bool = False) -> None:
        self.ragged = ragged
        self.models = [jobs.tiny().double() for _ in range(size)]
        self.optimizers = [torch.optim.SGD(self.trained(model).values(), lr=0.1, momentum=0.9) for model in self.models]

    @staticmethod
    def trained(model: torch.nn.Module) -> Weights:
        return {name: each for name, each in model.named_parameters() if each.requires_grad}

    @property
    def weights(self) -> list[Weights]:
        return [self.trained(model) for model in self.models]

    def step(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            batch = jobs.batch(number, rank, len(self.models), ragged=self.ragged)
            F.cross_entropy(model(batch["inputs"]).flatten(0, -2), batch["targets"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def loss(self, number: int) -> float:
        """Of one replica alone, before its step."""
        (model,), batch = self.models, jobs.batch(number, 0, 1, ragged=self.ragged)
        return float(F.cross_entropy(model(batch["inputs"]).flatten(0, -2), batch["targets"].flatten()))

    def flat(self, rank: int) -> list[float]:
        return torch.cat([each.detach().flatten() for each in self.weights[rank].values()]).tolist()


@torch.no_grad()
def outer_step(replicas: Replicas, common: Weights, outer: torch.optim.Optimizer) -> None:
    for name, each in common.items():
        each.grad = torch.stack([each - weights[name] for weights in replicas.weights]).mean(0)
    outer.step()
    for weights, (name, each) in ((weights, item) for item in common.items() for weights in replicas.weights):
        weights[name].copy_(each)


def copied(replicas: Replicas, names: list[str] | None = None) -> Weights:
    first = replicas.weights[0]
    return {name: torch.nn.Parameter(first[name].detach().clone()) for name in names or first}
