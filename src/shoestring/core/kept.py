"""The built-in state that survives a restart: model, optimizer, progress and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from shoestring._torch import own_name

Context = Callable[[], AbstractContextManager[Any]]
Work = Callable[[], None]
Across = Literal["same", "shard", "own"]
Merge = Callable[[Sequence[dict[str, Any]], int, int], dict[str, Any]]


@dataclass(frozen=True)
class Kept:
    """Something that must survive; see `Job.keep`."""

    state: Stateful
    across: Across
    merge: Merge | None


@dataclass
class Progress:
    """How far the run is. Schedules are functions of its position."""

    step: int = 0  # optimizer steps done
    total: int = 0  # steps, as `position` counts them, to do; 0 where that is open
    tokens: int = 0  # targets seen, over all ranks
    count: float = 0.0  # the divisor of the last step's loss; see step.py
    position: float = 0.0  # steps that those done are worth: where schedules are
    gain: float = 1.0  # steps that the next one is worth (AdaScale, Johnson et al. 2020, sets it before each)

    unread: Tensor | None = None
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
        """The numbers; what is not read yet is saved as the tensor that it is, so that no checkpoint waits for it."""
        state = {name: value for name, value in vars(self).items() if name != "unread"}
        return state if self.unread is None else state | {"unread": self.unread[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what was saved; but a total that this run has set stays, so that it may train for longer."""
        state = {"position": float(state_dict["step"]), "gain": 1.0} | state_dict  # earlier versions kept neither
        targets = int(state.pop("unread", 0))  # of the newest step
        vars(self).update(state, unread=None, total=self.total or state["total"])
        self.tokens += targets


@dataclass(eq=False)
class ModelState:
    """Weights and buffers under their own names, whatever wraps the model.

    Args:
        trained: name -> what the optimizer steps in a parameter's place, if that is another tensor: saved instead.
        refresh: writes those back into the parameters.
        leave_out: names that are not saved, because they are frozen and saved as a reference.
    """

    model: nn.Module
    trained: Mapping[str, Tensor] = field(default_factory=dict)
    refresh: Work | None = None
    leave_out: Collection[str] = ()

    def __post_init__(self) -> None:
        self._own_name = cache(partial(own_name, self.model))

    def state_dict(self) -> dict[str, Any]:
        state = {self._own_name(name): value for name, value in self.model.state_dict().items()}
        return {name: value for name, value in (state | dict(self.trained)).items() if name not in self.leave_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        whole = {name: value for name, value in state_dict.items() if name not in self.trained}
        tensors = [value for value in whole.values() if isinstance(value, Tensor)]
        sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        strict = not (self.trained or self.leave_out)
        options = StateDictOptions(full_state_dict=bool(tensors) and not sharded, strict=strict)
        set_model_state_dict(self.model, whole, options=options)
        for name, tensor in self.trained.items():
            fill(tensor, state_dict[name])
        if self.refresh is not None:
            self.refresh()


@dataclass(eq=False)
class OptimizerState:
    """An optimizer's state under the names of its parameters, so that it fits any sharding.

    Learning rates and the like are settings, not state: after loading they are those of the present run, so that a
    run can continue with others.

    Args:
        named: () -> name of a parameter -> the tensor that the optimizer steps for it.
        hooks_off: a context in which steps of the optimizer run no hooks; new state is laid out by one of no gradients.
    """

    optimizer: Optimizer
    named: Callable[[], Mapping[str, Tensor]]
    hooks_off: Context

    def state_dict(self) -> dict[str, Any]:
        self._lay_out()
        names = {tensor: name for name, tensor in self.named().items()}
        numbered = [names[parameter] for parameter in _parameters(self.optimizer.param_groups)]
        raw = self.optimizer.state_dict()
        groups = [group | {"params": [numbered[index] for index in group["params"]]} for group in raw["param_groups"]]
        return {"state": {numbered[index]: values for index, values in raw["state"].items()}, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Fill what there is, in place; state that this optimizer does not keep is left out. Where parameters go by
        numbers, as another program has saved them, they are those of the same places."""
        self._lay_out()
        tensors, saved = self.named(), _parameters(state_dict["param_groups"])
        if not tensors.keys() & {*saved}:
            tensors = dict(zip(saved, _parameters(self.optimizer.param_groups), strict=True))
        for name, tensor in tensors.items():
            for key, value in state_dict["state"].get(name, {}).items():
                state = self.optimizer.state[tensor]
                if isinstance(state.get(key), Tensor):
                    fill(state[key], value)
                elif key in state:
                    state[key] = value

    def _lay_out(self) -> None:
        """Let an optimizer that made no step yet make its state, as if none was made."""
        if self.optimizer.state:
            return
        groups, parameters = self.optimizer.param_groups, _parameters(self.optimizer.param_groups)
        before = [(parameter, parameter.grad) for parameter in parameters]
        rates = [group["lr"] for group in groups]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in groups:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate := group["lr"], Tensor) else 0.0
        with self.hooks_off():
            self.optimizer.step()
        for parameter, grad in before:
            parameter.grad = grad
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"] * 0


def _parameters(groups: Sequence[dict[str, Any]]) -> list[Any]:
    """What an optimizer's groups hold: its parameters, or what they are called in its state."""
    return [each for group in groups for each in group["params"]]


def fill(tensor: Tensor, value: Tensor) -> None:
    """Write `value` into `tensor`; this rank's part of it, where `tensor` is sharded and `value` whole."""
    with torch.no_grad():
        if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
            value = value.to(tensor.device).view(tensor.shape)
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)


@dataclass(eq=False)
class RandomState:
    """The random states of Python, numpy and torch on this rank."""

    device: torch.device

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
