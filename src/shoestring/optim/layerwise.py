"""LARS and LAMB: each tensor's step scaled by its trust ratio, without waiting for an accelerator.

Norms are of whole tensors, in fp32, of gradients as the step finds them: averaged over ranks, unscaled, clipped. On a
CPU native loops take tensors in waves that fit into a cache, so that what the norms read need not be read again.
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
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.task import Params
from shoestring.optim.groups import check_matched
from shoestring.optim.norms import norms, part_of
from shoestring.optim.standard import parameter_groups
from shoestring.optim.trust import DynamicBound, Layerwise, Now

if TYPE_CHECKING:
    from shoestring.optim.settings.layerwise import LAMB, LARS


class Lars(Layerwise):
    """SGD whose rate each tensor scales by `trust * |w| / (|g| + weight_decay * |w| + eps)` (arXiv:1708.03888).

    The ratio is 1 where a norm is 0, and in groups with `adapts` False.

    Args:
        params: parameters or groups of them; a group's `adapts`, `lr` and `weight_decay` are its own.
        rate_in_velocity: v = momentum v + lr ratio (g + decay w), w = w - v, as in the paper; otherwise
            v = momentum v + ratio (g + decay w), w = w - lr v.
        clip: "larc" bounds lr ratio by lr; a `DynamicBound` bounds the ratio by its own.
        sharers: ranks that hold the same tensors and share the norms out among them.
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
        bound = self.clip.bound() if isinstance(self.clip, DynamicBound) else None
        waits = isinstance(self.clip, DynamicBound) and bound is None
        kernel = _lars() if now.native else None
        given, free = torch.empty(0), now.rates.new_zeros(0)
        if kernel is None or now.sharded or self.sharers is not None or waits:
            given = self._norms(now)
            free = self._ratios(now, given)
            if isinstance(self.clip, DynamicBound) and bound is None and len(free):
                self.clip.see(free)
                bound = self.clip.bound()
        if kernel is not None:
            most = math.inf if bound is None else float(bound)
            lists = (now.weights, now.gradients, velocities)
            numbers = (self.trust, self.eps, most, self.clip == "larc", self.rate_in_velocity, self.momentum)
            bounded, free = now.run(kernel, lists, (given.view(-1),), *numbers, self.nesterov)
        else:
            bounded = free if bound is None else torch.minimum(free, bound)
            if self.clip == "larc":
                bounded = (bounded / now.rates[now.at]).clamp(max=1.0)
            self._by_torch(now, velocities, now.spread(bounded, 1.0))
        self._see(bounded, free)
        if isinstance(self.clip, DynamicBound) and len(free):
            self.clip.step += 1
            if not waits:
                self.clip.see(free)

    def _norms(self, now: Now) -> Tensor:
        """Of weights and gradients of those that adapt; (2, n), 0 elsewhere."""
        chosen = [now.tensors[index] for index in now.adapting]
        if not chosen:
            return now.rates.new_zeros(2, len(now.tensors))
        theirs = [each.grad for each in chosen if each.grad is not None]
        weights, gradients = norms([*chosen, *theirs], self.sharers).chunk(2)
        return torch.stack([now.spread(weights, 0.0), now.spread(gradients, 0.0)])

    def _ratios(self, now: Now, given: Tensor) -> Tensor:
        """Of those that adapt, before bounds; (m,)."""
        weights, gradients = given[:, now.at]
        found = self.trust * weights / (gradients + now.decays[now.at] * weights + self.eps)
        return torch.where((weights > 0) & (gradients > 0), found, torch.ones_like(found))

    def _by_torch(self, now: Now, velocities: list[Tensor], ratios: Tensor) -> None:
        """By torch's foreach operators, which take each tensor's numbers from where they are."""
        inner = now.rates * ratios if self.rate_in_velocity else ratios
        change = foreach_mul(now.weights, _each(now.decays, now.weights))
        foreach_add_(change, now.gradients)
        foreach_mul_(change, _each(inner, now.weights))
        foreach_mul_(velocities, self.momentum)
        foreach_add_(velocities, change)
        if self.nesterov:
            foreach_add_(change, velocities, alpha=self.momentum)
        step = change if self.nesterov else velocities
        foreach_sub_(now.weights, step if self.rate_in_velocity else foreach_mul(step, _each(now.rates, now.weights)))


