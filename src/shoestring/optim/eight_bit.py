"""AdamW with 8-bit moments, after Dettmers et al., *8-bit optimizers via block-wise quantization*, 2022.

Each block of 256 elements is divided by its largest magnitude, and each quotient is rounded to the nearest of 256
values (a code table). The table is dense near 0 and spans seven decades down to 1e-7, so that small elements keep some
precision in a block that also has large elements.

Unlike the paper, this code stores the square root of the second moment, and never rounds the root to 0. The root spans
only half as many decades as the second moment. If a second moment were rounded to 0 and the first moment were not 0,
the step would be unbounded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring import native
from shoestring._torch import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
    foreach_sub_,
    is_fake,
)
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


_Pair = tuple[Tensor, Tensor]
"""A parameter and its gradient."""


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
            small, native_ones, others = list[_Pair](), list[_Pair](), list[_Pair]()
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter] or self._begin(parameter)
                if "exp_avg" in state:
                    small.append((parameter, gradient))
                elif _is_native(parameter, gradient, state):
                    native_ones.append((parameter, gradient))
                else:
                    others.append((parameter, gradient))
            if small:
                self._step_small(small, group)
            if native_ones and (kernel := _kernel()) is not None:
                self._step_native(kernel, native_ones, group)
            else:
                others += native_ones
            for parameter, gradient in others:
                self._step_alone(parameter, gradient, group)

    def _begin(self, parameter: Tensor) -> dict[str, Any]:
        """Allocate the state of a parameter."""
        state: dict[str, Any] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        zeros = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        if parameter.numel() < SMALL:
            state["exp_avg"], state["exp_avg_sq"] = zeros, zeros.clone()
        else:
            state["first"], state["first_scale"] = encode(zeros, signed=True)
            state["root"], state["root_scale"] = encode(zeros, signed=False)
        return state

    def _corrections(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> tuple[list[float], list[float]]:
        """Count a step of each parameter; return for each the learning rate over 1 - beta1^t, and the square root of
        1 - beta2^t."""
        (beta1, beta2), rate = group["betas"], float(group["lr"])
        steps = [self.state[parameter]["step"] for parameter in parameters]
        foreach_add_(steps, 1.0)
        counts = [step.item() for step in steps]
        of_count = {count: (rate / (1 - beta1**count), (1 - beta2**count) ** 0.5) for count in set(counts)}
        rates, corrections = zip(*map(of_count.__getitem__, counts), strict=True)
        return list(rates), list(corrections)

    def _step_small(self, pairs: Sequence[_Pair], group: dict[str, Any]) -> None:
        """Step parameters with float32 moments, all at once."""
        parameters = [parameter for parameter, _ in pairs]
        beta1, beta2 = group["betas"]
        firsts, seconds = (
            [self.state[parameter][name] for parameter in parameters] for name in ("exp_avg", "exp_avg_sq")
        )
        gradients = [gradient.to(first.dtype) for (_, gradient), first in zip(pairs, firsts, strict=True)]
        foreach_lerp_(firsts, gradients, 1 - beta1)
        foreach_mul_(seconds, beta2)
        foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        rates, corrections = self._corrections(parameters, group)
        roots = foreach_sqrt(seconds)
        foreach_div_(roots, corrections)
        foreach_add_(roots, group["eps"])
        foreach_mul_(parameters, 1 - float(group["lr"]) * group["weight_decay"])
        updates = foreach_div(firsts, roots)
        foreach_mul_(updates, rates)
        foreach_sub_(parameters, [update.to(own.dtype) for update, own in zip(updates, parameters, strict=True)])

    def _step_native(self, kernel: Any, pairs: Sequence[_Pair], group: dict[str, Any]) -> None:
        """Step parameters by the loop of `native/eight_bit.c`."""
        parameters = [parameter for parameter, _ in pairs]
        rates, corrections = self._corrections(parameters, group)
        if is_fake(parameters[0]):  # memory is being predicted, and the loop allocates none
            return
        sizes = [parameter.numel() for parameter in parameters]
        before = [0, *accumulate(-(-size // BLOCK) for size in sizes)]
        states, count = [self.state[parameter] for parameter in parameters], len(parameters)
        lists = [parameters, [gradient for _, gradient in pairs]]
        lists += [[state[name] for state in states] for name in ("first", "first_scale", "root", "root_scale")]
        keeps, (beta1, beta2) = 1 - float(group["lr"]) * group["weight_decay"], group["betas"]
        floats, pointers, longs = ctypes.c_float * count, ctypes.c_void_p * count, ctypes.c_int64 * (count + 1)
        kernel(
            count,
            longs(*sizes),
            longs(*before),
            *(pointers(*[tensor.data_ptr() for tensor in tensors]) for tensors in lists),
            floats(*rates),
            floats(*[1 / correction for correction in corrections]),
            floats(*[keeps] * count),
            1 - beta1,
            beta2,
            1 - beta2,
            group["eps"],
            torch.get_num_threads(),
        )

    def _step_alone(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter with 8-bit moments by torch's operators."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        first = decode(state["first"], state["first_scale"], signed=True)
        second = decode(state["root"], state["root_scale"], signed=False).square_()
        gradient = grad.to(first.dtype)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = second.sqrt_()
        for name, moment, signed in (("first", first, True), ("root", root, False)):
            codes, scales = encode(moment, signed=signed)
            state[name].copy_(codes)
            state[f"{name}_scale"].copy_(scales)
        (rate,), (correction,) = self._corrections([parameter], group)
        root.div_(correction).add_(group["eps"])
        parameter.mul_(1 - float(group["lr"]) * group["weight_decay"])
        parameter.addcdiv_(first.to(parameter.dtype), root.to(parameter.dtype), value=-rate)


def _is_native(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> bool:
    """Whether the native loop can step a parameter: all is contiguous on the CPU, in the types that the loop reads."""
    floats, codes = (parameter, gradient, state["first_scale"], state["root_scale"]), (state["first"], state["root"])
    return (
        all(tensor.dtype is torch.float32 for tensor in floats)
        and all(tensor.dtype is torch.uint8 for tensor in codes)
        and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in (*floats, *codes))
    )


@cache
def _kernel() -> Any:
    number, pointer = ctypes.c_float, ctypes.c_void_p
    types = [ctypes.c_int64, *[pointer] * 11, number, number, number, number, ctypes.c_int]
    otherwise = "steps of AdamW with 8-bit moments are torch's operators, which are slower than a native loop"
    return native.function("eight_bit_steps", types, otherwise, file="eight_bit")


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
