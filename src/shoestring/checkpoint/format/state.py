"""Kept state as bytes and back, without pickle: tensors as safetensors, everything else as JSON in its metadata."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.distributed.tensor import DTensor

from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.tree import decode, encode
from shoestring.core.errors import CheckpointError

log = logging.getLogger("shoestring")

BESIDES = frozenset({"best", "checkpoint", "progress", "random", "scaler"})
"""The names of states that a run keeps besides the model, its optimizer, and what it was told to keep."""

_HINTS = {
    "model": "the model of this run is another one than the checkpoint's: make it as it was (by `model` and [model] in "
    "a run file), or start from scratch in another folder (--run.folder NEW)",
    "optimizer": "the optimizer of this run has other parameters than the checkpoint's: give it the same, in order",
}


def pack(state: Mapping[str, Any]) -> bytes:
    """Serialise nested mappings, lists, tuples, tensors, arrays and JSON scalars.

    A DTensor is gathered whole, which is a collective: every rank of its mesh must pack.

    Raises:
        CheckpointError: a value of another type, named by its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(encode(state, "", tensors))
    tensors = {name: _whole(tensor) for name, tensor in tensors.items()}
    try:
        return save(tensors, metadata={"tree": tree, "sum": _checksum(tree, tensors)})
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
        raise CheckpointError(f"cannot save tensors of {', '.join(kinds)}: {error}") from error


def unpack(data: bytes) -> dict[str, Any]:
    """The inverse of `pack`.

    Raises:
        CheckpointError: the bytes are damaged or were not written by `pack`.
    """
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        if metadata["sum"] != _checksum(metadata["tree"], tensors):
            raise ValueError("its content is not what was written")
        state = decode(json.loads(metadata["tree"]), tensors.__getitem__)
        if not isinstance(state, dict):
            raise ValueError("it is no mapping")
        return state
    except (SafetensorError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"not a saved state, or damaged: {error}") from error


def reason_of(error: Exception) -> str:
    """What a state that could not be loaded raised, on one line; it may be a state of the user's own."""
    return (str(error).splitlines() or [""])[-1].strip() or type(error).__name__


def misfit(source: str, name: str, reason: str) -> CheckpointError:
    """The error for a state that the run cannot load, with what to do where that is known."""
    return CheckpointError(f"{source} does not fit this run's {name}: {reason}", hint=_HINTS.get(name, ""))


def tell_missing(source: str, wanted: Iterable[str], saved: Iterable[str]) -> None:
    """Warn of states that a checkpoint lacks, and of those that it holds and nobody takes: one of them was renamed,
    perhaps. What a run keeps by itself starts afresh without a word."""
    lacking, unused = sorted({*wanted} - {*saved} - BESIDES), sorted({*saved} - {*wanted} - BESIDES)
    if lacking:
        listed, starts = ", ".join(f"`{name}`" for name in lacking), "starts" if len(lacking) == 1 else "start"
        log.warning("%s holds no %s, which %s afresh", source, listed, starts)
    if unused:
        log.warning("of %s nothing takes %s", source, ", ".join(f"`{name}`" for name in unused))


def unreadable(folder: Path | str, reason: str) -> CheckpointError:
    """The error for a folder of checkpoints none of which can be read, with the command that looks for the damage."""
    hint = f"`shoestring checkpoint verify {folder}` says what is damaged; restore a copy, or start in another folder"
    return CheckpointError(f"no checkpoint in `{folder}` can be read: {reason}", hint=hint)


def _checksum(tree: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of everything: safetensors itself would read a flipped bit as another number."""
    total = crc32(tree.encode())
    for name, tensor in sorted(tensors.items()):
        total = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if tensor.numel():  # those without elements may have strides that cannot be viewed
            total = crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # A clone, because safetensors refuses tensors that share memory (tied weights).
    return whole.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()
