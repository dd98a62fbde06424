"""Attaches [precision.graph] to a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoestring.core.attachments import Attachments
from shoestring.precision.measuring import ErrorMeasurements
from shoestring.precision.narrowed_graphs import NarrowedGraphs

if TYPE_CHECKING:
    from shoestring.precision.settings import Graph


def narrow_graphs(attachments: Attachments, settings: Graph) -> None:
    """Add the pass to the graphs that torch.compile traces; if the settings say so, also measure its errors."""
    graphs = NarrowedGraphs(attachments, settings)
    attachments.add_pass(graphs.work, on="joint")
    if settings.measure:
        ErrorMeasurements(attachments, settings, graphs).attach()


def scale_loss(attachments: Attachments) -> None:
    """Scale the loss, so that small gradients do not vanish in fp16."""
    attachments.scale_with(torch.amp.GradScaler(attachments.world.device.type))
