"""The model that the programs train beside their faults."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Blocks(nn.Module):
    """Feed-forward blocks with residuals."""

    def __init__(
        self, width: int, hidden: int, layers: int = 1, activation: Callable[[Tensor], Tensor] = F.relu
    ) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(hidden, width) for _ in range(layers))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            hidden = up(x)
            hidden = self.activation(hidden)
            out = down(hidden)
            x = x + out
        return x


class Training:
    """One step after the other, each parameter updated by a fused optimizer."""

    def __init__(self, model: nn.Module, **options: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.01, **(options or {"fused": True}))

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        y = self.model(x)
        loss = F.mse_loss(y, x)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
