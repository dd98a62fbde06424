"""Late steps: the CPU updates the buckets with the smallest gradients while the device computes the next step.

The method follows ZenFlow (Lan, 2025). A thread updates a share of the elements during the next forward and backward
pass, so these updates take effect one step late. No update is skipped.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring._torch import foreach_norm, is_fake, step_without_hooks
from shoestring.core.feature import Phase
from shoestring.sharded import local_part

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.memory.offload.placement import OnHost
    from shoestring.memory.zero.attached import Divided

Gradients = Mapping[str, Tensor]
"""Gradients of the parameters of one bucket, by name."""


class LateSteps:
    """Chooses the buckets to update late, and updates them in a thread.

    `defer` takes gradients away from the optimizer, `begin` makes the thread update weights with the deferred
    gradients, and `end` waits for the thread. The thread is idle between steps, so weights and optimizer state are
    consistent at these times. Checkpoints also contain the deferred gradients.

    Args:
        share: maximum fraction of all elements to update late.
        divided: the shards that the optimizer updates, and their buckets.
        placement: the placement whose buffers store the gradients.
    """

    def __init__(self, share: float, divided: Divided, placement: OnHost) -> None:
        self.share, self.divided, self.placement = share, divided, placement
        self.ended: set[int] = set()
        """Indices of the buckets that were updated late and are not yet written to the device."""
        self.stepped = [0, 0]
        """Number of elements updated late and of all updated elements, summed over steps."""
        self._deferred: dict[int, Gradients] = {}  # by index of the bucket
        self._group_of: dict[str, dict[str, Any]] = {}  # parameter name -> settings of its parameter group
        self._thread = ThreadPoolExecutor(1, "late steps")
        self._running: Future[None] | None = None
        attachments = divided.attachments
        attachments.keep("late steps", self, across="own", merge=self._merge)
        attachments.at(Phase.CAPTURE, partial(self._publish, attachments))

    def write(self, index: int) -> bool:
        """Mark a bucket as written to the device; return whether its weights have changed since the last write."""
        changed = index not in self._deferred or index in self.ended
        self.ended.discard(index)
        return changed

    def defer(self) -> None:
        """Take the buckets with the smallest gradients away from the optimizer."""
        trained, buckets = self.divided.trained, self.divided.buckets
        gradients = [
            {part.name: grad for part in bucket.parts if (grad := trained[part.name].grad) is not None}
            for bucket in buckets
        ]
        if any(is_fake(local_part(grad)) for by_name in gradients for grad in by_name.values()):
            return  # fake tensors, in a prediction of memory, have no values to compare
        norms = [foreach_norm([local_part(grad) for grad in by_name.values()]) for by_name in gradients]
        squares = torch.tensor(
            [sum(float(norm) ** 2 for norm in of_bucket) for of_bucket in norms], dtype=torch.float64
        )
        # Ranks hold different rows of the same buckets, and must choose the same buckets.
        squares = self.divided.collectives.mean_of_whole(squares, torch.float64)
        if not squares.isfinite().all():  # a loss scaler skips this step, so no gradient is deferred
            return
        sizes = [
            sum(part.parameter.numel() for part in bucket.parts) if there else 0
            for bucket, there in zip(buckets, gradients, strict=True)
        ]
        for index in smallest(squares.tolist(), sizes, self.share):
            self._deferred[index] = gradients[index]
            for name in gradients[index]:
                trained[name].grad = None
                self.placement.set_aside(name)
            self.stepped[0] += sizes[index]
        self.stepped[1] += sum(sizes)
        # Copy the settings, because a schedule changes them before the thread uses them.
        groups = self._optimizer.param_groups
        settings = [_settings(group) for group in groups]
        group_of = {tensor: own for own, group in zip(settings, groups, strict=True) for tensor in group["params"]}
        self._group_of = {name: group_of[trained[name]] for gradients in self._deferred.values() for name in gradients}

    def begin(self) -> None:
        """Make the thread update weights with the deferred gradients."""
        if self._deferred and self._running is None:
            self._running = self._thread.submit(self._step)

    def end(self) -> None:
        """Complete the late updates: wait for the thread, or run the updates here if the thread was not started."""
        if self._running is not None:
            self._running.result()
        elif self._deferred:
            self._step()
        self.ended |= set(self._deferred)
        self._deferred, self._running = {}, None

    def state_dict(self) -> dict[str, Any]:
        """The deferred gradients, and the optimizer's settings for them."""
        gradients = {name: local_part(grad) for by_name in self._deferred.values() for name, grad in by_name.items()}
        return {"gradients": gradients, "settings": self._group_of}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.end()
        self.ended.clear()
        self._group_of, gradients = state_dict["settings"], state_dict["gradients"]
        for index, bucket in enumerate(self.divided.buckets):
            waiting = {p.name: self.divided.spread(p, gradients[p.name]) for p in bucket.parts if p.name in gradients}
            if waiting:
                self._deferred[index] = waiting

    def _merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Assemble the state of rank `rank` of `size` from the states of all former ranks, which held other rows."""
        parts = {part.name: part for bucket in self.divided.buckets for part in bucket.parts}
        gradients = {}
        for name, first in states[0]["gradients"].items():
            whole = first if parts[name].whole else torch.cat([state["gradients"][name] for state in states])
            gradients[name] = parts[name].shard_of(whole).clone()
        return {"gradients": gradients, "settings": states[0]["settings"]}

    def close(self) -> None:
        """End the thread. Deferred gradients are dropped, because the run's final weights do not include them."""
        self._thread.shutdown()

    def _publish(self, attachments: Attachments) -> None:
        late, stepped = self.stepped
        attachments.trace.facts["late_share"] = late / max(stepped, 1)

    @property
    def _optimizer(self) -> Optimizer:
        return self.divided.attachments.optimizer

    @torch.no_grad()
    def _step(self) -> None:
        """Update the deferred buckets one by one, so that only one bucket at a time has gradients in float32.

        A copy of the optimizer updates aliases of the tensors, with the same memory and state. The optimizer cannot use
        the tensors themselves, because the backward pass sets their gradients at the same time.
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
    """Return the indices of the buckets with the smallest mean squared gradients, with at most `share` of all elements.

    Args:
        squares: sum of the squared gradients of each bucket.
        sizes: number of elements of each bucket; empty buckets are left out.
    """
    chosen, most = [], share * sum(sizes)
    there = [index for index, size in enumerate(sizes) if size]
    for index in sorted(there, key=lambda index: squares[index] / sizes[index]):
        if sizes[index] <= most:
            most -= sizes[index]
            chosen.append(index)
    return sorted(chosen)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the settings of a parameter group."""
    return {key: value for key, value in group.items() if key != "params"}
