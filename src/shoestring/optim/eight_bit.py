"""AdamW whose two averages take 8 bits an element, after Dettmers et al., *8-bit optimizers via block-wise
quantization*, 2022.

Each block of 256 elements is divided by its largest magnitude, and each quotient becomes the number of the nearest of
256 values. Those are dense near 0, in seven decades down to 1e-7: small elements beside large ones keep some digits.
Departing from the paper, the root of the second average is what is rounded, and never to 0: the root has half the
decades, and an element that came out as 0 below a first average that did not would make a step without bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.task import Params
from shoestring.optim.groups import check_matched
from shoestring.optim.standard import parameter_groups
from shoestring.optim.stepping import Stepping

if TYPE_CHECKING:
    from shoestring.optim.settings.standard import AdamW

BLOCK = 256
SMALL = 4096
"""Elements below which a parameter's averages stay in float32: biases and norms, which are little of the memory."""


@cache
def values(signed: bool) -> Tensor:
    """The 256 values that stand for the quotients, in order, from -1 or 0 to 1; float32.

    Decade d of seven, from 10^-7 up, has the middles of 2^d equal parts of [0.1, 1] x its power of ten, and twice as
    many where no bit is spent on a sign; 0 and 1 complete them.
    """
    positive = []
    for decade in range(7):
        parts = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        positive.append((parts[1:] + parts[:-1]) / 2 * 10.0 ** (decade - 6))
    found = torch.cat(positive)
    found = torch.cat([-found, found]) if signed else found
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return torch.cat([found, ends]).sort().values.float()


@cache
def _values_on(signed: bool, device: torch.device) -> Tensor:
    return values(signed).to(device)


@cache
def _finder(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """For the upper 16 bits of a float32 in [-1, 1]: the number of the value nearest to the least float that begins so,
    and the bound from which on it is the next one. Between two floats that begin alike lies one bound at most.
    """
    table = values(signed)
    bounds = (table[1:] + table[:-1]) / 2
    if not signed:
        bounds[0] = 0
    begins = torch.arange(1 << 16, dtype=torch.int32) << 16
    least = torch.where(begins < 0, begins | 0xFFFF, begins).view(torch.float32).nan_to_num()
    numbers = torch.bucketize(least, bounds)
    following = torch.cat([bounds, torch.tensor([torch.inf])])[numbers]
    return numbers.byte().to(device), following.to(device)


def encode(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Numbers of the nearest values, of the shape of x, and the largest magnitude of each block, float32.

    Without a sign, nothing but 0 becomes 0.
    """
    flat = x.detach().float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(1)
    quotients = (padded / torch.where(largest > 0, largest, 1)[:, None]).flatten()
    numbers, following = _finder(signed, x.device)
    begins = (quotients.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    found = numbers.index_select(0, begins).add_(quotients > following.index_select(0, begins))
    return found[: len(flat)].view(x.shape), largest


def decode(numbers: Tensor, largest: Tensor, *, signed: bool) -> Tensor:
    """What `encode` returned as float32, of its shape."""
    flat = _values_on(signed, numbers.device).index_select(0, numbers.flatten().int())
    whole = len(flat) // BLOCK * BLOCK
    flat[:whole].view(-1, BLOCK).mul_(largest[: whole // BLOCK, None])
    flat[whole:].mul_(largest[-1])
    return flat.view(numbers.shape)


class EightBitAdamW(Stepping):
    """AdamW (Loshchilov and Hutter, 2019) with averages of 8 bits; parameters that are small keep those of 32.

    State of a parameter: `step`, and `first` and `root` (uint8, of its shape) with `first_scale` and `root_scale`
    (float32, one for each block); or `exp_avg` and `exp_avg_sq`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        first, second = self._averages(parameter, state)
        gradient = grad.to(first.dtype)
        state["step"] += 1
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self._keep(state, first, second)
        count = float(state["step"])
        root = second.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first.to(parameter.dtype), root.to(parameter.dtype), value=-group["lr"] / (1 - beta1**count))

    def _averages(self, parameter: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Both averages in float32; of small parameters the state itself."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            zeros = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            if parameter.numel() < SMALL:
                state["exp_avg"], state["exp_avg_sq"] = zeros, zeros.clone()
            else:
                state["first"], state["first_scale"] = encode(zeros, signed=True)
                state["root"], state["root_scale"] = encode(zeros, signed=False)
        if "exp_avg" in state:
            return state["exp_avg"], state["exp_avg_sq"]
        root = decode(state["root"], state["root_scale"], signed=False)
        return decode(state["first"], state["first_scale"], signed=True), root.square_()

    def _keep(self, state: dict[str, Any], first: Tensor, second: Tensor) -> None:
        if "first" in state:
            for name, average, signed in (("first", first, True), ("root", second.sqrt(), False)):
                numbers, scales = encode(average, signed=signed)
                state[name].copy_(numbers)
                state[f"{name}_scale"].copy_(scales)


def build(job: Job, settings: AdamW) -> Callable[[Params], Optimizer]:
    """For `Job.build_with`.

    Raises:
        ConfigError: an owner of SHARD has given this rank a part of a tensor.
    """

    def make(parameters: Params) -> Optimizer:
        check_matched(settings.groups, job.trained)
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise ConfigError(f"`{settings.name}` rounds whole tensors, and these are sharded", hint="use optim.adamw")
        tables = parameter_groups(job.trained, settings.lr, settings.weight_decay, settings.groups)
        return EightBitAdamW(tables, lr=settings.lr, betas=settings.betas, eps=settings.eps)

    return make
