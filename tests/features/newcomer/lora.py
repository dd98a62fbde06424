"""Low-rank adapters over frozen linear layers (Hu et al., 2021), as a newcomer writes them from the guide alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import shoestring as ss
from shoestring.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LoRA(ss.Feature):
    """Train low-rank adapters of some linear layers, whose own weights are frozen."""

    rank: int = 4
    """Rank of the adapters; higher fits more and trains more parameters. 0 adapts nothing."""

    alpha: float = 8.0
    """Scale of the adapters' output; it is divided by the rank."""

    layers: tuple[str, ...] = ("up", "down")
    """Last part of the names of the linear layers that are adapted."""

    base: str = "shoestring.testing.jobs:tiny"
    """The model that the frozen weights come from, as a name that `open_model` takes."""

    seams: ClassVar = (ss.Seam.MODEL,)
    adds_parameters: ClassVar = True

    def chosen(self, model: nn.Module) -> dict[str, nn.Linear]:
        from torch import nn

        return {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in self.layers
        }

    def check(self, attachments: ss.Attachments) -> None:
        if self.rank and not self.chosen(attachments.module):
            raise ConfigError(
                f"no linear layer is called {' or '.join(self.layers)}",
                hint="name layers of the model in newcomer.lora.layers",
            )

    def apply(self, attachments: ss.Attachments, seam: ss.Seam) -> None:
        if not self.rank:
            return
        from tests.features.newcomer.adapter import adapt

        for name, layer in self.chosen(attachments.module).items():
            attachments.frozen(f"lora.{name}", layer, self.base)
            adapt(attachments, name, layer, rank=self.rank, scale=self.alpha / self.rank)

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        from tests.features.newcomer.adapter import merge

        return merge(weights, scale=self.alpha / max(self.rank, 1))


LoRA.neutral = LoRA(rank=0)
