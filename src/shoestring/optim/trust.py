"""Trust ratios: what optimizers share that scale each tensor's step by the norms of its weights and gradient."""

from __future__ import annotations

import ctypes
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoestring.optim.norms import local, local_gradient
from shoestring.optim.stepping import Stepping

BLOCK = 8192
"""Elements that one thread takes at a time; `native/layerwise.c` has the same number."""


@dataclass(eq=False)
class DynamicBound:
    """An upper bound of trust ratios: a running quantile over the tensors, times a factor that grows from 1 to `most`.

    It is our own; the publication that names dynamic clipping does not define it. Early in training single tensors
    have ratios far above the others, and later they may. The quantile is of the steps before, so that a tensor's step
    need not wait for the norms of the others; before the first step, it is of that step itself.
    """

    quantile: float
    most: float
    anneal: int
    """Steps until the factor is `most`."""
    step: int = 0
    running: Tensor | None = None
    """The quantile, averaged over about ten steps; 0-d."""

    def bound(self) -> Tensor | None:
        """Of the step that comes; 0-d, None before any ratios were seen."""
        factor = 1 + (self.most - 1) * min(self.step / self.anneal, 1.0) if self.anneal else self.most
        return None if self.running is None else self.running * factor

    def see(self, ratios: Tensor) -> None:
        """The ratios of a step before they were bounded."""
        now = torch.quantile(ratios, self.quantile)
        self.running = now if self.running is None else torch.lerp(self.running.to(now), now, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "running": torch.tensor(math.nan) if self.running is None else self.running}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.running = None if bool(state_dict["running"].isnan()) else state_dict["running"]


class Layerwise(Stepping):
    """An optimizer of which groups with `adapts` have trust ratios.

    Attributes:
        numbers: of the newest step: the median trust ratio and the share of tensors whose ratio was clipped, 0-d.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], sharers: dist.ProcessGroup | None) -> None:
        self.sharers = sharers
        self.numbers: dict[str, Tensor] = {}
        super().__init__(params, defaults | {"adapts": True})

    def _update(self) -> None:
        ready = [(group, each) for group in self.param_groups for each in group["params"] if each.grad is not None]
        if ready:
            self._step(Now.of(ready))

    @abstractmethod
    def _step(self, now: Now) -> None:
        """Change the tensors that the step is about."""

    def _states(self, now: Now, *names: str) -> list[list[Tensor]]:
        """This rank's parts of what is kept of each tensor, zero at first; by name."""
        for each in now.tensors:
            if not (state := self.state[each]):
                state.update({name: torch.zeros_like(each, memory_format=torch.preserve_format) for name in names})
        return [[local(self.state[each][name]) for each in now.tensors] for name in names]

    def _see(self, bounded: Tensor, free: Tensor) -> None:
        """The ratios of tensors that adapt, and what they were before bounds; (m,)."""
        if len(free):
            self.numbers = {"trust_ratio": bounded.median(), "clipped_tensors": (bounded < free).float().mean()}


@dataclass(frozen=True)
class Now:
    """What a step is about: n tensors with a gradient, and this rank's parts of them."""

    tensors: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]
    adapting: list[int]
    rates: Tensor
    decays: Tensor
    """(n,) of fp32 or fp64 where the weights are, and so the rates."""
    sharded: bool
    """Whether norms need an exchange."""
    native: bool
    """Whether native loops can read it: fp32 on a CPU, without gaps."""

    @classmethod
    def of(cls, ready: Sequence[tuple[dict[str, Any], Tensor]]) -> Now:
        tensors = [each for _, each in ready]
        weights = [local(each) for each in tensors]
        gradients = [local_gradient(each) for each in tensors]
        rates, decays = ([group[key] for group, _ in ready] for key in ("lr", "weight_decay"))
        return cls(
            tensors,
            weights,
            gradients,
            [index for index, (group, _) in enumerate(ready) if group["adapts"]],
            _on(weights[0], rates),
            _on(weights[0], decays),
            any(isinstance(each, DTensor) for each in tensors),
            all(
                each.device.type == "cpu" and each.dtype is torch.float32 and each.is_contiguous()
                for each in (*weights, *gradients)
            ),
        )

    @property
    def at(self) -> Tensor:
        """Indices of those that adapt."""
        return torch.tensor(self.adapting, dtype=torch.long, device=self.rates.device)

    def spread(self, adapting: Tensor, otherwise: float) -> Tensor:
        """(n,) of numbers of those that adapt."""
        return torch.full_like(self.rates, otherwise).index_copy_(0, self.at, adapting.to(self.rates))

    def run(self, kernel: Any, lists: Sequence[Sequence[Tensor]], arrays: Sequence[Tensor], *numbers: float) -> Tensor:
        """Call a native loop; the ratios of those that adapt, bounded and before that, (2, m)."""
        sizes = [each.numel() for each in self.weights]
        first = [0, *accumulate(-(-size // BLOCK) for size in sizes)]
        partial = torch.empty(first[-1], 2, dtype=torch.float64)
        ratios = torch.empty(2, len(sizes))
        flags = torch.zeros(len(sizes), dtype=torch.uint8)
        flags[self.at] = 1
        count, long = len(sizes), ctypes.c_int64
        kernel(
            count,
            (long * count)(*sizes),
            (long * (count + 1))(*first),
            *((ctypes.c_void_p * count)(*[each.data_ptr() for each in tensors]) for tensors in lists),
            *(each.data_ptr() if len(each) else None for each in (self.rates, self.decays, *arrays)),
            flags.data_ptr(),
            partial.data_ptr(),
            ratios.data_ptr(),
            *numbers,
            torch.get_num_threads(),
        )
        return ratios[:, self.at]


def _on(like: Tensor, numbers: list[Any]) -> Tensor:
    """(n,) of the numbers, some of which may be 0-d tensors on the device."""
    wide = torch.float64 if like.dtype is torch.float64 else torch.float32
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number, dtype=wide, device=like.device) for number in numbers])
    return torch.tensor(numbers, dtype=wide).to(like.device, non_blocking=True)