class Lamb(Layerwise):
    """Adam whose step each tensor scales by |w| over the step's norm, at most `max_ratio` (arXiv:1904.00962).

    The ratio is 1 where a norm is 0, and in groups with `adapts` False.

    Args:
        params: parameters or groups of them; a group's `adapts`, `lr` and `weight_decay` are its own.
        sharers: ranks that hold the same tensors and share the norms out among them.
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
        counts = [self.state[each].setdefault("step", torch.zeros(())) for each in now.tensors]  # on the host
        foreach_add_(counts, 1.0)
        steps = [float(count) for count in counts]
        slow = [1 / (1 - self.betas[0] ** step) for step in steps]
        root = [1 / math.sqrt(1 - self.betas[1] ** step) for step in steps]
        kernel = _lamb() if now.native and not now.sharded and self.sharers is None else None
        if kernel is not None:
            lists = (now.weights, now.gradients, first, second)
            corrections = torch.tensor([slow, root])
            bounded, free = now.run(kernel, lists, corrections.unbind(), *self.betas, self.eps, self.max_ratio)
        else:
            bounded, free = self._by_torch(now, first, second, slow, root)
        self._see(bounded, free)

    def _by_torch(
        self, now: Now, first: list[Tensor], second: list[Tensor], slow: list[float], root: list[float]
    ) -> tuple[Tensor, Tensor]:
        beta1, beta2 = self.betas
        foreach_lerp_(first, now.gradients, 1 - beta1)
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, now.gradients, now.gradients, 1 - beta2)
        roots = foreach_sqrt(second)
        foreach_mul_(roots, root)
        foreach_add_(roots, self.eps)
        steps = foreach_mul(now.weights, _each(now.decays, now.weights))
        steps = foreach_addcdiv(steps, first, roots, slow)
        bounded = free = now.rates.new_zeros(0)
        if now.adapting:
            chosen = [now.tensors[index] for index in now.adapting]
            whole = [part_of(now.tensors[index], steps[index]) for index in now.adapting]
            weights, lengths = norms([*chosen, *whole], self.sharers).chunk(2)
            free = torch.where((weights > 0) & (lengths > 0), weights / lengths, torch.ones_like(weights))
            bounded = free.clamp(max=self.max_ratio)
        foreach_sub_(now.weights, foreach_mul(steps, _each(now.rates * now.spread(bounded, 1.0), now.weights)))
        return bounded, free


def _each(numbers: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """One 0-d tensor for each, of its type."""
    if len({each.dtype for each in tensors}) == 1:
        return list(numbers.to(tensors[0].dtype).unbind())
    return [number.to(each.dtype) for number, each in zip(numbers.unbind(), tensors, strict=True)]


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


def build_lars(job: Job, settings: LARS) -> None:
    clip: DynamicBound | Literal["none", "larc"]
    if settings.clip == "dynamic":
        clip = DynamicBound(settings.quantile, settings.bound, settings.anneal)
        job.keep(settings.name, clip)
    else:
        clip = settings.clip

    def build(parameters: Params) -> Optimizer:
        return Lars(
            _tables(job, settings, settings.vector_lr),
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            trust=settings.trust,
            eps=settings.eps,
            rate_in_velocity=settings.rate_in_velocity,
            clip=clip,
            sharers=_sharers(job, settings.share_norms),
        )

    job.build_with(build)


def build_lamb(job: Job, settings: LAMB) -> None:
    def build(parameters: Params) -> Optimizer:
        return Lamb(
            _tables(job, settings, settings.lr),
            betas=settings.betas,
            eps=settings.eps,
            max_ratio=settings.max_ratio,
            sharers=_sharers(job, settings.share_norms),
        )

    job.build_with(build)


def publish(job: Job, settings: LARS | LAMB) -> None:
    """The numbers of each step, for the report."""

    def work() -> None:
        optimizer = job.built_optimizer
        if isinstance(optimizer, Layerwise):
            job.numbers.update(optimizer.numbers)

    job.at(Phase.PROJECT, work)


def _tables(job: Job, settings: LARS | LAMB, vector_lr: float) -> list[dict[str, Any]]:
    check_matched(settings.groups, job.trained)
    tables = parameter_groups(job.trained, settings.lr, settings.weight_decay, settings.groups)
    for table in tables:
        table["adapts"] = table["params"][0].ndim >= 2  # a group is of one kind
        if not table["adapts"]:
            table["lr"] *= vector_lr / settings.lr
    return tables


def _sharers(job: Job, share: bool) -> dist.ProcessGroup | None:
    return job.world.group(job.replicas) if share else None
