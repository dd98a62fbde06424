"""DDP's communication hook: passes buckets to the coordinator, whose channels complete the buckets' Futures."""

# Annotations are not postponed, because torch compares a hook's annotations with its own types.
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoestring._torch import GradBucket, after_backward, rebucket
from shoestring.comm.exchange.coordinator import Coordinator

SMALLEST = 2**20  # bytes of the smallest bucket: the size of DDP's first bucket, which torch.compile expects


@dataclass(frozen=True)
class Delivery:
    """One parameter's view into a bucket, and the parameter's gradient at the time DDP called the hook for the
    bucket."""

    name: str
    parameter: Tensor
    view: Tensor
    grad: Tensor | None
    version: int

    @property
    def used(self) -> bool:
        """Whether DDP has set the parameter's gradient to the average in the bucket; DDP does not do so if no rank used
        the parameter."""
        grad = self.parameter.grad
        if grad is None:
            return False
        untouched = grad is self.grad and grad._version == self.version
        return not untouched or grad.data_ptr() == self.view.data_ptr()


class HookState:
    """State of the communication hook of one DDP model.

    Args:
        part: bytes of the gradients in one cohort.
    """

    def __init__(self, coordinator: Coordinator, model: DistributedDataParallel, part: int) -> None:
        whole = len(coordinator.cohorts) == 1
        self.coordinator, self.model = coordinator, model
        self.names = {parameter: name for name, parameter in model.module.named_parameters()}
        self.deliveries: list[Delivery] = []
        # With two buckets per cohort, all gradients of a cohort arrive before the next cohort is complete. With DDP's
        # usual 25 MB, a small model has a single bucket, and nothing overlaps with the backward pass. A smaller bucket
        # size set by the user is not changed. A single cohort gets a single bucket, which is averaged in place if it is
        # not compressed.
        self.cap = model.bucket_bytes_cap
        rebucket(model, max(part, SMALLEST) if whole else min(self.cap, max(part // 2, SMALLEST)))
        model.register_comm_hook(self, hook)

    def detach(self) -> None:
        """Restore the bucket size that DDP had before."""
        if dist.is_initialized():
            rebucket(self.model, self.cap)

    def finish_backward(self) -> None:
        """Wait for the averages at the end of a backward pass. DDP also waits afterwards, but without a timeout."""
        after_backward(self.return_unused)
        self.coordinator.wait()

    def return_unused(self) -> None:
        """Add the averages of parameters that no rank used to the residual; called after DDP has set the gradients.

        If such a parameter has a gradient from an earlier backward pass, that gradient is part of the average, and is
        subtracted.
        """
        for delivery in self.deliveries:
            if not delivery.used:
                grad = delivery.parameter.grad
                earlier = 0 if grad is None else in_memory_order(grad, like=delivery.parameter)
                self.coordinator.return_to_residual(delivery.name, delivery.view - earlier)
        self.deliveries.clear()


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Pass a bucket to the coordinator; the returned Future will hold the averaged bucket."""
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
    """A contiguous tensor of the gradient's shape, with the gradient's entries in the memory order of the weight
    `like`.

    DDP's buckets are in the memory order of weights, which is not the order of the shape for channels-last weights. The
    result shares the gradient's memory, unless the gradient has another memory order than the weight.
    """
    if grad.is_contiguous() and like.is_contiguous():
        return grad
    if grad.stride() != like.stride():
        grad = torch.empty_like(like).copy_(grad)
    return grad.as_strided(grad.shape, torch.empty(grad.shape, device="meta").stride())
