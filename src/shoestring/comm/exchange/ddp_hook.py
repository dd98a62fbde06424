"""DDP's communication hook: passes buckets to the coordinator, whose channels complete their Futures."""

# Without postponed annotations: torch compares those of a hook with its own types.
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoestring._torch import GradBucket, after_backward, rebucket
from shoestring.comm.exchange.coordinator import Coordinator

SMALLEST = 2**20  # bytes of the smallest bucket: DDP's first one, which torch.compile takes for the smallest


@dataclass(frozen=True)
class Delivery:
    """One parameter's view of a bucket, and its gradient when DDP called the hook for the bucket."""

    name: str
    parameter: Tensor
    view: Tensor
    grad: Tensor | None
    version: int

    @property
    def used(self) -> bool:
        """Whether DDP made the average in the bucket the gradient; it does not when no rank used the parameter."""
        grad = self.parameter.grad
        if grad is None:
            return False
        untouched = grad is self.grad and grad._version == self.version
        return not untouched or grad.data_ptr() == self.view.data_ptr()


class HookState:
    """The state of the hook of one DDP model.

    Args:
        part: bytes of one part of the step's gradients.
    """

    def __init__(self, coordinator: Coordinator, model: DistributedDataParallel, part: int) -> None:
        whole = len(coordinator.cohorts) == 1
        self.coordinator, self.model = coordinator, model
        self.names = {parameter: name for name, parameter in model.module.named_parameters()}
        self.deliveries: list[Delivery] = []
        # With two buckets a part, DDP passes on a part before the next one is complete. With DDP's usual 25 MB a small
        # model has a single bucket, and nothing overlaps with the backward pass. DDP's own buckets may be smaller.
        # A single part gets a single bucket, which is averaged where it lies if nothing compresses it.
        self.cap = model.bucket_bytes_cap
        rebucket(model, max(part, SMALLEST) if whole else min(self.cap, max(part // 2, SMALLEST)))
        model.register_comm_hook(self, hook)

    def detach(self) -> None:
        """Restore DDP's bucket size; DDP averages by itself again."""
        if dist.is_initialized():
            rebucket(self.model, self.cap)

    def finish_backward(self) -> None:
        """Wait for the averages at the end of a backward pass, before DDP does, which would wait without a timeout."""
        after_backward(self.return_unused)
        self.coordinator.wait()

    def return_unused(self) -> None:
        """Return averages to the residual for parameters that no rank used; called after DDP has set the gradients.

        A gradient that such a parameter has from an earlier backward pass was part of the average, and is subtracted.
        """
        for delivery in self.deliveries:
            if not delivery.used:
                grad = delivery.parameter.grad
                earlier = 0 if grad is None else in_memory_order(grad, like=delivery.parameter)
                self.coordinator.return_to_residual(delivery.name, delivery.view - earlier)
        self.deliveries.clear()


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start the exchange of a bucket; the Future holds its average."""
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
        after_backward(state.finish_backward)
    return future


def in_memory_order(grad: Tensor, like: Tensor) -> Tensor:
    """A contiguous tensor of the same shape, whose entries are in the order in which the weight `like` is in memory.

    For a weight in channels-last layout this is not the order of the shape, but it is the order of DDP's buckets. The
    result shares the gradient's memory, unless the gradient itself is in another order.
    """
    if grad.is_contiguous() and like.is_contiguous():
        return grad
    if grad.stride() != like.stride():
        grad = torch.empty_like(like).copy_(grad)
    return grad.as_strided(grad.shape, torch.empty(grad.shape, device="meta").stride())
