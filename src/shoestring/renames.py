"""Maps former names of keys in run files and study files to their present names.

A former name is accepted for one version, with a warning that states the present name. Every key that a user writes is
looked up in this module: in a file, on the command line, in a study's search space, or in a string such as
`"quantize(bits=4)"`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from shoestring.core.errors import ConfigError

log = logging.getLogger("shoestring")

_CODECS = ("bf16", "dense", "dgc", "powersgd", "quantize", "randomk", "selective", "sign", "terngrad", "topk")
_TRANSPORT = {"budget_kb": "kb_per_step"} | {name: name for name in ("parts", "channels", "torus", "select")}

RENAMED: dict[str, str] = {
    "run.keep_best": "run.save_best",
    **{f"comm.{codec}.{old}": f"comm.{codec}.transport.{new}" for codec in _CODECS for old, new in _TRANSPORT.items()},
    **{f"comm.{method}.alpha": f"comm.{method}.own_weight" for method in ("localsgd", "diloco", "sparseloco")},
    **{f"comm.{codec}.selection": f"comm.{codec}.topk_method" for codec in ("topk", "dgc")},
    **{f"comm.{codec}.bucket": f"comm.{codec}.group_size" for codec in ("quantize", "sign")},
    "comm.fedavg.weights": "comm.fedavg.client_weights",
    "comm.sparseloco.beta": "comm.sparseloco.residual_decay",
    "comm.randomk.block": "comm.randomk.block_size",
    "comm.dgc.clip": "comm.dgc.max_norm",
    "comm.terngrad.clip": "comm.terngrad.clip_sigmas",
    "checkpoint.tiered.budget": "checkpoint.tiered.max_memory_gb",
    "checkpoint.tiered.memory": "checkpoint.tiered.memory_folder",
    "checkpoint.tiered.peers": "checkpoint.tiered.redundancy",
    "decode.distill.cache": "decode.distill.cache_folder",
    "decode.distill.prompt": "decode.distill.prompt_fraction",
    "memory.broker.share": "memory.broker.weight",
    "memory.broker.shared": "memory.broker.all_users",
    "memory.recompute.every": "memory.recompute.every_nth",
    "memory.recompute.keep": "memory.recompute.saved_operators",
    "memory.tracing.start": "memory.tracing.after",
    "optim.adascale.smoothing": "optim.adascale.decay",
    "optim.lars.anneal": "optim.lars.bound_warmup",
    "optim.lars.clip": "optim.lars.ratio_clip",
    "optim.lars.trust": "optim.lars.trust_coefficient",
    "optim.muon.share": "optim.muon.share_steps",
    **{f"parallel.planned.{old}": f"parallel.planned.num_{old}" for old in ("hosts", "ranks", "weights")},
    "parallel.tensor.vocabulary": "parallel.tensor.vocabulary_layers",
    "profile.callpaths.budget": "profile.callpaths.max_overhead",
    "profile.callpaths.share": "profile.callpaths.sample_rate",
    "profile.callpaths.start": "profile.callpaths.after",
    **{f"sparse.{method}.decay": f"sparse.{method}.masked_decay" for method in ("ast", "srste", "tsrste")},
    "sparse.sste.fp8": "sparse.sste.simulate_fp8",
    "sparse.ast.anneal": "sparse.ast.masked_decay_warmup",
    "sparse.ast.scale": "sparse.ast.masked_decay_scale",
    "population.share": "population.truncation",
}
"""Maps full former names of keys to their full present names."""

REMOVED = {"comm.oktopk": "write [comm.topk] with the same `density` and `wire`; it has no `slack`"}
"""Maps removed keys and tables, by their full names, to a hint that says what to write instead."""


def new_name(key: str) -> str:
    """Return the present full name of a key; log a warning the first time that a former name is looked up.

    Raises:
        ConfigError: the key was removed.
    """
    for gone in (key, key.rpartition(".")[0]):
        if gone in REMOVED:
            raise ConfigError(f"`{gone}` is no longer a setting", hint=REMOVED[gone])
    if key not in RENAMED:
        return key
    _warn(key, RENAMED[key])
    return RENAMED[key]


def rename(document: dict[str, Any], source: str = "the run file") -> None:
    """Rename the former keys in a document to their present names, in place.

    Raises:
        ConfigError: the document contains a removed key, or a key under both its former and its present name.
    """
    for key in list(_keys(document)):
        try:
            name = new_name(key)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}", hint=error.hint) from None
        if name != key:
            *tables, last = key.split(".")
            value = _table(document, tables).pop(last)
            *tables, last = name.split(".")
            table = _table(document, tables)
            if last in table:
                raise ConfigError(f"{source}: `{key}` and `{name}` are one setting", hint=f"remove `{key}`")
            table[last] = value


def renamed(name: str, table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a copy of a table with its keys renamed to their present names; return any other value unchanged."""
    if not isinstance(table, Mapping):
        return table
    tables = name.split(".")
    document: dict[str, Any] = {}
    _table(document, tables).update(table)
    rename(document, source)
    return _table(document, tables)


def _keys(document: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys and tables of a document, such as `comm.topk` and `comm.topk.density`."""
    for name, value in document.items():
        yield f"{inside}{name}"
        if isinstance(value, dict) and inside.count(".") < 2:
            yield from _keys(value, f"{inside}{name}.")


def _table(document: dict[str, Any], names: list[str]) -> dict[str, Any]:
    table = document
    for name in names:
        table = table.setdefault(name, {})
    return table


@cache  # so that repeated lookups of a name log one warning
def _warn(key: str, name: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        log.warning("`%s` is called `%s` now; the next version takes only the new name", key, name)
