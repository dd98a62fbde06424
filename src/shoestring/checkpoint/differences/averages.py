"""Defines the interface of gradient exchanges whose averages can be recorded, and lists features whose steps can be
replayed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Seam

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.core.attachments import Attachments

REPLAYED = frozenset(
    {
        "precision.autocast",
        "memory.broker",
        "memory.chunkedloss",
        "memory.lora",
        "memory.recompute",
        "memory.tracing",
        "graph.compile",
        "parallel.ddp",
        "optim.adamw",
        "optim.clip",
        "optim.ema",
        "optim.lamb",
        "optim.lars",
        "optim.lawa",
        "optim.muon",
        "optim.schedule",
        "optim.schedulefree",
        "optim.sgd",
        "checkpoint.tiered",
        "profile.callpaths",
    }
)
"""Features whose steps can be replayed, because they depend only on weights, averaged gradients and progress. Any other
feature may define a method `why_not_replayed(attachments)`, which returns a hint on what to change, or an empty string
if the feature's steps can be replayed."""


@runtime_checkable
class KeptAverages(Protocol):
    """State of a gradient exchange whose averaged gradients can be recorded and replayed; an entry of
    `Attachments.kept`."""

    @property
    def averages_form(self) -> str:
        """Text that identifies the encoding of the averages; only an exchange with the same encoding can replay
        recorded averages."""
        ...

    def keep_averages(self) -> None:
        """Make the exchange keep the encoded averages of each step until the next step begins."""
        ...

    def averages(self) -> list[list[Tensor]] | None:
        """Return the encoded averages of the newest step, which are equal on all ranks; None if the averages are not
        finite."""
        ...

    def replayed(self, averages: Sequence[Sequence[Tensor]]) -> AbstractContextManager[None]:
        """Return a context manager that sets all gradients from recorded averages; inside, an optimizer step exchanges
        no gradients."""
        ...


def check(attachments: Attachments, name: str) -> None:
    """Raise ConfigError if steps of this job cannot be replayed from recorded averages of gradients.

    Args:
        name: name of the setting that turns replaying on, for the error message.
    """
    if any(feature.scales_loss for feature in attachments.features):
        refuse_scaled(name)
    if attachments.world.ranks_over(DATA) == 1:
        return
    for feature in attachments.features:
        if (why_not_replayed := getattr(feature, "why_not_replayed", None)) is not None:
            hint = str(why_not_replayed(attachments))
        else:
            hint = "" if feature.name in REPLAYED else "remove one of the two"
        if hint:
            raise ConfigError(f"`{name}` cannot replay the steps of `{feature.name}`", hint=hint)
    if not any(Seam.WIRE in feature.seams for feature in attachments.features):
        hint = "add [comm.quantize], or [comm.dense] for exact gradients"
        raise ConfigError(f"`{name}` records the averages of a [comm] codec, but the run has no codec", hint=hint)


def refuse_scaled(name: str) -> None:
    """Raise ConfigError, because steps that a loss scale may skip cannot be replayed."""
    hint = 'train with precision.autocast.dtype = "bf16"'
    raise ConfigError(f"`{name}` cannot replay steps that a loss scale may skip", hint=hint)
