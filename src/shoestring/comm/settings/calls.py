"""Reads exchanges that a run file writes as calls, such as "powersgd(rank=4)"."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import fields

from shoestring.comm.settings import per_step
from shoestring.comm.settings.base import Exchange
from shoestring.core.errors import ConfigError, nearest
from shoestring.core.feature import Seam
from shoestring.renames import renamed
from shoestring.settings import structure


def parse_exchange(call: str, where: str = "comm.auto.allow", short: Iterable[str] = ()) -> Exchange:
    """Build the settings of an exchange from a call such as "bf16" or "powersgd(rank=4)".

    Args:
        where: name of the setting, for messages.
        short: short names that the setting accepts too, for messages.

    Raises:
        ConfigError: there is no such codec, setting or value.
    """
    name, settings = parse_call(call, where, short)
    classes = [kind for kind in vars(per_step).values() if isinstance(kind, type) and issubclass(kind, Exchange)]
    # A codec that builds its optimizer cannot be chosen at the first step.
    codecs = {kind.__name__.lower(): kind for kind in classes if kind is not Exchange and kind.seams == (Seam.WIRE,)}
    if name not in codecs:
        raise ConfigError(f"`{where}`: there is no codec `{name}`", hint=nearest(name, {*codecs, *short}))
    common = {field.name for field in fields(Exchange)}
    known = [field.name for field in fields(codecs[name]) if field.name not in common]
    for key in settings:
        if key not in known:
            hint = nearest(key, known) if known else f'it has none: write "{name}"'
            raise ConfigError(f"`{where}`: `{name}` has no setting `{key}` here", hint=hint)
    return structure(settings, codecs[name], name, f"`{where}`")


def parse_call(call: str, where: str = "comm.auto.allow", short: Iterable[str] = ()) -> tuple[str, dict[str, object]]:
    """Parse "powersgd(rank=4)" into ("powersgd", {"rank": 4}).

    Raises:
        ConfigError: `call` is neither a name nor a call with literal keyword arguments.
    """
    try:
        tree = ast.parse(call.strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
            settings = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
            return tree.func.id, renamed(f"comm.{tree.func.id}", settings, f"`{where}`")
    except (SyntaxError, ValueError):
        pass
    names = ", ".join(f'"{name}"' for name in dict.fromkeys((*short, "bf16")))
    raise ConfigError(f"`{where}`: cannot read {call!r}", hint=f'write {names} or "powersgd(rank=4)"')
