"""Prepares the data of a profile's page for its script: compressed columns of the tree, names, sources, line times."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.profile.comparison import Comparison
from shoestring.profile.lines import by_line, imports, own_lines
from shoestring.profile.recording import Profile
from shoestring.profile.tree import CallTree, totals

_TYPES = {"u1": np.uint8, "i4": np.int32, "f8": np.float64}
_COLUMNS = {"kind": "u1", "name": "i4", "line": "i4", "link": "i4", "inputs": "i4"} | dict.fromkeys(
    ("count", "inclusive", "least", "most", "bytes", "flops", "device"), "f8"
)


def of_profile(profile: Profile) -> dict[str, Any]:
    """The data for the page of a profile."""
    times: dict[str, dict[int, list[int]]] = {}
    for (file, line), time in by_line(profile.tree, profile.facts.inside).items():
        times.setdefault(file, {})[line] = [time.forward, time.backward, time.python]
    own = list(profile.ranks.own) if profile.ranks else [profile.tree.own]
    labels = profile.ranks.labels if profile.ranks else [""]
    return _data(profile.tree, own, labels, profile.facts.inside, profile.sources, times)


def of_comparison(comparison: Comparison) -> dict[str, Any]:
    """The data for the page of a comparison of two profiles."""
    times: dict[str, dict[int, list[int]]] = {}
    for (file, line), pair in comparison.by_line().items():
        times.setdefault(file, {})[line] = list(pair)
    own, inside = [comparison.before, comparison.after], comparison.facts[1].inside
    data = _data(comparison.tree, own, ["before", "after"], inside, comparison.sources, times)
    return data | {"diff": True}


def _data(
    tree: CallTree,
    own: Sequence[NDArray[np.int64]],
    labels: Sequence[str],
    inside: Sequence[str],
    sources: Mapping[str, str],
    times: Mapping[str, Any],
) -> dict[str, Any]:
    shown = ~imports(tree)  # times on the page exclude imports
    columns: list[tuple[str, str, NDArray[Any]]] = [("own", "f8", times_of_rank * shown) for times_of_rank in own]
    values = {name: getattr(tree, name) for name in _COLUMNS} | {"inclusive": totals(tree.parent, tree.own * shown)}
    columns += [(name, kind, values[name]) for name, kind in _COLUMNS.items()]
    columns.append(("parent", "i4", np.arange(len(tree)) - tree.parent))  # distances compress better than indices
    listed, parts, start = [], [], 0
    for name, kind, column in columns:
        part = column.astype(_TYPES[kind]).tobytes()
        listed.append({"name": name, "type": kind, "start": start})
        parts.append(part + bytes(-len(part) % 8))  # padded to 8 bytes, so that each column is aligned
        start += len(parts[-1])
    own_names = np.zeros(len(tree.names), bool)
    own_names[tree.name[own_lines(tree, inside)]] = True
    return {
        "nodes": len(tree),
        "columns": listed,
        "packed": base64.b64encode(zlib.compress(b"".join(parts), 9)).decode(),
        "names": tree.names,
        "own": own_names.astype(int).tolist(),
        "labels": list(labels),
        "sources": dict(sources),
        "lines": times,
        "diff": False,
    }
