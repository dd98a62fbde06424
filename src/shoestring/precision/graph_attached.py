"""Attaches [precision.graph] to a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from shoestring.core.attachments import Attachments
from shoestring.precision.autocast import TYPES
from shoestring.precision.graph_pass import narrow

if TYPE_CHECKING:
    from shoestring.precision.settings import Graph


def narrow_graphs(attachments: Attachments, settings: Graph) -> None:
    """Add the pass to the graphs that torch.compile traces; what it did is added up in the facts of the trace."""
    facts, elements = attachments.trace.facts, list[tuple[int, int]]()

    def work(graph: fx.GraphModule) -> None:
        narrowing = narrow(graph, TYPES[settings.dtype], forward=settings.forward_propagation, wide=settings.wide)
        elements.append((narrowing.narrow, narrowing.elements))
        every = sum(count for _, count in elements)
        facts["narrowed_elements"] = sum(count for count, _ in elements) / max(every, 1)
        facts["narrowed_casts"] = facts.get("narrowed_casts", 0) + narrowing.casts
        facts["narrowed_operators"] = facts.get("narrowed_operators", 0) + len(narrowing.bits.narrow)

    attachments.add_pass(work, on="joint")


def scale_loss(attachments: Attachments) -> None:
    """Scale the loss, so that small gradients do not vanish in fp16."""
    attachments.scale_with(torch.amp.GradScaler(attachments.world.device.type))
