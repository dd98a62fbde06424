"""LARS and LAMB: optimizers that scale each tensor's step by its trust ratio, without waiting for the device.

Norms are computed in fp32 over whole tensors, after gradients were averaged over ranks, unscaled and clipped. On a CPU,
native loops process tensors in groups that fit into the cache, so that a step does not read tensors from memory a
second time after computing their norms.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shoestring import native
from shoestring._torch import (
    foreach_add_,
    foreach_addcdiv,
    foreach_addcmul_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_sqrt,
    foreach_sub_,
)
from shoestring.core.attachments import Attachments
from shoestring.core.feature import Phase
from shoestring.core.task import Params
from shoestring.optim.groups import check_matched
from shoestring.optim.norms import norms, part_of, sharers
from shoestring.optim.standard import parameter_groups
from shoestring.optim.trust import DynamicBound, Layerwise, Now

if TYPE_CHECKING:
    from shoestring.optim.settings.layerwise import LAMB, LARS


class Lars(Layerwise):
    """SGD with a trust ratio for each tensor: `trust * |w| / (|g| + weight_decay * |w| + eps)` (arXiv:1708.03888).

    The ratio multiplies the learning rate. The ratio is 1 if a norm is 0, and in parameter groups whose `adapts` is
    False.

    Args:
        params: parameters or parameter groups, which may set `adapts`, `lr` and `weight_decay`.
        rate_in_velocity: v = momentum v + lr ratio (g + decay w), w = w - v, as in the paper; otherwise
            v = momentum v + ratio (g + decay w), w = w - lr v.
        clip: "larc" uses the ratio itself as the learning rate, but at most `lr`; a `DynamicBound` bounds the ratio by
            a running quantile.
        sharers: group of ranks that hold the same tensors and divide the computation of norms among them.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        eps: float = 1e-8,
        rate_in_velocity: bool = True,
        clip: DynamicBound | Literal["none", "larc"] = "none",
        sharers: dist.ProcessGroup | None = None,
    ) -> None:
        self.momentum, self.nesterov, self.trust, self.eps = momentum, nesterov, trust, eps
        self.rate_in_velocity, self.clip = rate_in_velocity, clip
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, sharers)

    def _step(self, now: Now) -> None:
        (velocities,) = self._states(now, "momentum_buffer")
        dynamic = self.clip if isinstance(self.clip, DynamicBound) else None
        running = dynamic.running if dynamic else None
        bound = dynamic.bound() if dynamic else None
        is_first = dynamic is not None and bound is None  # the first step's bound is the quantile of its own ratios
        kernel = _lars() if now.native else None
        # The native loop computes norms itself, unless ranks must exchange the norms or the bound depends on them.
        lengths, free = torch.empty(0), now.rates.new_zeros(0)
        if kernel is None or now.sharded or self.sharers is not None or is_first:
            lengths = self._norms(now)
            weights, gradients = lengths[:, now.at]
            free = self.trust * weights / (gradients + now.decays[now.at] * weights + self.eps)
            free = torch.where((weights > 0) & (gradients > 0), free, torch.ones_like(free))
            if dynamic is not None and is_first and len(free):
                dynamic.see(free)
                bound = dynamic.bound()
        if kernel is not None:
            upper = math.inf if bound is None else float(bound)
            lists = (now.weights, now.gradients, velocities)
            numbers = (self.trust, self.eps, upper, self.clip == "larc", self.rate_in_velocity, self.momentum)
            bounded, free = now.run(kernel, lists, (lengths.view(-1),), *numbers, self.nesterov)
        else:
            bounded = free if bound is None else torch.minimum(free, bound)
            if self.clip == "larc":
                bounded = (bounded / now.rates[now.at]).clamp(max=1.0)
            self._by_torch(now, velocities, now.spread(bounded, 1.0))
        self._record(bounded, free)
        if dynamic is not None and len(free):
            if not any(isinstance(group["lr"], Tensor) or group["lr"] for group in self.param_groups):
                dynamic.running = running  # learning rates are 0 in a step that only creates the state for a checkpoint
                return
            dynamic.step += 1
            if not is_first:
                dynamic.see(free)

    def _norms(self, now: Now) -> Tensor:
        """Return the norms of the n weights and of their gradients, with shape (2, n); 0 for tensors that do not
        adapt."""
        adapting = [now.tensors[index] for index in now.adapting]
        if not adapting:
            return now.rates.new_zeros(2, len(now.tensors))
        gradients = [tensor.grad for tensor in adapting if tensor.grad is not None]
        of_weights, of_gradients = norms([*adapting, *gradients], self.sharers).chunk(2)
        return torch.stack([now.spread(of_weights, 0.0), now.spread(of_gradients, 0.0)])

    def _by_torch(self, now: Now, velocities: list[Tensor], ratios: Tensor) -> None:
        """Make a step with torch's foreach operators, which read rates and ratios on the device, so that the host does
        not wait."""
        inner = now.rates * ratios if self.rate_in_velocity else ratios
        change = foreach_mul(now.weights, _scalars(now.decays, now.weights))
        foreach_add_(change, now.gradients)
        foreach_mul_(change, _scalars(inner, now.weights))
        foreach_mul_(velocities, self.momentum)
        foreach_add_(velocities, change)
        if self.nesterov:
            foreach_add_(change, velocities, alpha=self.momentum)
        step = change if self.nesterov else velocities
        if not self.rate_in_velocity:
            step = foreach_mul(step, _scalars(now.rates, now.weights))
        foreach_sub_(now.weights, step)


