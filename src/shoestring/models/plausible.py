"""Checks an untrusted model configuration against the weights beside it, before a model is built.

Building a model creates all layers that `config.json` asks for and allocates their weights before files are read.
Therefore the counts in a configuration are limited by the number of stored tensors, and its sizes by the bytes of the
weights. The limits are loose: any model within them is built within seconds and takes about as much memory as the
files. Loading then checks every tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.core.errors import CheckpointError
from shoestring.models import llama
from shoestring.storage import foreign

_FEW = 256
"""Number of layers that is always allowed, even if there are fewer tensors, because models may share weights between
layers."""
_COUNTS = 4096
"""Largest count of heads, experts and the like; the largest known models have 512 of one kind in a layer."""
_SMALL = 1 << 26
"""Number of elements that is always allowed, even if the files are smaller, because positions and masks are not
stored."""
_PER_BYTE = 8
"""Maximum number of elements that a stored byte may represent, at one bit each."""
_DEPTH, _ENTRIES = 64, 100_000
"""Maximum nesting depth and maximum number of entries of a configuration; the largest known values are 6 and 3,000."""
_NUMBERS = re.compile(r"theta|base|freq|scal|factor|eps|seed|token|_id$|_ids$|idx|bytes")
"""Names of entries that are not counts: coefficients and token ids."""
_LAYERS = re.compile(r"^(?!.*(size|vocab|dim|width|multiple)).*(layer|block|depth|stage)")
"""Names of entries that count layers; names of sizes, such as hidden_size_per_layer_input, are excluded."""
_COUNTED = re.compile(r"^(num|n)_(?!positions|ctx|embd|inner|embeddings)|heads|experts")
"""Names of entries that count parts of a layer, such as heads; names of sizes, such as num_positions, are excluded."""


@dataclass(frozen=True)
class StoredWeights:
    """Number of tensors and of bytes in the weight files beside a configuration."""

    tensors: int
    nbytes: int

    @property
    def numbers(self) -> int:
        """Maximum number of elements of a model with these weights."""
        return max(_SMALL, self.nbytes * _PER_BYTE)


def stored_in(folder: Path) -> StoredWeights | None:
    """Number and size of the weights in a model's folder; None if there are none, as in a run's copy of a
    configuration.

    If the weights are unreadable, the result is None as well: the code that loads them reports the error.
    """
    try:
        files = llama.weight_files(folder)
        return StoredWeights(sum(map(llama.count_tensors, files)), sum(file.stat().st_size for file in files))
    except (CheckpointError, OSError):
        return None


def check_config(config: Mapping[str, Any], stored: StoredWeights | None, where: Path) -> None:
    """Refuse a configuration whose counts are too large for its weights.

    Raises:
        CheckpointError: a count is too large, or the configuration has too many entries.
    """
    most = stored.numbers if stored else 2**31 - 1
    layers = max(_FEW, stored.tensors) if stored else _COUNTS
    for name, value in _numbers(config, where):
        if _NUMBERS.search(name):
            continue
        limit = layers if _LAYERS.search(name) else max(_COUNTS, layers) if _COUNTED.search(name) else most
        if abs(value) > limit:
            held = (
                f"the weights are {stored.tensors} tensors of {stored.nbytes:,} bytes" if stored else "no model is so"
            )
            text = f"{value:,}" if abs(value) < 2**64 else "a huge number"
            raise CheckpointError(
                f"`{where}`: {foreign.printable(name)[:80]} is {text}, and {held}",
                hint="the configuration is damaged, or made to exhaust this machine",
            )


def _numbers(config: Any, where: Path) -> Iterator[tuple[str, int]]:
    """Iterate over the integers in a configuration, each with the name of its entry."""
    waiting: list[tuple[str, Any, int]] = [("", config, 0)]
    entries = 0
    while waiting:
        name, value, depth = waiting.pop()
        entries += 1
        if entries > _ENTRIES or depth > _DEPTH:
            raise CheckpointError(f"`{where}` has too many entries, or entries that are nested too deeply")
        if isinstance(value, dict):
            waiting += ((str(key), inner, depth + 1) for key, inner in value.items())
        elif isinstance(value, list):
            waiting += ((name, inner, depth + 1) for inner in value)
        elif isinstance(value, int):
            yield name, value


def check_size(outline: Callable[[], nn.Module], stored: StoredWeights | None, where: Path) -> None:
    """Refuse a model with more elements than the weight files can fill; if there are no files, with more elements than
    bytes of memory in this machine.

    Args:
        outline: builds the model; called on the meta device.

    Raises:
        CheckpointError: the model is too large.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = outline()
    numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if stored is None:
        most, held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine's memory has fewer bytes"
    else:
        most, held = stored.numbers, f"its weights are {stored.nbytes:,} bytes"
    if numbers > most:
        raise CheckpointError(
            f"`{where}` describes a model of {numbers:,} numbers, and {held}",
            hint="the configuration is damaged, or belongs to other weights",
        )
