"""The base class of shoestring's own optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch's form; tensors of the state have the data types that were saved.

        torch casts the tensors of the state to the data type of their parameter. Codes of 8 bits would take 32 bits,
        and float32 moments of bfloat16 parameters would be rounded.
        """
        super().load_state_dict(state_dict)
        saved, own = (
            [parameter for group in groups for parameter in group["params"]]
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for index, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                loaded = self.state[parameter].get(name)
                if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    self.state[parameter][name] = value.detach().to(loaded.device, copy=True)

    @abstractmethod
    def _update(self) -> None:
        """Update the parameters that have a gradient, in place; autograd is off."""
