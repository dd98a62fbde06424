"""The base class of shoestring's own optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Stepping(Optimizer, ABC):
    """An optimizer with torch's `step`, which accepts a closure; subclasses define the update."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, if there is one, with gradients enabled; then update the parameters.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @abstractmethod
    def _update(self) -> None:
        """Update the parameters that have a gradient, in place; autograd is off."""
