"""Averages of the weights over steps: they are what is evaluated and exported, and training never sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_copy_, foreach_lerp_, foreach_mul_
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.kept import fill
from shoestring.optim.norms import local


class Average(Protocol):
    """What is kept of a sequence of weights; names -> tensors, this rank's parts of sharded ones."""

    def add(self, weights: dict[str, Tensor], steps: int) -> None:
        """The weights after so many steps."""
        ...

    def value(self) -> dict[str, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class MovingAverage:
    """a = d a + (1 - d) w with d = min(decay, (1 + t) / (10 + t))."""

    def __init__(self, decay: float) -> None:
        self.decay, self.average, self.steps = decay, {}, 0

    def add(self, weights: dict[str, Tensor], steps: int) -> None:
        if not self.average:
            self.average = {name: each.detach().clone() for name, each in weights.items()}
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        foreach_lerp_(_locals(self.average), _locals(weights), 1 - decay)

    def value(self) -> dict[str, Tensor]:
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        _fill(self.average, state_dict["average"])


class LatestAverage:
    """The mean of the weights of every `every`-th step, of the latest `count` of them."""

    def __init__(self, count: int, every: int) -> None:
        self.count, self.every = count, every
        self.latest: list[dict[str, Tensor]] = []
        self.average: dict[str, Tensor] = {}

    def add(self, weights: dict[str, Tensor], steps: int) -> None:
        if not self.average:  # what there is before any was set aside: the newest weights
            self.average = {name: each.detach().clone() for name, each in weights.items()}
        if not steps or steps % self.every:
            if not self.latest:
                foreach_copy_(_locals(self.average), _locals(weights))
            return
        oldest = self.latest.pop(0) if len(self.latest) == self.count else None
        if oldest is None:
            oldest = {name: torch.empty_like(each) for name, each in weights.items()}
        foreach_copy_(_locals(oldest), _locals(weights))
        self.latest.append(oldest)
        mean = _locals(self.average)
        foreach_copy_(mean, _locals(self.latest[0]))
        for other in self.latest[1:]:
            foreach_add_(mean, _locals(other))
        foreach_mul_(mean, 1 / len(self.latest))

    def value(self) -> dict[str, Tensor]:
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average), "latest": {str(n): dict(each) for n, each in enumerate(self.latest)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _fill(self.average, state_dict["average"])
        saved = list(state_dict["latest"].values())[-self.count :]
        self.latest = [{name: torch.empty_like(each) for name, each in self.average.items()} for _ in saved]
        for own, each in zip(self.latest, saved, strict=True):
            _fill(own, each)


def _locals(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [local(each).detach() for each in tensors.values()]


def _fill(own: dict[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        fill(tensor, saved[name])


def attach(job: Job, name: str, average: Average) -> None:
    """Average the weights after each step, keep the average across restarts, and evaluate it."""
    check_steps_parameters(job, name)
    average.add(dict(job.trained), 0)
    job.at(Phase.PROJECT, lambda: average.add(dict(job.trained), job.progress.step + 1))
    job.keep(name, average, across="shard")
    job.surround_evaluation(lambda: swapped(job, average.value()))


@contextmanager
def swapped(job: Job, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the weights are these values, which hold the weights meanwhile."""
    pairs = [(local(job.trained[name]).detach(), local(value)) for name, value in values.items()]

    def swap() -> None:
        for one, other in pairs:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    swap()
    try:
        yield
    finally:
        swap()


def check_steps_parameters(job: Job, name: str) -> None:
    """Raise ConfigError where the optimizer steps other tensors than the model's parameters."""
    if owner := job.owners.get("what the optimizer steps"):
        raise ConfigError(f"`{name}` cannot evaluate its weights: `{owner}` steps copies of the parameters")


def exported(weights: dict[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with those that were averaged in place of the trained ones."""
    return weights | {name: value.to(weights[name].dtype) for name, value in average.items() if name in weights}
