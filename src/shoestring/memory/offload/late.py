"""Steps of what matters least, made by the CPU while the device computes the next step (after ZenFlow, Lan 2025).

A share of the elements, in the buckets whose gradients are smallest, is not stepped with the others: a thread steps it
during the next forward and backward pass, so that it takes effect one step late. Nothing is skipped.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoestring._torch import foreach_norm, is_fake, step_without_hooks
from shoestring.core.feature import Phase

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.memory.offload.placement import OnHost
    from shoestring.memory.zero.attached import Divided

Gradients = Mapping[str, Tensor]
"""Of the parameters of one bucket, by name."""


class LateSteps:
    """The buckets that are stepped late, and the thread that steps them.

    `defer` takes gradients away from the optimizer, `begin` lets the thread step with them, and `end` waits for it.
    Between a step and the next the thread rests, so weights and state are whole then, but for the gradients that wait:
    a checkpoint holds these as well.

    Args:
        share: of all elements, that are late at most.
        divided: what the optimizer steps, and of which buckets it is.
        placement: whose buffers hold the gradients.
    """

    def __init__(self, share: float, divided: Divided, placement: OnHost) -> None:
        self.share, self.divided, self.placement = share, divided, placement
        self.ended: set[int] = set()
        """Numbers of the buckets that were stepped, and not written to the device since."""
        self.stepped = [0, 0]
        """Elements that were stepped late, and all; over all steps."""
        self._deferred: dict[int, Gradients] = {}
        self._group_of: dict[str, dict[str, Any]] = {}  # settings by name of a parameter
        self._thread = ThreadPoolExecutor(1, "late steps")
        self._running: Future[None] | None = None
        job = divided.job
        job.keep("late steps", self, across="own", merge=self._merge)
        job.at(Phase.CAPTURE, partial(self._publish, job))

    def write(self, index: int) -> bool:
        """Whether a bucket's weights changed since they were written; now they are."""
        changed = index not in self._deferred or index in self.ended
        self.ended.discard(index)
        return changed

    def defer(self) -> None:
        """Take the smallest gradients away from the optimizer."""
        trained, buckets = self.divided.trained, self.divided.buckets
        found = [
            {part.name: grad for part in bucket.parts if (grad := trained[part.name].grad) is not None}
            for bucket in buckets
        ]
        if any(is_fake(_local(grad)) for each in found for grad in each.values()):
            return  # a prediction has no values to compare, and ends with this step
        squares = torch.tensor([_sum_of_squares(each.values()) for each in found], dtype=torch.float64)
        # Ranks hold other rows of the same buckets, and choose alike.
        squares = self.divided.collectives.mean_of_whole(squares, torch.float64)
        sizes = [
            sum(each.parameter.numel() for each in bucket.parts) if there else 0
            for bucket, there in zip(buckets, found, strict=True)
        ]
        for index in smallest(squares.tolist(), sizes, self.share):
            self._deferred[index] = found[index]
            for name in found[index]:
                trained[name].grad = None
                self.placement.set_aside(name)
            self.stepped[0] += sizes[index]
        self.stepped[1] += sum(sizes)
        # The settings of this step, which a schedule changes before the next one.
        groups = [(_settings(group), group["params"]) for group in self._optimizer.param_groups]
        group_of = {tensor: settings for settings, tensors in groups for tensor in tensors}
        self._group_of = {name: group_of[trained[name]] for each in self._deferred.values() for name in each}

    def begin(self) -> None:
        """Let the thread step what was deferred."""
        if self._deferred and self._running is None:
            self._running = self._thread.submit(self._step)

    def end(self) -> None:
        """Have everything stepped: wait for the thread, or step here what nobody began."""
        if self._running is not None:
            self._running.result()
        elif self._deferred:
            self._step()
        self.ended |= set(self._deferred)
        self._deferred, self._running = {}, None

    def state_dict(self) -> dict[str, Any]:
        """The gradients that wait, and the settings of their step."""
        gradients = {name: _local(grad) for each in self._deferred.values() for name, grad in each.items()}
        return {"gradients": gradients, "settings": self._group_of}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.end()
        self.ended.clear()
        self._group_of, gradients = state_dict["settings"], state_dict["gradients"]
        for index, bucket in enumerate(self.divided.buckets):
            found = {p.name: self.divided.spread(p, gradients[p.name]) for p in bucket.parts if p.name in gradients}
            if found:
                self._deferred[index] = found

    def _merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The state of one of `size` ranks from those of all former ranks: other rows of the same gradients."""
        parts = {part.name: part for bucket in self.divided.buckets for part in bucket.parts}
        gradients = {}
        for name, first in states[0]["gradients"].items():
            whole = first if parts[name].whole else torch.cat([each["gradients"][name] for each in states])
            gradients[name] = parts[name].shard_of(whole).clone()
        return {"gradients": gradients, "settings": states[0]["settings"]}

    def close(self) -> None:
        """End the thread. What waits is dropped, as it is not in the weights that left the run."""
        self._thread.shutdown()

    def _publish(self, job: Job) -> None:
        late, of = self.stepped
        job.trace.facts["late_share"] = late / max(of, 1)

    @property
    def _optimizer(self) -> Optimizer:
        return self.divided.job.built_optimizer

    @torch.no_grad()
    def _step(self) -> None:
        """Bucket by bucket, so that one at a time has gradients in float32.

        The tensors are others with the same memory and state, because the backward pass gives gradients to those of
        the optimizer meanwhile.
        """
        alike = copy.copy(self._optimizer)
        for gradients in self._deferred.values():
            alike.state, alike.param_groups = defaultdict(dict), []
            for name, gradient in gradients.items():
                trained = self.divided.trained[name]
                alias = trained.detach()
                alias.grad = gradient.to(alias.dtype)
                alike.state[alias] = self._optimizer.state[trained]
                alike.param_groups.append(self._group_of[name] | {"params": [alias]})
            step_without_hooks(alike)


def smallest(squares: Sequence[float], sizes: Sequence[int], share: float) -> list[int]:
    """The numbers of the buckets with the smallest mean squares that have at most a share of all elements.

    Args:
        squares: sum of each bucket's squared gradients.
        sizes: its elements; one without any is left out.
    """
    chosen, most = [], share * sum(sizes)
    there = [index for index, size in enumerate(sizes) if size]
    for index in sorted(there, key=lambda index: squares[index] / sizes[index]):
        if sizes[index] <= most:
            most -= sizes[index]
            chosen.append(index)
    return sorted(chosen)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _sum_of_squares(tensors: Iterable[Tensor]) -> float:
    return sum(float(norm) ** 2 for norm in foreach_norm([_local(tensor) for tensor in tensors]))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
