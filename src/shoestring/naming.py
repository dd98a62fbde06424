"""Callables of the user's own, named `package.module:callable` in a run file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from shoestring.core.errors import ConfigError, nearest


def resolve(target: str, key: str) -> Callable[..., Any]:
    """The callable named `package.module:callable` by the run file's `key`.

    Raises:
        ConfigError: no such module or name in it, or importing it fails.
    """
    module_name, _, name = target.partition(":")
    if not name:
        raise ConfigError(f"`{key}` is {target!r}, not of the form `package.module:callable`")
    try:
        module = import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"`{key}`: cannot import `{module_name}`: {reason}") from error
    found = getattr(module, name, None)
    if not callable(found):
        public = [each for each in dir(module) if not each.startswith("_") and callable(getattr(module, each))]
        raise ConfigError(f"`{key}`: `{module_name}` has no callable `{name}`", hint=nearest(name, public))
    return found
