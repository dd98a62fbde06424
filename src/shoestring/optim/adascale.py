"""The gain of a step of a large batch over one of a small batch, from gradients that ranks and micro-batches have.

With c gradients g_i of as many samples each, of which the step takes the mean, and a batch of S small ones
(arXiv:2007.05105, as fairscale generalises it to c != S):

    var = S / c / (c - 1) * sum |g_i|^2 - S / (c - 1) * |mean|^2     the variance of a small batch's gradient
    sqr = |mean|^2 - var / S                                          the squared norm of the true gradient
    gain = (var + sqr) / (var / S + sqr)

A step's gain is from the averages of both up to the step before, so nothing waits for an exchange or an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import foreach_copy_, foreach_sub, loss_scale
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.kept import fill
from shoestring.optim.norms import local, norms, part_of

if TYPE_CHECKING:
    from shoestring.optim.settings.adascale import AdaScale


WIDE = torch.float32


class Averages:
    """Running averages of both estimates: plain means at first, exponential ones once these would be younger."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.count, self.scale = 0, 0.0
        self.var = self.sqr = 0.0

    def add(self, var: float, sqr: float, scale: float) -> None:
        """The estimates of a step whose batch is `scale` small ones."""
        if self.scale and scale != self.scale:  # the batch is the same, and so the small one another
            self.var *= scale / self.scale
        self.scale, self.count = scale, self.count + 1
        theta = self.smoothing if self.smoothing >= 0 else max(1 - scale / 1000, 0.0)
        weight = max(1 - theta, 1 / self.count)
        self.var += (max(var, 0.0) - self.var) * weight
        self.sqr += (sqr - self.sqr) * weight

    @property
    def gain(self) -> float:
        """From 1 to the scale."""
        sqr = max(self.sqr, 0.0)
        below = self.var / self.scale + sqr if self.scale else 0.0
        return min(max((self.var + sqr) / below, 1.0), self.scale) if below > 0 else 1.0

    @property
    def noise_scale(self) -> float:
        """The batch, in small ones, at which noise and gradient are as large as each other."""
        return self.var / self.sqr if self.sqr > 0 else float("inf")


def estimates(squares: float, mean: float, count: int, scale: float) -> tuple[float, float]:
    """(var, sqr) from the sum of the squared norms of `count` gradients, and that of their mean."""
    var = scale / (count - 1) * (squares / count - mean)
    return var, mean - var / scale


