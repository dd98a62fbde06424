"""DDP's communication hook: buckets go to the coordinator, and their Futures are finished by its channels."""

# Without postponed annotations: torch compares those of a hook with its own types.
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoestring.comm.coordinator import Coordinator
from shoestring.core._torch import GradBucket


class Arriving:
    """The state of the hook of one DDP model."""

    def __init__(self, coordinator: Coordinator, names: dict[Tensor, str]) -> None:
        self.coordinator, self.names = coordinator, names
        self.delivered: dict[str, Tensor] = {}  # the newest averages, where DDP keeps them

    def attach(self, model: DistributedDataParallel) -> None:
        model.register_comm_hook(self, hand_over)

    def take_back(self) -> None:
        """DDP gives no gradient to a parameter that no rank used, so what was owed to it stays owed."""
        for parameter, name in self.names.items():
            if parameter.requires_grad and parameter.grad is None and name in self.delivered:
                self.coordinator.take_back(name, self.delivered[name])


def hand_over(state: Arriving, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The bucket's average, later."""
    buffer = bucket.buffer()
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    views = {state.names[p]: view for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    dense = {name: view.contiguous() for name, view in views.items()}

    def after(error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
            return
        for name, view in views.items():
            copy_back(view, dense[name])
        state.delivered |= views
        future.set_result(buffer)

    state.coordinator.arrive(dense, after)
    return future


def copy_back(view: Tensor, dense: Tensor) -> None:
    """Weights in a channels-last layout have gradients that are not contiguous: those were exchanged as copies."""
    if view is not dense:
        view.copy_(dense)
