"""Selects parameter groups by name pattern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from shoestring.optim.settings.groups import Group


def matching(groups: Sequence[Group], name: str) -> Group | None:
    """The first group whose pattern matches the parameter's name; None if there is none."""
    return next((group for group in groups if fnmatchcase(name, group.pattern)), None)


def check_matched(groups: Sequence[Group], names: Iterable[str]) -> None:
    """Raise ConfigError if a group contains none of the trained parameters `names`."""
    trained = list(names)
    used = [matching(groups, name) for name in trained]
    for group in groups:
        if group not in used:
            hit = next((name for name in trained if fnmatchcase(name, group.pattern)), "")
            hint = f"`{hit}` is in an earlier group" if hit else nearest(group.pattern, trained[:20])
            raise ConfigError(f"no trained parameter is in the group `{group.pattern}` of the optimizer", hint=hint)