class Gain:
    """What is measured in each step, and what follows from it."""

    def __init__(self, job: Job, settings: AdaScale) -> None:
        self.job, self.settings = job, settings
        self.averages = Averages(settings.smoothing)
        self.norms: list[Tensor] = []  # of this step's gradients on this rank, of one parameter and micro-batch each
        self.calls: dict[str, int] = {}  # of each parameter in this step
        self.divisor = 0.0  # what this step's losses are divided by, where that may be corrected
        self.pending: tuple[list[Tensor], int, dist.Work | None] | None = None  # of the newest step
        self.before: dict[str, Tensor] = {}  # gradients of the step before
        self.rates: list[Any] = []

    @property
    def adam(self) -> bool:
        """Whether gradients count as Adam scales them."""
        rule = self.settings.rule
        return rule == "adam" or (rule == "auto" and "betas" in self.job.built_optimizer.param_groups[0])

    def scaled(self, tensor: Tensor, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient of `tensor`, as it counts."""
        state = self.job.built_optimizer.state.get(tensor, {}) if self.adam else {}
        if "exp_avg_sq" not in state:
            return local(gradient)
        eps = self.job.built_optimizer.param_groups[0].get("eps", 0.0)
        return local(gradient) / local(state["exp_avg_sq"]).sqrt().add_(eps)

    def watch(self, name: str, parameter: Tensor) -> Callable[[Tensor], None]:
        """A hook for the gradients of a parameter, right before they are added up."""

        def see(gradient: Tensor) -> None:
            self.calls[name] = self.calls.get(name, 0) + 1
            gradient = self.scaled(self.job.trained.get(name, parameter), gradient)
            self.norms.append(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, WIDE)))

        return see

    # -- phases ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.norms, self.calls, self.divisor = [], {}, self.job.progress.count

    def rate(self) -> None:
        """Set this step's gain from the steps before, and measure this one."""
        self.take_in()
        job = self.job
        gain = job.progress.gain = self.averages.gain
        factor = gain**0.5 if self.adam else gain
        self.rates = [copy(group["lr"]) for group in job.built_optimizer.param_groups]
        for group in job.built_optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        job.numbers |= {"gain": gain, "noise_scale": self.averages.noise_scale}
        (self.measure_consecutive if self.settings.consecutive else self.measure)()

    def restore(self) -> None:
        """Put back the learning rates that the schedule set."""
        for group, rate in zip(self.job.built_optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        self.job.trace.facts |= {
            "adascale_position": self.job.progress.position + self.job.progress.gain,
            "adascale_scale": self.averages.scale,
            "noise_scale": self.averages.noise_scale,
        }

    # -- measuring ---------------------------------------------------------------------------------------------------

    def take_in(self) -> None:
        """What is pending, into the averages."""
        if self.pending is None:
            return
        (numbers, count, work), self.pending = self.pending, None
        if work is not None:
            work.wait()
        first, second = torch.stack(numbers).tolist()
        scale = self.settings.scale or float(count)
        if self.settings.consecutive:
            self.averages.add(scale * first / 2, second, scale)
        else:
            self.averages.add(*estimates(first, second, count, scale), scale)

    def measure(self) -> None:
        """Of the gradients of ranks and micro-batches, and of their mean; read a step later."""
        job, micro = self.job, max(self.calls.values(), default=0)
        count = micro * job.world.ranks_over(job.replicas)
        if count == 1:
            raise ConfigError(
                "`optim.adascale` sees one gradient a step, on one rank and without accumulation, and so no noise",
                hint="set optim.adascale.consecutive = true, or run.accumulate",
            )
        if not self.norms or (job.progress.count and not self.divisor):  # the divisor of the first step is not known
            return
        squares = torch.stack(self.norms).double().square().sum() * (micro / loss_scale(job.scaler)) ** 2
        if self.divisor:
            true = job.progress.count if job.progress.unread is None else job.progress.unread[1]
            squares *= (self.divisor / true) ** 2
        group = job.world.group(job.replicas)
        work = None if group is None else dist.all_reduce(squares, group=group, async_op=True)
        self.pending = [squares, self.squared_mean().double()], count, work

    def squared_mean(self) -> Tensor:
        """The squared norm of the gradient that the step takes, before it is clipped."""
        job = self.job
        if not self.adam and any(feature.name == "optim.clip" for feature in job.features):
            return torch.as_tensor(job.numbers["grad_norm"]).square()
        return norms(self.gradients()).square().sum()

    def gradients(self) -> list[Tensor]:
        trained = self.job.trained.values()
        return [part_of(each, self.scaled(each, each.grad)) for each in trained if each.grad is not None]

    def measure_consecutive(self) -> None:
        """Half the squared difference of two steps' gradients is the variance, and their product the squared norm."""
        now = {name: tensor.grad for name, tensor in self.job.trained.items() if tensor.grad is not None}
        if now.keys() == self.before.keys():
            tensors = [self.job.trained[name] for name in now]
            pairs = [
                [self.scaled(tensor, each[name]) for name, tensor in zip(now, tensors, strict=True)]
                for each in (now, self.before)
            ]
            both = [*pairs, foreach_sub(*pairs)]
            whole = [part_of(tensor, part) for parts in both for tensor, part in zip(tensors, parts, strict=True)]
            one, other, apart = norms(whole).double().square().view(3, -1).sum(1)
            self.pending = [apart, (one + other - apart) / 2], 1, None
            foreach_copy_([local(each) for each in self.before.values()], [local(each) for each in now.values()])
        else:
            self.before = {name: gradient.clone() for name, gradient in now.items()}

    def state_dict(self) -> dict[str, Any]:
        self.take_in()
        return {"averages": dict(vars(self.averages)), "before": dict(self.before)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = None
        vars(self.averages).update(state_dict["averages"], smoothing=self.averages.smoothing)
        trained = self.job.trained
        self.before = {name: torch.zeros_like(trained[name]) for name in state_dict["before"] if name in trained}
        for name, tensor in self.before.items():
            fill(tensor, state_dict["before"][name])


def follow_gain(job: Job, settings: AdaScale) -> None:
    """Measure each step, and set the learning rate and the progress by its gain."""
    gain = Gain(job, settings)
    if not settings.consecutive:
        for name, parameter in job.module.named_parameters():
            if parameter.requires_grad:
                job.exits.callback(parameter.register_hook(gain.watch(name, parameter)).remove)
    job.at(Phase.FORWARD, gain.begin)
    job.at(Phase.GRAD, gain.rate)
    job.at(Phase.PROJECT, gain.restore)
    job.keep(settings.name, gain, across="shard" if settings.consecutive else "same")
