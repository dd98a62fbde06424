"""Averages of the weights over steps (EMA, LAWA). Evaluations and exports use the averages; training continues with the
weights themselves.

Under local steps, each replica has its own weights between two merges. So averages are updated only after merges, when
all ranks have the same weights. The averages are then equal on all ranks too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_copy_, foreach_lerp_, foreach_mul_
from shoestring.core.attachments import STEPPED, Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.kept import fill
from shoestring.optim.statistics import average_statistics, exported_statistics
from shoestring.optim.swapping import swapped
from shoestring.sharded import local_part


class Average(Protocol):
    """A running average of weights, by parameter name. For sharded tensors, each rank averages its own shards."""

    def add(self, weights: dict[str, Tensor], steps: int) -> None:
        """Update the average with the weights after step `steps` of the run.

        Under local steps, several steps pass between two calls. The average of a parameter that was not in earlier
        calls starts at the parameter's current value.
        """
        ...

    def value(self) -> dict[str, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class MovingAverage:
    """Exponential moving average: a = d a + (1 - d) w, with d = min(decay, (1 + t) / (10 + t)) in step t."""

    def __init__(self, decay: float) -> None:
        self.decay, self.average, self.steps = decay, {}, 0
        self.done: int | None = 0  # step of the latest `add`; None in states saved by earlier versions

    def add(self, weights: dict[str, Tensor], steps: int) -> None:
        _begin(self.average, weights)
        first, self.steps = self.steps + 1, self.steps + max(1, _since(self.done, steps))
        self.done = steps
        # One update covers all steps since the latest call; its decay is the product of the decays of these steps.
        decay = prod(min(self.decay, (1 + step) / (10 + step)) for step in range(first, self.steps + 1))
        foreach_lerp_(_locals(self.average), _locals(self.average, weights), 1 - decay)

    def value(self) -> dict[str, Tensor]:
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average), "steps": self.steps, "done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.done = state_dict["steps"], state_dict.get("done")
        _fill(self.average, state_dict["average"])


class LatestAverage:
    """The mean of the latest `count` snapshots of the weights, which are taken every `every` steps.

    Under local steps, a snapshot that is due between two merges is taken at the later merge.
    """

    def __init__(self, count: int, every: int) -> None:
        self.count, self.every = count, every
        self.latest: list[dict[str, Tensor]] = []
        self.average: dict[str, Tensor] = {}
        self.done: int | None = 0

    def add(self, weights: dict[str, Tensor], steps: int) -> None:
        for tensors in (self.average, *self.latest):
            _begin(tensors, weights)
        now = _locals(self.average, weights)
        due = steps // self.every > (steps - _since(self.done, steps)) // self.every
        self.done = steps
        if not due:
            if not self.latest:  # before the first snapshot the average is the newest weights
                foreach_copy_(_locals(self.average), now)
            return
        # Once there are `count` snapshots, the newest weights overwrite the oldest snapshot.
        snapshot = self.latest.pop(0) if len(self.latest) == self.count else None
        if snapshot is None:
            snapshot = {name: torch.empty_like(tensor) for name, tensor in self.average.items()}
        foreach_copy_(_locals(self.average, snapshot), now)
        self.latest.append(snapshot)
        mean = _locals(self.average)
        foreach_copy_(mean, _locals(self.average, self.latest[0]))
        for later in self.latest[1:]:
            foreach_add_(mean, _locals(self.average, later))
        foreach_mul_(mean, 1 / len(self.latest))

    def value(self) -> dict[str, Tensor]:
        return self.average

    def state_dict(self) -> dict[str, Any]:
        latest = {str(index): dict(snapshot) for index, snapshot in enumerate(self.latest)}
        return {"average": dict(self.average), "latest": latest, "done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict.get("done")
        _fill(self.average, state_dict["average"])
        saved = list(state_dict["latest"].values())[-self.count :]
        self.latest = [{name: torch.empty_like(tensor) for name, tensor in self.average.items()} for _ in saved]
        for snapshot, tensors in zip(self.latest, saved, strict=True):
            _fill(snapshot, tensors)


def _since(done: int | None, steps: int) -> int:
    """Number of steps since the latest `add`, which followed step `done`; 1 if `done` is None, as in states saved by
    earlier versions."""
    return 1 if done is None else steps - done


def _begin(average: dict[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Add the weights that have no average yet: all weights at the first call, and newly unfrozen weights at later
    calls."""
    if len(average) < len(weights):
        average.update({name: weight.detach().clone() for name, weight in weights.items() if name not in average})


def _locals(order: Mapping[str, Tensor], tensors: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """Return this rank's shards of `tensors`, in the order of the names in `order`; if `tensors` is None, the shards of
    `order`."""
    tensors = order if tensors is None else tensors
    return [local_part(tensors[name]).detach() for name in order]


def _fill(average: dict[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Load a saved average in place."""
    for name in average.keys() - saved.keys():  # frozen when the state was saved; `_begin` will add its average
        del average[name]
    for name, tensor in average.items():
        fill(tensor, saved[name])


def attach(attachments: Attachments, name: str, build: Callable[[], Average]) -> None:
    """Attach an average of the weights: update the average after each merge, save it in checkpoints, and evaluate with
    it."""
    check_steps_parameters(attachments, name)
    average = build()
    average.add(dict(attachments.trained), 0)

    def add() -> None:
        weights = dict(attachments.trained)
        if (
            frozen := average.value().keys() - weights.keys()
        ):  # parameters that were frozen after their averaging had begun
            named = attachments.named()
            weights |= {name: named[name] for name in frozen}
        average.add(weights, attachments.progress.step + 1)

    attachments.after_merges.append(add)
    attachments.keep(name, average, across="shard", merged=True)
    attachments.surround_evaluation(lambda: swapped(attachments.named(), average.value()))
    average_statistics(attachments, name, build())


def check_steps_parameters(attachments: Attachments, name: str) -> None:
    """Raise ConfigError if the optimizer updates copies or shards of the parameters instead of the parameters
    themselves."""
    if owner := attachments.owners.get(STEPPED):
        raise ConfigError(f"`{name}` cannot evaluate its weights: `{owner}` updates copies of the parameters")


def exported(
    weights: dict[str, Tensor], average: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Any]], name: str
) -> dict[str, Tensor]:
    """Replace weights and running statistics by the averages of the feature `name`, in the data types of `weights`."""
    averages = {**average, **exported_statistics(states, name)}
    return weights | {name: value.to(weights[name].dtype) for name, value in averages.items() if name in weights}
