"""Settings of parameter groups, selected by name pattern, which scale the learning rate and the weight decay and set
Adam's betas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError
from shoestring.optim.groups import check_matched

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.feature import Feature


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings of the parameters whose names match a pattern."""

    pattern: str
    """Names of the parameters, with the wildcards `*` and `?`: `*.bias`, `blocks.0.*`."""
    lr_scale: float = 1.0
    """Factor of the learning rate."""
    decay_scale: float = 1.0
    """Factor of the weight decay, for parameters that decay at all (matrices); 0 turns it off."""
    betas: tuple[float, ...] = ()
    """Decay rates of AdamW's two running averages in place of the optimizer's `betas`; `[]` keeps the optimizer's."""


def check_groups(feature: Feature, groups: Sequence[Group], attachments: Attachments, *, betas: bool = False) -> None:
    """Raise ConfigError if a setting is out of range, or a group contains no trained parameter.

    Args:
        betas: whether the optimizer supports betas per group.
    """
    for index, group in enumerate(groups):
        for key, value in (("lr_scale", group.lr_scale), ("decay_scale", group.decay_scale)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"`{feature.name}.groups[{index}].{key}` must be zero or positive, got {value}")
        if group.betas and not betas:
            hint = "use optim.adamw, optim.adamw8bit or optim.muon"
            raise ConfigError(f"`{feature.name}` has no betas per group, but `groups[{index}]` sets them", hint=hint)
        if group.betas and (len(group.betas) != 2 or not all(0 <= beta < 1 for beta in group.betas)):
            got = list(group.betas)
            raise ConfigError(f"`{feature.name}.groups[{index}].betas` must be two numbers in [0, 1), got {got}")
    if not any(other.adds_parameters for other in attachments.features):  # a group may select parameters added later
        check_matched(groups, attachments.trained)