class Lamb(Layerwise):
    """Adam with a trust ratio for each tensor: |w| / |Adam's step|, at most `max_ratio` (arXiv:1904.00962).

    The ratio multiplies the learning rate. The ratio is 1 if a norm is 0, and in parameter groups whose `adapts` is
    False.

    Args:
        params: parameters or parameter groups, which may set `adapts`, `lr` and `weight_decay`.
        sharers: group of ranks that hold the same tensors and divide the computation of norms among them.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_ratio: float = 10.0,
        sharers: dist.ProcessGroup | None = None,
    ) -> None:
        self.betas, self.eps, self.max_ratio = betas, eps, max_ratio
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, sharers)

    def _step(self, now: Now) -> None:
        first, second = self._states(now, "exp_avg", "exp_avg_sq")
        # The step counts are on the host, so that reading them does not wait for the device.
        counts = [self.state[tensor].setdefault("step", torch.zeros(())) for tensor in now.tensors]
        foreach_add_(counts, 1.0)
        steps = [float(count) for count in counts]
        first_corrections = [1 / (1 - self.betas[0] ** step) for step in steps]
        root_corrections = [1 / math.sqrt(1 - self.betas[1] ** step) for step in steps]
        kernel = _lamb() if now.native and not now.sharded and self.sharers is None else None
        if kernel is not None:
            lists = (now.weights, now.gradients, first, second)
            corrections = torch.tensor([first_corrections, root_corrections])
            bounded, free = now.run(kernel, lists, corrections.unbind(), *self.betas, self.eps, self.max_ratio)
        else:
            bounded, free = self._by_torch(now, first, second, first_corrections, root_corrections)
        self._record(bounded, free)

    def _by_torch(
        self,
        now: Now,
        first: list[Tensor],
        second: list[Tensor],
        first_corrections: list[float],
        root_corrections: list[float],
    ) -> tuple[Tensor, Tensor]:
        """Make a step with torch's foreach operators.

        Returns:
            The ratios of the m tensors that adapt, after and before clipping to the upper bound, each with shape (m,).
        """
        beta1, beta2 = self.betas
        foreach_lerp_(first, now.gradients, 1 - beta1)
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, now.gradients, now.gradients, 1 - beta2)
        roots = foreach_sqrt(second)
        foreach_mul_(roots, root_corrections)
        foreach_add_(roots, self.eps)
        steps = foreach_mul(now.weights, _scalars(now.decays, now.weights))
        steps = foreach_addcdiv(steps, first, roots, first_corrections)
        bounded = free = now.rates.new_zeros(0)
        if now.adapting:
            adapting = [now.tensors[index] for index in now.adapting]
            whole = [part_of(now.tensors[index], steps[index]) for index in now.adapting]
            weights, lengths = norms([*adapting, *whole], self.sharers).chunk(2)
            free = torch.where((weights > 0) & (lengths > 0), weights / lengths, torch.ones_like(weights))
            bounded = free.clamp(max=self.max_ratio)
        foreach_sub_(now.weights, foreach_mul(steps, _scalars(now.rates * now.spread(bounded, 1.0), now.weights)))
        return bounded, free


def _scalars(numbers: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the n entries of `numbers` as 0-d tensors, each in the data type of its tensor, as foreach operators
    require."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return list(numbers.to(tensors[0].dtype).unbind())
    return [number.to(tensor.dtype) for number, tensor in zip(numbers.unbind(), tensors, strict=True)]


_SLOWER = "steps of LARS and LAMB are torch's operators, which are slower than native loops"


@cache
def _lars() -> Any:
    whole, number, wide = ctypes.c_int, ctypes.c_float, ctypes.c_double
    types = [ctypes.c_int64, *[ctypes.c_void_p] * 11, wide, wide, wide, whole, whole, number, whole, whole]
    return native.function("lars_steps", types, _SLOWER, file="layerwise")


@cache
def _lamb() -> Any:
    number = ctypes.c_float
    types = [ctypes.c_int64, *[ctypes.c_void_p] * 13, number, number, number, ctypes.c_double, ctypes.c_int]
    return native.function("lamb_steps", types, _SLOWER, file="layerwise")


# -- as features -------------------------------------------------------------------------------------------------------


def build_lars(attachments: Attachments, settings: LARS) -> None:
    """Attach LARS as the job's optimizer."""
    clip: DynamicBound | Literal["none", "larc"]
    if settings.ratio_clip == "dynamic":
        clip = DynamicBound(settings.quantile, settings.bound, settings.bound_warmup)
    else:
        clip = settings.ratio_clip

    def build(parameters: Params) -> Optimizer:
        return Lars(
            _tables(attachments, settings, settings.vector_lr),
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            trust=settings.trust_coefficient,
            eps=settings.eps,
            rate_in_velocity=settings.rate_in_velocity,
            clip=clip,
            sharers=sharers(attachments) if settings.share_norms else None,
        )

    attachments.build_with(build)


