"""What survives of an exchange; and its averages, kept in their compact form so that a step can be replayed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoestring.comm.exchange.coordinator import Coordinator
from shoestring.comm.exchange.ddp_hook import in_memory_order
from shoestring.comm.exchange.replicas import local_shard
from shoestring.core.job import Job

log = logging.getLogger("shoestring")


class ExchangeState:
    """The state of one job's exchange. Where rows are sharded over the ranks of a host, each rank keeps its own rows.

    Args:
        settings: the codec's, in words.
    """

    def __init__(self, job: Job, coordinator: Coordinator, locals_: int, settings: str) -> None:
        self.job, self.coordinator, self.locals, self.settings = job, coordinator, locals_, settings
        self.replaying = False

    def state_dict(self) -> dict[str, Any]:
        return {"locals": self.locals, **self.coordinator.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.coordinator.load_state_dict(state_dict)

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        if states[0]["locals"] != self.locals:
            log.warning("comm: residuals are lost, because hosts have another number of ranks, which hold other rows")
            return {"round": states[0]["round"], "codec": {}}
        alike = states[rank % self.locals :: self.locals]
        return {"locals": self.locals, **self.coordinator.merge_states(alike)}

    # -- for whoever replays steps: `checkpoint`'s `KeptAverages` ------------------------------------------------------

    @property
    def averages_form(self) -> str:
        """What kept averages depend on: they are replayed only where it is the same."""
        return f"{self.settings} {self.coordinator.channels[0].route.size} {self.coordinator.cohorts}"

    def keep_averages(self) -> None:
        """Keep what the averages of each step from now on are decoded from, until the next step."""
        self.coordinator.keeps = True

    def averages(self) -> list[list[Tensor]] | None:
        """What the averages of the newest step were decoded from, equal on all ranks; None where they are not finite.

        The tensors are not written to again.
        """
        return self.coordinator.answers()

    @contextmanager
    def replayed(self, averages: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Give every trained parameter its gradient from kept averages; the optimizer's step inside exchanges none."""
        grads = {name: torch.empty_like(tensor) for name, tensor in self.job.trained.items()}
        flat = {
            name: in_memory_order(local_shard(grad), like=local_shard(self.job.trained[name]))
            for name, grad in grads.items()
        }
        self.coordinator.decode(flat, averages)
        for name, tensor in self.job.trained.items():
            tensor.grad = grads[name]
        self.replaying = True
        try:
            yield
        finally:
            self.replaying = False
