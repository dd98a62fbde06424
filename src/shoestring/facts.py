"""Collects facts, such as settings, that must be equal on all ranks, and describes where ranks differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

_SHOWN = 60  # maximum number of characters of a value in an error message
_OF_A_HOST = ("folder", "memory_folder")
"""Names of settings that may differ between hosts, because they are paths on a host's disk or in its memory."""


def of_features(features: Sequence[Any], **others: Any) -> dict[str, Any]:
    """Return the names and settings of features, together with the additional facts in `others`."""
    facts: dict[str, Any] = {"features": [feature.name for feature in features], **others}
    for number, feature in enumerate(features):
        name = feature.name if feature.name not in facts else f"{feature.name} ({number})"
        facts[name] = {
            setting.name: getattr(feature, setting.name)
            for setting in fields(feature)
            if setting.name not in _OF_A_HOST
        }
    return facts


def of_optimizer(optimizer: Any, axes: Collection[str]) -> dict[str, Any]:
    """Return the class and settings of an optimizer.

    Args:
        axes: names of the mesh axes. If there are axes other than "hosts" and "local", ranks may hold different parts
            of the model and have different parameter groups, so only the optimizer's defaults are collected.
    """
    whole = {*axes} <= {"hosts", "local"}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"optimizer": {"type": type(optimizer).__name__, "groups": groups if whole else [optimizer.defaults]}}


def encode(facts: Mapping[str, Any]) -> bytes:
    """Serialise nested facts as JSON with dotted keys; a value that JSON cannot represent is replaced by a name."""
    return json.dumps(dict(_flat(facts)), default=_named).encode()


def difference(encoded: Sequence[bytes]) -> str:
    """Describe how ranks' encoded facts differ: one key with its values and ranks, and up to three further keys.

    Returns:
        One line of text; empty if all ranks have the same facts.
    """
    if len(set(encoded)) <= 1:
        return ""
    ranks = [json.loads(rank_facts) for rank_facts in encoded]
    keys = [
        key
        for key in dict.fromkeys(key for rank_facts in ranks for key in rank_facts)
        if len(set(_values(ranks, key))) > 1
    ]
    if not keys:
        return ""
    where: dict[str, list[int]] = {}
    for rank, value in enumerate(_values(ranks, keys[0])):
        where.setdefault(value, []).append(rank)
    values = []
    for value, having in where.items():
        short = value if len(value) <= _SHOWN else f"{value[: _SHOWN - 1]}…"
        listed = ", ".join(map(str, having[:4])) + (f" and {len(having) - 4} more" if len(having) > 4 else "")
        values.append(f"{short} on rank{'s' * (len(having) > 1)} {listed}")
    more = f"; so do {', '.join(f'`{key}`' for key in keys[1:4])}" if keys[1:] else ""
    return f"`{keys[0]}` differs between ranks: {', '.join(values)}{more}"


def _flat(facts: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings and lists of mappings into pairs (dotted key, value)."""
    if isinstance(facts, Mapping) and facts:
        for key, value in facts.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(facts, list | tuple) and facts and all(isinstance(item, Mapping) for item in facts):
        for number, value in enumerate(facts):
            yield from _flat(value, f"{prefix}[{number}]")
    else:
        yield prefix, facts


def _values(ranks: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return [json.dumps(rank_facts[key], sort_keys=True) if key in rank_facts else "missing" for rank_facts in ranks]


def _named(value: object) -> str:
    if hasattr(value, "__fspath__"):
        return str(value)
    return str(getattr(value, "__qualname__", None) or type(value).__name__)
