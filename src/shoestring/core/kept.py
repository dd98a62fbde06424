"""The built-in state that survives a restart: model, optimizer, progress and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as named
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoestring.core._torch import own_name

Silence = Callable[[], AbstractContextManager[None]]


@dataclass
class Progress:
    """How far the run is. Schedules are functions of its position."""

    step: int = 0  # optimizer steps done
    total: int = 0  # steps, as `position` counts them, to do; 0 where that is open
    tokens: int = 0  # targets seen, over all ranks
    count: float = 0.0  # the divisor of the last step's loss; see step.py
    position: float = 0.0  # steps that those done are worth: where schedules are
    gain: float = 1.0  # steps that the next one is worth (AdaScale, Johnson et al. 2020, sets it before each)

    unread: torch.Tensor | None = None
    """On an accelerator, (loss, count, votes to stop) of the newest step: reading them now would wait for it."""

    @property
    def done(self) -> bool:
        """Whether all that was to do is done."""
        return 0 < self.total <= self.position

    @property
    def last(self) -> bool:
        """Whether the next step is the last."""
        return 0 < self.total <= self.position + self.gain

    def advance(self) -> None:
        """Count a step."""
        self.step += 1
        self.position += self.gain

    def state_dict(self) -> dict[str, Any]:
        """The numbers; what is not read yet is saved as the tensor that it is, so that no save waits for it."""
        state = {name: value for name, value in vars(self).items() if name != "unread"}
        return state if self.unread is None else state | {"unread": self.unread[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {"position": float(state_dict["step"]), "gain": 1.0} | state_dict  # earlier versions kept neither
        targets = int(state.pop("unread", 0))  # of the newest step
        vars(self).update(state, unread=None)
        self.tokens += targets


def _options(state: dict[str, Any]) -> named.StateDictOptions:
    """Whole tensors are distributed on loading; DTensors go where they lie."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
    return named.StateDictOptions(full_state_dict=bool(tensors) and not sharded)


class ModelState:
    """Weights and buffers under their own names, whatever wraps the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._own_name = model, cache(partial(own_name, model))

    def state_dict(self) -> dict[str, Any]:
        return {self._own_name(name): value for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        named.set_model_state_dict(self.model, state_dict, options=_options(state_dict))


class OptimizerState:
    """An optimizer's state under the names of its parameters, so that it fits any sharding.

    Learning rates and the like are settings, not state: after loading they are those of the present run, so that a
    run can go on with others.

    Args:
        silent: a context in which steps of the optimizer run no hooks; torch lays out new state by one of no gradients.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, silent: Silence) -> None:
        self.model, self.optimizer, self.silent = model, optimizer, silent
        self._own_name = cache(partial(own_name, model))

    def state_dict(self) -> dict[str, Any]:
        if not self.optimizer.state:
            with self.silent():
                return named.get_optimizer_state_dict(self.model, self.optimizer)
        names = {parameter: self._own_name(name) for name, parameter in self.model.named_parameters()}
        numbered = [names[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        found = self.optimizer.state_dict()
        groups = [group | {"params": [numbered[index] for index in group["params"]]} for group in found["param_groups"]]
        return {"state": {numbered[index]: each for index, each in found["state"].items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parts = {name: part for each in state_dict["state"].values() for name, part in each.items()}
        settings = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        with self.silent():
            named.set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=_options(parts))
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(values)


class RandomState:
    """The random states of Python, numpy and torch on this rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        state["torch"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if self.device.type == "cuda" and "cuda" in state_dict:
            torch.cuda.set_rng_state(state_dict["cuda"], self.device)
