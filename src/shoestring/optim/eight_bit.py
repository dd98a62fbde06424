"""AdamW with 8-bit moments, after Dettmers et al., *8-bit optimizers via block-wise quantization*, 2022.

Each block of 256 elements is divided by its largest magnitude, and each quotient is rounded to the nearest of 256
values (a code table). The table is dense near 0 and spans seven decades down to 1e-7, so that small elements keep some
precision in a block that also has large elements.

Unlike the paper, this code stores the square root of the second moment, and never rounds the root to 0. The root spans
only half as many decades as the second moment. If a second moment were rounded to 0 and the first moment were not 0,
the step would be unbounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.task import Params
from shoestring.optim.groups import check_matched
from shoestring.optim.standard import parameter_groups
from shoestring.optim.stepping import Stepping
from shoestring.sharded import is_sharded

if TYPE_CHECKING:
    from shoestring.optim.settings.standard import AdamW

BLOCK = 256
SMALL = 4096
"""Parameters with fewer elements (biases and norms) keep float32 moments, because their part of the memory is
negligible."""


@cache
def values(signed: bool) -> Tensor:
    """The code table: 256 float32 values in ascending order, from -1 (signed) or 0 to 1.

    Decade d, from 0 to 6, is [0.1, 1] x 10^(d - 6). Decade d is divided into 2^d equal intervals, or into twice as many
    in the unsigned table, which spends no bit on the sign. The table holds the midpoints of all intervals (in the
    signed table also their negatives), 0 and 1.
    """
    positive = []
    for decade in range(7):
        parts = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        positive.append((parts[1:] + parts[:-1]) / 2 * 10.0 ** (decade - 6))
    midpoints = torch.cat(positive)
    midpoints = torch.cat([-midpoints, midpoints]) if signed else midpoints
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return torch.cat([midpoints, ends]).sort().values.float()


@cache
def _values_on(signed: bool, device: torch.device) -> Tensor:
    return values(signed).to(device)


@cache
def _finder(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Build two tables that give the nearest code of a float32 in [-1, 1] without a search, indexed by its upper 16
    bits.

    The first table holds the code of the smallest float with these upper bits. The second table holds the threshold
    above which the next code is nearer. Two tables suffice because at most one threshold lies among floats that share
    their upper 16 bits.
    """
    table = values(signed)
    bounds = (table[1:] + table[:-1]) / 2
    if not signed:
        bounds[0] = 0  # only 0 itself is encoded as 0
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    # For a negative sign, the smallest float with given upper bits has the largest magnitude, so its lower bits are all
    # ones.
    smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32).nan_to_num()
    codes = torch.bucketize(smallest, bounds)
    next_bounds = torch.cat([bounds, torch.tensor([torch.inf])])[codes]
    return codes.byte().to(device), next_bounds.to(device)


def encode(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize a tensor.

    Args:
        signed: whether to use the signed code table. With the unsigned table, only 0 is encoded as 0.

    Returns:
        The uint8 codes, in the shape of `x`, and the largest magnitude of each block, in float32.
    """
    flat = x.detach().float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(1)
    quotients = (padded / torch.where(largest > 0, largest, 1)[:, None]).flatten()
    first_codes, next_bounds = _finder(signed, x.device)
    upper = (quotients.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    codes = first_codes.index_select(0, upper).add_(quotients > next_bounds.index_select(0, upper))
    return codes[: len(flat)].view(x.shape), largest


def decode(numbers: Tensor, largest: Tensor, *, signed: bool) -> Tensor:
    """Dequantize the codes and scales that `encode` returned, to float32."""
    flat = _values_on(signed, numbers.device).index_select(0, numbers.flatten().int())
    whole = len(flat) // BLOCK * BLOCK  # number of elements in complete blocks
    flat[:whole].view(-1, BLOCK).mul_(largest[: whole // BLOCK, None])
    flat[whole:].mul_(largest[-1])
    return flat.view(numbers.shape)


class EightBitAdamW(Stepping):
    """AdamW (Loshchilov and Hutter, 2019) with 8-bit moments; small parameters keep float32 moments.

    The state of a large parameter is `step`, `first` and `root` (uint8, in the parameter's shape), and `first_scale`
    and `root_scale` (float32, one per block). The state of a small parameter is `step`, `exp_avg` and `exp_avg_sq`, as
    in torch's AdamW.
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
        if "first" in state:  # float32 moments, in contrast, were updated in place
            for name, moment, signed in (("first", first, True), ("root", second.sqrt(), False)):
                codes, scales = encode(moment, signed=signed)
                state[name].copy_(codes)
                state[f"{name}_scale"].copy_(scales)
        count = float(state["step"])
        root = second.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first.to(parameter.dtype), root.to(parameter.dtype), value=-group["lr"] / (1 - beta1**count))

    def _averages(self, parameter: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return both moments in float32: decoded copies for large parameters, the state itself for small
        parameters."""
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


def build(attachments: Attachments, settings: AdamW) -> Callable[[Params], Optimizer]:
    """Return the optimizer's factory function, for `Attachments.build_with`.

    Raises:
        ConfigError: raised by the factory if parameters are sharded, because the optimizer quantizes blocks of whole
            tensors.
    """

    def make(parameters: Params) -> Optimizer:
        check_matched(settings.groups, attachments.trained)
        if any(is_sharded(parameter) for parameter in parameters):
            raise ConfigError(
                f"`{settings.name}` rounds whole tensors, and the parameters are sharded", hint="use optim.adamw"
            )
        tables = parameter_groups(attachments.trained, settings.lr, settings.weight_decay, settings.groups)
        return EightBitAdamW(tables, lr=settings.lr, betas=settings.betas, eps=settings.eps)

    return make
