"""AdaScale: measures the gain of a step, which is the number of small-batch steps that make the same progress.

A step averages c gradients g_i, one per rank and micro-batch, each computed on the same number of samples. The batch of
a step is S times the small batch, for which the learning rate was chosen. The estimates are (arXiv:2007.05105;
fairscale generalises the formulas to c != S):

    var = S / c / (c - 1) * sum |g_i|^2 - S / (c - 1) * |mean|^2     the variance of a small batch's gradient
    sqr = |mean|^2 - var / S                                          the squared norm of the true gradient
    gain = (var + sqr) / (var / S + sqr)

The gain of a step is computed from running averages of var and sqr over the preceding steps. So a step waits neither
for the all-reduce of its own norms nor for their copy to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import foreach_copy_, foreach_sub, loss_scale
from shoestring.core.attachments import Attachments
from shoestring.core.feature import Phase
from shoestring.core.kept import fill
from shoestring.optim.norms import global_norm, norms, part_of
from shoestring.sharded import local_part

if TYPE_CHECKING:
    from shoestring.optim.settings.adascale import AdaScale


WIDE = torch.float32


class Averages:
    """Running averages of `var` (gradient variance) and `sqr` (squared norm of the true gradient).

    Over the first n steps, the averages are plain means, and the newest step has weight 1 / n. The averages become
    exponential once 1 / n falls below the constant weight that exponential averaging gives the newest step.
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.count, self.scale = 0, 0.0
        self.var = self.sqr = 0.0

    def add(self, var: float, sqr: float, scale: float) -> None:
        """Update the averages with the estimates of one step, whose batch is `scale` times the small batch."""
        if self.scale and scale != self.scale:
            # A new scale means a new size of the small batch, because the large batch stays the same. The variance of a
            # small batch's gradient is proportional to 1 / size.
            self.var *= scale / self.scale
        self.scale, self.count = scale, self.count + 1
        theta = self.smoothing if self.smoothing >= 0 else max(1 - scale / 1000, 0.0)
        weight = max(1 - theta, 1 / self.count)
        self.var += (max(var, 0.0) - self.var) * weight
        self.sqr += (sqr - self.sqr) * weight

    @property
    def gain(self) -> float:
        """Number of small-batch steps that make the same progress as one step, between 1 and `scale`."""
        sqr = max(self.sqr, 0.0)  # the estimate of a squared norm is unbiased, so it may be negative
        denominator = self.var / self.scale + sqr if self.scale else 0.0
        return min(max((self.var + sqr) / denominator, 1.0), self.scale) if denominator > 0 else 1.0

    @property
    def noise_scale(self) -> float:
        """The batch size, as a multiple of the small batch, at which the gradient's noise and the true gradient have
        equal norms."""
        return self.var / self.sqr if self.sqr > 0 else float("inf")


def estimates(squares: float, mean: float, count: int, scale: float) -> tuple[float, float]:
    """Estimate `var` and `sqr` (see `Averages`) of one step from the norms of the step's gradients.

    Args:
        squares: sum of the squared norms of `count` gradients.
        mean: squared norm of the mean of these gradients.
        scale: batch size, as a multiple of the small batch.
    """
    var = scale / (count - 1) * (squares / count - mean)
    return var, mean - var / scale


