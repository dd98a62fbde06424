"""Trust ratios, as used by LARS and LAMB: a tensor's step is scaled by the ratio of its weights' norm to its step's
norm."""

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

from shoestring.optim.norms import local_gradient
from shoestring.optim.stepping import Stepping
from shoestring.sharded import is_sharded, local_part

BLOCK = 8192
"""Elements that one thread processes at a time; must equal BLOCK in `native/layerwise.c`."""


@dataclass(eq=False)
class DynamicBound:
    """An upper bound of trust ratios: the running quantile of all tensors' ratios, times a factor that grows from 1.

    The definition is our own, because the publication that names dynamic clipping does not define it. Early in
    training, a few tensors have ratios far above the others; such ratios are harmful at first but normal later, so the
    factor grows. The quantile is computed from previous steps, so that no tensor waits for the norms of other tensors;
    only the first step uses the quantile of its own ratios.
    """

    quantile: float
    most: float
    anneal: int
    """Number of steps over which the factor grows to `most`."""
    step: int = 0
    running: Tensor | None = None
    """The quantile of the ratios, averaged over about ten steps; 0-d."""

    def bound(self) -> Tensor | None:
        """Return the bound of the next step's ratios, a 0-d tensor; None before the first step."""
        factor = 1 + (self.most - 1) * min(self.step / self.anneal, 1.0) if self.anneal else self.most
        return None if self.running is None else self.running * factor

    def see(self, ratios: Tensor) -> None:
        """Update the running quantile with one step's ratios, taken before they were bounded."""
        newest = torch.quantile(ratios, self.quantile)
        self.running = newest if self.running is None else torch.lerp(self.running.to(newest), newest, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "running": torch.tensor(math.nan) if self.running is None else self.running}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.running = None if bool(state_dict["running"].isnan()) else state_dict["running"]


class Layerwise(Stepping):
    """Base class of optimizers with trust ratios. Tensors of parameter groups whose `adapts` is False have no ratio.

    Attributes:
        numbers: metrics of the newest step as 0-d tensors: the median trust ratio and the fraction of clipped ratios.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], sharers: dist.ProcessGroup | None) -> None:
        self.sharers = sharers
        self.numbers: dict[str, Tensor] = {}
        super().__init__(params, defaults | {"adapts": True})

    def _update(self) -> None:
        steps = [
            (group, tensor) for group in self.param_groups for tensor in group["params"] if tensor.grad is not None
        ]
        if steps:
            self._step(Now.of(steps))

    @abstractmethod
    def _step(self, now: Now) -> None:
        """Update the tensors of the step in place."""

    def _states(self, now: Now, *names: str) -> list[list[Tensor]]:
        """Return this rank's shards of the optimizer state, one list per name; they are zero at a tensor's first
        step."""
        for tensor in now.tensors:
            if not (state := self.state[tensor]):
                state.update({name: torch.zeros_like(tensor, memory_format=torch.preserve_format) for name in names})
        return [[local_part(self.state[tensor][name]) for tensor in now.tensors] for name in names]

    def _record(self, bounded: Tensor, free: Tensor) -> None:
        """Set `numbers` from the ratios of the m tensors that adapt, after (`bounded`) and before (`free`) clipping to
        the upper bound; both have shape (m,)."""
        if len(free):
            self.numbers = {"trust_ratio": bounded.median(), "clipped_tensors": (bounded < free).float().mean()}


@dataclass(frozen=True)
class Now:
    """The inputs of one optimizer step: n tensors with a gradient, m of which adapt, that is, have a trust ratio."""

    tensors: list[Tensor]
    weights: list[Tensor]
    """This rank's shards of `tensors`."""
    gradients: list[Tensor]
    """This rank's shards of the gradients of `tensors`."""
    adapting: list[int]
    """Indices of the tensors that adapt."""
    rates: Tensor
    """Learning rates, with shape (n,), on the weights' device; in fp64 if the weights are fp64, else in fp32."""
    decays: Tensor
    """Weight decays; shape, device and data type are the same as for `rates`."""
    sharded: bool
    """Whether any tensor is sharded, so that norms need an all-reduce."""
    native: bool
    """Whether native loops can run: all weights and gradients are contiguous fp32 tensors on the CPU."""

    @classmethod
    def of(cls, steps: Sequence[tuple[dict[str, Any], Tensor]]) -> Now:
        """Collect the inputs from pairs of a parameter group and a tensor with a gradient."""
        tensors = [tensor for _, tensor in steps]
        weights = [local_part(tensor) for tensor in tensors]
        gradients = [local_gradient(tensor) for tensor in tensors]
        rates, decays = ([group[key] for group, _ in steps] for key in ("lr", "weight_decay"))
        return cls(
            tensors,
            weights,
            gradients,
            [index for index, (group, _) in enumerate(steps) if group["adapts"]],
            _on(weights[0], rates),
            _on(weights[0], decays),
            any(is_sharded(tensor) for tensor in tensors),
            all(
                part.device.type == "cpu" and part.dtype is torch.float32 and part.is_contiguous()
                for part in (*weights, *gradients)
            ),
        )

    @property
    def at(self) -> Tensor:
        """Indices of the m tensors that adapt, with shape (m,), on the device."""
        return torch.tensor(self.adapting, dtype=torch.long, device=self.rates.device)

    def spread(self, adapting: Tensor, otherwise: float) -> Tensor:
        """Expand the m values of the tensors that adapt to all n tensors; the other tensors get the value
        `otherwise`."""
        return torch.full_like(self.rates, otherwise).index_copy_(0, self.at, adapting.to(self.rates))

    def run(self, kernel: Any, lists: Sequence[Sequence[Tensor]], arrays: Sequence[Tensor], *numbers: float) -> Tensor:
        """Call a native loop of `native/layerwise.c`, which updates the tensors of `lists` in place.

        Args:
            lists: lists of n tensors. arrays: tensors with one entry per tensor. numbers: scalar arguments in the
                kernel's order.

        Returns:
            The ratios of the m tensors that adapt, after and before clipping to the upper bound, with shape (2, m).
        """
        sizes = [weight.numel() for weight in self.weights]
        # Index of each tensor's first block, then the number of blocks.
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
            *((ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors]) for tensors in lists),
            *(array.data_ptr() if len(array) else None for array in (self.rates, self.decays, *arrays)),
            flags.data_ptr(),
            partial.data_ptr(),
            ratios.data_ptr(),
            *numbers,
            torch.get_num_threads(),
        )
        return ratios[:, self.at]


def _on(like: Tensor, numbers: list[Any]) -> Tensor:
    """Put n numbers, some of which may be 0-d tensors, into one tensor of shape (n,) on the device of `like`."""
    wide = torch.float64 if like.dtype is torch.float64 else torch.float32
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number, dtype=wide, device=like.device) for number in numbers])
    return torch.tensor(numbers, dtype=wide).to(like.device, non_blocking=True)
