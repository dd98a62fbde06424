"""What optimizers of our own share: a step as torch has it, with a closure or without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Stepping(Optimizer, ABC):
    """An optimizer that says what happens between the closure and the end of a step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if there is one, with gradients; update the parameters; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @abstractmethod
    def _update(self) -> None:
        """Change the parameters that have a gradient; gradients are not recorded."""