class Gain:
    """Measures the gain of every step, and multiplies the learning rate and the run's progress by the gain."""

    def __init__(self, attachments: Attachments, settings: AdaScale) -> None:
        self.attachments, self.settings = attachments, settings
        self.averages = Averages(settings.decay)
        self.norms: list[Tensor] = []  # gradient norms of this step on this rank, one per parameter and micro-batch
        self.calls: dict[str, int] = {}  # number of gradients in this step (one per micro-batch), by parameter
        # Divisor of this step's losses: during the backward passes, the count of the previous step stands in for this
        # step's count.
        self.divisor = 0.0
        self.pending: tuple[list[Tensor], int, dist.Work | None] | None = None  # newest measurement, count, all-reduce
        self.before: dict[str, Tensor] = {}  # gradients of the previous step
        self.rates: list[Any] = []  # learning rates of the parameter groups, as the schedule set them

    @property
    def adam(self) -> bool:
        """Whether gradients are divided by the root of Adam's second moments before the measurement."""
        rule = self.settings.rule
        return rule == "adam" or (rule == "auto" and "betas" in self.attachments.optimizer.param_groups[0])

    def scaled(self, tensor: Tensor, gradient: Tensor) -> Tensor:
        """Return this rank's shard of a gradient of `tensor`; with Adam, the shard is divided by the root of the second
        moment."""
        state = self.attachments.optimizer.state.get(tensor, {}) if self.adam else {}
        if "exp_avg_sq" not in state:
            return local_part(gradient)
        eps = self.attachments.optimizer.param_groups[0].get("eps", 0.0)
        return local_part(gradient) / local_part(state["exp_avg_sq"]).sqrt().add_(eps)

    def watch(self, name: str, parameter: Tensor) -> Callable[[Tensor], None]:
        """Build the tensor hook that measures a parameter's gradient in each micro-batch, before it is accumulated."""

        def measure_norm(gradient: Tensor) -> None:
            self.calls[name] = self.calls.get(name, 0) + 1
            gradient = self.scaled(self.attachments.trained.get(name, parameter), gradient)
            self.norms.append(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, WIDE)))

        return measure_norm

    # -- phases ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.norms, self.calls, self.divisor = [], {}, self.attachments.progress.count

    def rate(self) -> None:
        """Set this step's gain from the measurements of earlier steps, and start measuring this step."""
        self.take_in()
        attachments = self.attachments
        gain = attachments.progress.gain = self.averages.gain
        factor = gain**0.5 if self.adam else gain
        self.rates = [copy(group["lr"]) for group in attachments.optimizer.param_groups]
        for group in attachments.optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        attachments.numbers |= {"gain": gain, "noise_scale": self.averages.noise_scale}
        (self.measure_consecutive if self.settings.consecutive else self.measure)()

    def restore(self) -> None:
        """After the optimizer step, reset the learning rates to those of the schedule, and record measurements for the
        report."""
        for group, rate in zip(self.attachments.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        self.attachments.trace.facts |= {
            "adascale_position": self.attachments.progress.position + self.attachments.progress.gain,
            "adascale_scale": self.averages.scale,
            "noise_scale": self.averages.noise_scale,
        }

    # -- measuring ---------------------------------------------------------------------------------------------------

    def take_in(self) -> None:
        """Wait for the newest step's all-reduce, and add the step's measurement to the averages."""
        if self.pending is None:
            return
        (values, count, work), self.pending = self.pending, None
        if work is not None:
            work.wait()
        first, second = torch.stack(values).tolist()
        if not isfinite(first + second):  # gradients overflowed, and the loss scaler skipped the step
            return
        scale = self.settings.scale or float(count)
        if self.settings.consecutive:
            self.averages.add(scale * first / 2, second, scale)  # first: squared difference; second: dot product
        else:
            self.averages.add(*estimates(first, second, count, scale), scale)

    def measure(self) -> None:
        """Start the all-reduce of the sum of squared gradient norms; the next step reads the result."""
        attachments, micro = self.attachments, max(self.calls.values(), default=0)
        count = micro * attachments.world.ranks_over(attachments.alike)
        self.settings.check_gradients(count)
        divisor_unknown = attachments.progress.count and not self.divisor  # true in the first step
        if not self.norms or divisor_unknown:
            return
        # The gradient in a hook has been divided by the number of micro-batches and multiplied by the loss scale; undo
        # both.
        squares = torch.stack(self.norms).double().square().sum() * (micro / loss_scale(attachments.scaler)) ** 2
        if self.divisor:
            true = attachments.progress.count if attachments.progress.unread is None else attachments.progress.unread[1]
            squares *= (self.divisor / true) ** 2
        group = attachments.world.group(attachments.replicas)
        work = None if group is None else dist.all_reduce(squares, group=group, async_op=True)
        self.pending = [squares, self.squared_mean().double()], count, work

    def squared_mean(self) -> Tensor:
        """Squared norm of the averaged gradient, before clipping."""
        attachments = self.attachments
        if not self.adam and any(feature.name == "optim.clip" for feature in attachments.features):
            return torch.as_tensor(attachments.numbers["grad_norm"]).square()  # already measured by gradient clipping
        gradients = {
            name: part_of(tensor, self.scaled(tensor, tensor.grad))
            for name, tensor in attachments.trained.items()
            if tensor.grad is not None
        }
        return global_norm(attachments, gradients).square()

    def measure_consecutive(self) -> None:
        """Measure the noise from the gradients of this step and of the previous step. Half the squared norm of the two
        gradients' difference estimates the variance of a step's gradient. The gradients' dot product estimates the
        squared norm of the true gradient."""
        now = {name: tensor.grad for name, tensor in self.attachments.trained.items() if tensor.grad is not None}
        if now.keys() == self.before.keys():
            tensors = [self.attachments.trained[name] for name in now]
            pair = [
                [self.scaled(tensor, gradients[name]) for name, tensor in zip(now, tensors, strict=True)]
                for gradients in (now, self.before)
            ]
            parts = [*pair, foreach_sub(*pair)]
            whole = [part_of(tensor, part) for group in parts for tensor, part in zip(tensors, group, strict=True)]
            squares, total = norms(whole).double().square().view(3, -1), self.attachments.total
            newer, older, difference = (total(squares[row], list(now)) for row in range(3))
            self.pending = [difference, (newer + older - difference) / 2], 1, None
            foreach_copy_(list(map(local_part, self.before.values())), list(map(local_part, now.values())))
        else:  # in the first step, or after parameters were frozen or unfrozen
            self.before = {name: gradient.clone() for name, gradient in now.items()}

    def state_dict(self) -> dict[str, Any]:
        self.take_in()
        return {"averages": dict(vars(self.averages)), "before": dict(self.before)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = None
        vars(self.averages).update(state_dict["averages"], smoothing=self.averages.smoothing)
        trained = self.attachments.trained
        self.before = {name: torch.zeros_like(trained[name]) for name in state_dict["before"] if name in trained}
        for name, tensor in self.before.items():
            fill(tensor, state_dict["before"][name])


def follow_gain(attachments: Attachments, settings: AdaScale) -> None:
    """Attach AdaScale: measure the gain of every step, and multiply the learning rate and the progress by the gain."""
    gain = Gain(attachments, settings)
    if not settings.consecutive:
        for name, parameter in attachments.module.named_parameters():
            if parameter.requires_grad:
                attachments.exits.callback(parameter.register_hook(gain.watch(name, parameter)).remove)
    attachments.at(Phase.FORWARD, gain.begin)
    attachments.at(Phase.GRAD, gain.rate)
    attachments.at(Phase.PROJECT, gain.restore)
    attachments.keep(settings.name, gain, across="shard" if settings.consecutive else "same")
