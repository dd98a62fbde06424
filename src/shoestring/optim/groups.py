"""Groups of parameters by name, with a learning rate and a weight decay of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from shoestring.core.feature import Feature
    from shoestring.core.job import Job


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings of the parameters whose names match a pattern."""

    pattern: str
    """Names of the parameters, with the wildcards `*` and `?`: `*.bias`, `blocks.0.*`."""
    lr_scale: float = 1.0
    """Factor of the learning rate."""
    decay_scale: float = 1.0
    """Factor of the weight decay of those that decay; 0 turns it off."""


def matching(groups: Sequence[Group], name: str) -> Group | None:
    """The first group whose pattern matches the name of a parameter."""
    return next((group for group in groups if fnmatchcase(name, group.pattern)), None)


def check_matched(groups: Sequence[Group], names: Iterable[str]) -> None:
    """Raise ConfigError for a group that none of the trained parameters is in."""
    listed = list(names)
    found = [matching(groups, name) for name in listed]
    for group in groups:
        if group not in found:
            hit = next((name for name in listed if fnmatchcase(name, group.pattern)), "")
            hint = f"`{hit}` is in an earlier group" if hit else nearest(group.pattern, listed[:20])
            raise ConfigError(f"no trained parameter is in the group `{group.pattern}` of the optimizer", hint=hint)


def check_groups(feature: Feature, groups: Sequence[Group], job: Job) -> None:
    """Raise ConfigError where a setting is out of range, or no parameter of the job is in a group."""
    for index, group in enumerate(groups):
        for key, value in (("lr_scale", group.lr_scale), ("decay_scale", group.decay_scale)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"`{feature.name}.groups[{index}].{key}` must be zero or positive, got {value}")
    if not any(each.adds_parameters for each in job.features):  # those would not be there yet
        check_matched(groups, job.trained)
