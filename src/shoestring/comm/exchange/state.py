"""Saves and restores the state of an exchange, and replays steps from stored compressed averages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoestring.comm.exchange.coordinator import Coordinator
from shoestring.comm.exchange.ddp_hook import in_memory_order
from shoestring.core.attachments import Attachments
from shoestring.sharded import local_part

log = logging.getLogger("shoestring")


class ExchangeState:
    """The state of one job's exchange. If rows are sharded over the ranks of a host, each rank saves its own rows.

    Args:
        locals_: number of ranks of a host that hold different rows; 1 if rows are not sharded.
        settings: text of the codec's settings; averages are replayed only if this text is unchanged.
    """

    def __init__(self, attachments: Attachments, coordinator: Coordinator, locals_: int, settings: str) -> None:
        self.attachments, self.coordinator, self.locals, self.settings = attachments, coordinator, locals_, settings
        self.replaying = False

    def state_dict(self) -> dict[str, Any]:
        return {"locals": self.locals, **self.coordinator.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.coordinator.load_state_dict(state_dict)

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        if states[0]["locals"] != self.locals:
            log.warning("comm: residuals are lost, because the number of ranks per host has changed")
            return {"round": states[0]["round"], "codec": {}}
        alike = states[rank % self.locals :: self.locals]
        return {"locals": self.locals, **self.coordinator.merge_states(alike)}

    # -- replaying steps, for `checkpoint`'s `KeptAverages` ------------------------------------------------------------

    @property
    def averages_form(self) -> str:
        """Settings, number of ranks and cohorts as text; stored averages are replayed only if this text is
        unchanged."""
        return f"{self.settings} {self.coordinator.channels[0].route.size} {self.coordinator.cohorts}"

    def keep_averages(self) -> None:
        """From now on, store the results of each step's last collectives until the next step; the step's averages can
        be decoded from them again."""
        self.coordinator.keeps = True

    def averages(self) -> list[list[Tensor]] | None:
        """The results of collectives from which the newest averages were decoded, equal on all ranks; None if the
        averages are not finite.

        The returned tensors are never overwritten.
        """
        return self.coordinator.answers()

    @contextmanager
    def replayed(self, averages: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Context in which the trained parameters have the stored `averages` as gradients, and optimizer steps do not
        exchange gradients."""
        grads = {name: torch.empty_like(tensor) for name, tensor in self.attachments.trained.items()}
        flat = {
            name: in_memory_order(local_part(grad), like=local_part(self.attachments.trained[name]))
            for name, grad in grads.items()
        }
        self.coordinator.decode(flat, averages)
        for name, tensor in self.attachments.trained.items():
            tensor.grad = grads[name]
        self.replaying = True
        try:
            yield
        finally:
            self.replaying = False