def build_lamb(attachments: Attachments, settings: LAMB) -> None:
    """Attach LAMB as the job's optimizer."""

    def build(parameters: Params) -> Optimizer:
        return Lamb(
            _tables(attachments, settings, settings.lr),
            betas=settings.betas,
            eps=settings.eps,
            max_ratio=settings.max_ratio,
            sharers=sharers(attachments) if settings.share_norms else None,
        )

    attachments.build_with(build)


def publish(attachments: Attachments, settings: LARS | LAMB) -> None:
    """Publish the median trust ratio and the fraction of clipped tensors of each step, and save the dynamic bound.

    The bound is saved separately and restored after the optimizer's state. Loading the optimizer's state first runs a
    step to create the tensors, and this step would change the bound.
    """
    if isinstance(clip := getattr(attachments.optimizer, "clip", None), DynamicBound):
        attachments.keep(settings.name, clip)

    def publish_ratios() -> None:
        optimizer = attachments.optimizer
        if isinstance(optimizer, Layerwise):
            attachments.numbers.update(optimizer.numbers)

    attachments.at(Phase.PROJECT, publish_ratios)


def _tables(attachments: Attachments, settings: LARS | LAMB, vector_lr: float) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices have `adapts` True; vectors have `adapts` False and the learning rate
    `vector_lr`."""
    check_matched(settings.groups, attachments.trained)
    tables = parameter_groups(attachments.trained, settings.lr, settings.weight_decay, settings.groups)
    for table in tables:
        table["adapts"] = table["params"][0].ndim >= 2  # a group contains either matrices or vectors
        if not table["adapts"]:
            table["lr"] *= vector_lr / settings.lr
    return tables
