"""DDP's communication hook: buckets go to the coordinator, and their Futures are finished by its channels."""

# Without postponed annotations: torch compares those of a hook with its own types.
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoestring._torch import GradBucket, after_backward, rebucket
from shoestring.comm.exchange.coordinator import Coordinator

LEAST = 2**20  # bytes of a bucket: that of DDP's first, which torch.compile takes for the smallest


@dataclass(frozen=True)
class Delivery:
    """One parameter's place in a bucket, and its gradient as it was when the bucket was handed over."""

    name: str
    parameter: Tensor
    view: Tensor
    grad: Tensor | None
    version: int

    @property
    def used(self) -> bool:
        """Whether DDP made the average in the bucket the gradient; it does not where no rank used the parameter."""
        grad = self.parameter.grad
        if grad is None:
            return False
        untouched = grad is self.grad and grad._version == self.version
        return not untouched or grad.data_ptr() == self.view.data_ptr()


class Arriving:
    """The state of the hook of one DDP model.

    Args:
        part: bytes of a part of the step's gradients.
    """

    def __init__(self, coordinator: Coordinator, model: DistributedDataParallel, part: int) -> None:
        self.coordinator, self.model = coordinator, model
        self.names = {parameter: name for name, parameter in model.module.named_parameters()}
        self.deliveries: list[Delivery] = []
        # DDP hands over a part before it has the next one: two buckets a part, unless its own are smaller. With its
        # usual 25 MB a small model has a single bucket, and nothing travels during the backward pass.
        self.cap = model.bucket_bytes_cap
        rebucket(model, min(self.cap, max(part // 2, LEAST)))
        model.register_comm_hook(self, hand_over)

    def detach(self) -> None:
        """Leave the model as it was: DDP averages by itself."""
        if dist.is_initialized():
            rebucket(self.model, self.cap)

    def settle(self) -> None:
        """At the end of a backward pass: wait for the averages, before DDP does, which would wait without an end."""
        after_backward(self.take_back)
        self.coordinator.wait()

    def take_back(self) -> None:
        """Once DDP has made the averages gradients: what was owed to a parameter that no rank used stays owed.

        What it already has of an earlier backward pass went into the average again, and is not owed.
        """
        for each in self.deliveries:
            if not each.used:
                grad = each.parameter.grad
                already = 0 if grad is None else in_memory_order(grad, like=each.parameter)
                self.coordinator.take_back(each.name, each.view - already)
        self.deliveries.clear()


def hand_over(state: Arriving, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The bucket's average, later."""
    if bucket.index() == 0:
        state.coordinator.begin()
        state.deliveries.clear()
    buffer = bucket.buffer()
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    views = {state.names[p]: view for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    for parameter, (name, view) in zip(bucket.parameters(), views.items(), strict=True):
        grad = parameter.grad
        state.deliveries.append(Delivery(name, parameter, view, grad, 0 if grad is None else grad._version))

    def after(error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
            return
        future.set_result(buffer)

    state.coordinator.arrive(views, after)
    if bucket.is_last():
        after_backward(state.settle)
    return future


def in_memory_order(grad: Tensor, like: Tensor) -> Tensor:
    """As one contiguous tensor of the same shape, whose entries lie in the order in which those of the weight do.

    Of a weight in channels-last layout that is another order than the shape says, and the one of DDP's buckets. The
    memory is the gradient's own, unless it lies in another order itself.
    """
    if grad.stride() != like.stride():
        grad = torch.empty_like(like).copy_(grad)
    return grad.as_strided(grad.shape, torch.empty(grad.shape, device="meta").stride())
