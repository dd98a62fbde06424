"""States that every checkpoint holds: model, optimizer, progress and random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring._torch import own_name
from shoestring.core.shard_order import Orders, ShardOrder
from shoestring.sharded import is_sharded, part_like

Context = Callable[[], AbstractContextManager[Any]]
Work = Callable[[], None]
Across = Literal["same", "shard", "own"]
Merge = Callable[[Sequence[dict[str, Any]], int, int], dict[str, Any]]


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored.

    The same protocol as torch.distributed.checkpoint's `Stateful`, which takes a second to import.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Kept:
    """A state that checkpoints hold, with the arguments of `Attachments.keep`."""

    state: Stateful
    across: Across
    merge: Merge | None
    merged: bool = False


@dataclass
class Progress:
    """How far a run has trained. Schedules are functions of `position`."""

    step: int = 0  # optimizer steps done
    total: int = 0  # position at which training ends; 0 if not known
    tokens: int = 0  # targets seen, over all ranks
    count: float = 0.0  # divisor of the newest step's loss sum; 0 before the first step; see step.py
    position: float = 0.0  # argument of all schedules: the sum of the gains of all steps done
    gain: float = 1.0  # how far the next step advances `position`; AdaScale (Johnson et al., 2020) sets `gain`

    planned: int = 0
    """`total` in the loaded checkpoint, towards which schedules have decayed so far; this run's `total` may differ."""
    unread: Tensor | None = None
    """On an accelerator, (loss sum, count, votes to stop) of the newest step; these are read one step late."""

    @property
    def done(self) -> bool:
        """Whether `position` has reached `total`."""
        return 0 < self.total <= self.position

    @property
    def last(self) -> bool:
        """Whether the next step is the last one."""
        return 0 < self.total <= self.position + self.gain

    def advance(self) -> None:
        """Count the step just done, and advance `position` by its gain."""
        self.step += 1
        self.position += self.gain

    def state_dict(self) -> dict[str, Any]:
        """All fields but `planned`. An unread count stays a tensor, so that saving does not wait for the device."""
        state = {name: value for name, value in vars(self).items() if name not in ("unread", "planned")}
        return state if self.unread is None else state | {"unread": self.unread[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the fields; a `total` that this run has set takes precedence, so that the run may train longer."""
        state = {"position": float(state_dict["step"]), "gain": 1.0} | state_dict  # for checkpoints of earlier versions
        state["tokens"] += int(state.pop("unread", 0))  # targets of the newest step
        vars(self).update(state, unread=None, total=self.total or state["total"], planned=state["total"])


@dataclass(eq=False)
class ModelState:
    """State of the model: parameters and buffers, under their names in the unwrapped model.

    Args:
        trained: name of a parameter -> tensor that the optimizer steps and checkpoints hold instead of the parameter.
        refresh: copies the tensors of `trained` into the parameters.
        leave_out: names of tensors to leave out: frozen tensors, for which a checkpoint holds only a `Reference`, and
            parameters that only other ranks hold.
        trainers: name of a parameter -> the ranks that train it; checkpoints hold the values of these ranks. Empty if
            all ranks train all parameters.
        holders: name of a parameter -> the ranks that have it, for parameters that not all ranks have.
        orders: name of a parameter -> order of its tensor in `trained`, if it differs from the parameter's.
    """

    model: nn.Module
    trained: Mapping[str, Tensor] = field(default_factory=dict)
    refresh: Work | None = None
    leave_out: Collection[str] = ()
    trainers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    orders: Orders = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._own_name = cache(partial(own_name, self.model))

    def state_dict(self) -> dict[str, Any]:
        state = {self._own_name(name): value for name, value in self.model.state_dict().items()}
        state |= {name: self.trained[owner] for name, owner in self._aliases.items()}
        elsewhere = self.trainers.keys() - self.trained.keys()  # not trained here: this rank has their initial values
        left_out = {*self.leave_out, *elsewhere}
        return {name: value for name, value in (state | dict(self.trained)).items() if name not in left_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        loaded_below = {*self.trained, *self._aliases}
        whole = {name: value for name, value in state_dict.items() if name not in loaded_below}
        tensors = [value for value in whole.values() if isinstance(value, Tensor)]
        if self.trainers:  # other ranks' parameters may be on `meta`; torch's function would then untie tied parameters
            own = {self._own_name(name): value for name, value in self.model.state_dict(keep_vars=True).items()}
            for name, value in whole.items():
                if isinstance(value, Tensor):
                    fill(own[name], value)
        else:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            sharded = any(is_sharded(tensor) for tensor in tensors)
            strict = not (self.trained or self.leave_out)
            options = StateDictOptions(full_state_dict=bool(tensors) and not sharded, strict=strict)
            set_model_state_dict(self.model, whole, options=options)
        for name, tensor in self.trained.items():
            fill(tensor, state_dict[name], self.orders.get(name))
        if self.refresh is not None:
            self.refresh()

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Second name of a tied parameter -> its name in `trained`, if its tensor there has another shape (a shard)."""
        owners = {self._own_name(name): parameter for name, parameter in self.model.named_parameters()}
        names = {parameter: name for name, parameter in owners.items()}
        tied = {
            self._own_name(name): names[value]
            for name, value in self.model.state_dict(keep_vars=True).items()
            if isinstance(value, nn.Parameter) and value in names
        }
        return {
            name: owner
            for name, owner in tied.items()
            if name != owner and owner in self.trained and self.trained[owner].shape != owners[owner].shape
        }


@dataclass(eq=False)
class OptimizerState:
    """State of the optimizer, keyed by parameter names instead of torch's indices, so that it can be resharded.

    Learning rates and other settings are not restored, so that a run may be resumed with different ones.

    Args:
        named: function without arguments -> {name of a parameter: tensor that the optimizer steps for it}.
        hooks_off: context in which a step of the optimizer does not count as a training step.
        trainers: name of a parameter -> the ranks that train it; empty if all ranks train all parameters.
        orders: name of a parameter -> order of its stepped tensor, if it differs from the parameter's.
    """

    optimizer: Optimizer
    named: Callable[[], Mapping[str, Tensor]]
    hooks_off: Context
    trainers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    orders: Orders = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        self._lay_out()
        names = {tensor: name for name, tensor in self.named().items()}
        numbered = [names[parameter] for parameter in _parameters(self.optimizer.param_groups)]
        raw = self.optimizer.state_dict()
        groups = [group | {"params": [numbered[index] for index in group["params"]]} for group in raw["param_groups"]]
        return {"state": {numbered[index]: values for index, values in raw["state"].items()}, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved state into the optimizer's tensors; ignore saved entries that this optimizer does not have.

        Other programs save indices instead of names; then parameters are matched by their position.
        """
        self._lay_out()
        tensors, saved = self.named(), _parameters(state_dict["param_groups"])
        stepped = _parameters(self.optimizer.param_groups)
        if not tensors.keys() & {*saved}:
            tensors = dict(zip(saved, stepped, strict=True))
        own = set(map(id, stepped))  # the checkpoint may also hold parameters now frozen, or trained by other ranks
        for name, tensor in tensors.items():
            if id(tensor) not in own:
                continue
            for key, value in state_dict["state"].get(name, {}).items():
                state = self.optimizer.state[tensor]
                if isinstance(state.get(key), Tensor):
                    fill(state[key], value, self.orders.get(name))
                elif key in state:
                    state[key] = value

    def _lay_out(self) -> None:
        """Make an optimizer that has no state yet allocate it, by a step that changes no parameter.

        torch allocates state only in the first step, but loading a checkpoint needs tensors to copy into.
        """
        if self.optimizer.state:
            return
        groups, parameters = self.optimizer.param_groups, _parameters(self.optimizer.param_groups)
        before = [(parameter, parameter.grad) for parameter in parameters]
        settings = [{key: group[key] for key in ("lr", "weight_decay") if key in group} for group in groups]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, numbers in zip(groups, settings, strict=True):  # weight decay would change the momentum buffers
            group |= {
                key: torch.zeros_like(number) if isinstance(number, Tensor) else 0.0 for key, number in numbers.items()
            }
        with self.hooks_off():
            self.optimizer.step()
        for parameter, grad in before:
            parameter.grad = grad
        for group, numbers in zip(groups, settings, strict=True):
            group |= numbers
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"] * 0


def _parameters(groups: Sequence[dict[str, Any]]) -> list[Any]:
    """All parameters of an optimizer's groups, in order; in a state dict they are names or indices."""
    return [parameter for group in groups for parameter in group["params"]]


def fill(tensor: Tensor, value: Tensor, order: ShardOrder | None = None) -> None:
    """Copy `value` into `tensor`. If `tensor` is sharded and `value` is not, copy this rank's shard of `value`.

    Args:
        order: order of the DTensor `tensor`, if it differs from the order of its parameter.
    """
    with torch.no_grad():
        if is_sharded(tensor) and not is_sharded(value):
            value = value.to(tensor.device).view(tensor.shape)
            if order is not None and order.describes(value):
                value = order.into(value)
            value = part_like(value, tensor)
        tensor.copy_(value)


@dataclass(eq=False)
class RandomState:
    """States of this rank's random number generators: Python's, numpy's and torch's, on CPU and GPU."""

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
