"""Checks, before anything is allocated, whether a pipeline can run a model beside other features."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm

from shoestring._torch import reorders_messages
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.models.blocks import routers
from shoestring.parallel.beside import check_beside
from shoestring.parallel.pipeline.names import STAGE
from shoestring.parallel.pipeline.stage import Layout, first_part, own_parts

if TYPE_CHECKING:
    from shoestring.parallel.settings import Pipeline


def check(attachments: Attachments, settings: Pipeline) -> None:
    """Raise ConfigError if the model cannot be cut as the settings say, or ConflictError if a feature does not fit."""
    stages = attachments.world.ranks_over([STAGE])
    if stages == 1:
        return
    layout = Layout(attachments.module)
    parts, first = settings.parts(layout, stages), first_part(layout, settings, attachments.features)
    settings.planned_passes(stages, first, micro=0)  # raises an error if `pass_order` is invalid
    if settings.pass_order and reorders_messages(attachments.module):
        message = f"`{settings.name}.pass_order` orders messages, and so does torch's aten_distributed_optimizations"
        raise ConfigError(message, hint="switch off enable_overlap_scheduling in it, or leave out one of the two")
    for index in range(stages):
        held = layout.held(parts, own_parts(parts, first, index, stages), first)
        if not any(parameter.requires_grad for parameter in held):
            message = f"stage {index} of {stages} would train nothing: all of its parameters are frozen"
            raise ConfigError(message, hint=f"move the cuts with `{settings.name}.cuts`, or use fewer stages")
    for name, module in attachments.module.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            message = f"`{name}` has statistics of batches, but only its own stage computes them"
            raise ConfigError(message, hint="replace batch norms by group norms")
    if routers(attachments.module):
        message = f"{type(attachments.module).__name__} has routers, and their auxiliary loss needs all stages"
        raise ConfigError(message, hint=f"remove [{settings.name}]")
    check_beside(attachments, settings, partial(_refused, settings))


def _refused(settings: Pipeline, feature: Feature) -> str:
    """Why a feature does not work with a pipeline; empty if it does."""
    if Seam.GRAPH in feature.seams:
        return "compiles the whole model, but a stage runs only a part"
    if feature.divided == "parameters":
        return "shards the parameters of the whole model, but a stage holds only a part"
    if settings.embeddings == "last" and feature.averages_in_backward:
        return 'averages gradients in one backward pass, but with `embeddings = "last"` a stage has several'
    if settings.chunks > 1 and feature.averages_in_backward:
        return "averages gradients in one backward pass, but a stage with several parts has several"
    return ""
