"""A feature that does one thing at one seam, and a job of a model of two layers for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from shoestring.core.attachments import Attachments
from shoestring.core.feature import Feature, Seam
from shoestring.core.job import Job
from shoestring.core.world import World


@dataclass(frozen=True, kw_only=True)
class Does(Feature):
    """Does `work(attachments)` at one seam."""

    seams: ClassVar = ()
    work: Callable[[Attachments], Any]
    label: str = "does"

    @property
    def name(self):
        return f"test.{self.label}"

    def apply(self, attachments, seam):
        self.work(attachments)


def does(seam: Seam, work: Callable[[Attachments], Any], label: str = "does") -> Does:
    return type("Does", (Does,), {"seams": (seam,)})(work=work, label=label)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, inputs):
        return self.down(self.up(inputs).tanh())


def small_job(**arguments: Any) -> Job:
    torch.manual_seed(0)
    return Job(Net(), **{"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "world": World()} | arguments)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 3), torch.tensor([0, 1])
