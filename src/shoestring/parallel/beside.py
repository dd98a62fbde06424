"""Conflicts that are common to all features that split a model over ranks."""

from __future__ import annotations

from collections.abc import Callable

from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Feature


def check_beside(attachments: Attachments, settings: Feature, refused: Callable[[Feature], str]) -> None:
    """Raise ConflictError if another feature needs the whole model on a rank, or ConfigError if DDP wraps the model.

    Args:
        refused: function that returns why `settings` itself does not work with a feature; empty if it does.
    """
    if attachments.wrapped:
        raise ConfigError("the model is already wrapped in DDP", hint=f"remove DDP or {settings.name}")
    for feature in attachments.features:
        if reason := refused(feature) or _needs_whole(feature):
            raise ConflictError(
                f"`{feature.name}` does not work with `{settings.name}`: it {reason}",
                hint=f"remove the table [{feature.name}] or [{settings.name}]",
            )


def _needs_whole(feature: Feature) -> str:
    """Why a feature needs a rank that has the whole model; empty if it does not need one."""
    if feature.adds_parameters or type(feature).export is not Feature.export:
        return "exports weights of the whole model, but a rank holds only a part"
    if feature.reads_first_rank:
        return "assumes that the first rank holds the whole model, but a rank holds only a part"
    return ""
