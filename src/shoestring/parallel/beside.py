"""What features that split a model over ranks refuse beside them."""

from __future__ import annotations

from collections.abc import Callable

from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Feature


def check_beside(attachments: Attachments, settings: Feature, refused: Callable[[Feature], str]) -> None:
    """Raise ConflictError if a feature does not work where a rank has a part of the model, ConfigError beside DDP.

    Args:
        refused: why a feature does not work beside this one, for reasons of its own; empty if it does.
    """
    if attachments.wrapped:
        raise ConfigError("the model is already wrapped in DDP", hint=f"remove DDP or {settings.name}")
    for feature in attachments.features:
        if reason := refused(feature) or _needs_whole(feature):
            raise ConflictError(
                f"`{feature.name}` {reason}, beside `{settings.name}`",
                hint=f"remove the table [{feature.name}] or [{settings.name}]",
            )


def _needs_whole(feature: Feature) -> str:
    """Why a feature needs a rank that has the whole model; empty if it needs none."""
    if feature.adds_parameters or type(feature).export is not Feature.export:
        return "exports weights of the whole model, of which a rank has a part"
    if feature.reads_first_rank:
        return "takes the first rank's parameters for those of the model, of which a rank has a part"
    return ""
