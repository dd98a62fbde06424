"""Serialises state without pickle: tensors in safetensors' format, all other values as JSON in the safetensors
metadata."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.tensor_file import bytes_of, header_of, in_order
from shoestring.checkpoint.format.tree import decode, encode
from shoestring.core.errors import CheckpointError
from shoestring.sharded import is_sharded

log = logging.getLogger("shoestring")

_DIGITS = 8  # length of a checksum in hexadecimal

BESIDES = frozenset({"best", "checkpoint", "clock", "progress", "random", "scaler"})
"""Names of states that every run automatically adds to its checkpoints, beside model and optimizer."""

_HINTS = {
    "model": "this run's model differs from the checkpoint's: build it as before (by `model` and [model] in a run "
    "file), or start from scratch in another folder (--run.folder NEW)",
    "optimizer": "this run's optimizer has other parameters than the checkpoint's: give it the same, in the same order",
}


@dataclass(frozen=True)
class PackedState:
    """Serialised state whose tensors are not copied, so they must not change until it is written."""

    tree: str
    """All values that are not tensors, as JSON."""
    tensors: Mapping[str, Tensor]
    """Contiguous tensors on the CPU, in the order of the file. Tied weights share their memory, and are written
    twice."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> PackedState:
        """Serialise nested mappings, lists, tuples, tensors, arrays and JSON scalars.

        A DTensor is gathered, so every rank of its mesh must call this function.

        Raises:
            CheckpointError: a value or a tensor has another type; the error names its path.
        """
        tensors: dict[str, Tensor] = {}
        tree = json.dumps(encode(state, "", tensors))
        plain: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if is_sharded(tensor) else tensor
            try:
                plain[name] = whole.detach().cpu().resolve_conj().resolve_neg().contiguous()
            except RuntimeError as error:  # sparse tensors and other layouts
                raise CheckpointError(f"cannot write `{name}`: {reason_of(error)}") from error
        return cls(tree, in_order(plain))

    @property
    def nbytes(self) -> int:
        return len(self._header("0" * _DIGITS)) + sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, file: BinaryIO) -> None:
        """Write the state to a new file. Its checksum, which the header holds, is computed meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            checksum = pool.submit(_checksum, self.tree, self.tensors)
            file.write(self._header("0" * _DIGITS))
            file.writelines(map(bytes_of, self.tensors.values()))
            file.seek(0)
            file.write(self._header(checksum.result()))

    def _header(self, checksum: str) -> bytes:
        return header_of(self.tensors, {"tree": self.tree, "sum": checksum})


def pack(state: Mapping[str, Any]) -> bytes:
    """Serialise state as bytes; see `PackedState.of`."""
    file = io.BytesIO()
    PackedState.of(state).write(file)
    return file.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """Deserialise state that `pack` has serialised.

    Raises:
        CheckpointError: the bytes are damaged or were not written by `pack`.
    """
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        if metadata["sum"] != _checksum(metadata["tree"], tensors):
            raise ValueError("its checksum does not match")
        state = decode(json.loads(metadata["tree"]), tensors.__getitem__)
        if not isinstance(state, dict):
            raise ValueError("it is not a mapping")
        return state
    except (SafetensorError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"not a saved state, or damaged: {error}") from error


def reason_of(error: Exception) -> str:
    """Return the reason of an error in `load_state_dict` as one line: the last line of its message, or its class."""
    return (str(error).splitlines() or [""])[-1].strip() or type(error).__name__


def misfit(source: str, name: str, reason: str) -> CheckpointError:
    """Build the error for a state that the run cannot load; has a hint for states with a known remedy.

    Args:
        source: name of the checkpoint in the message.
        name: name of the state.
    """
    return CheckpointError(f"{source} does not fit this run's {name}: {reason}", hint=_HINTS.get(name, ""))


def tell_missing(source: str, wanted: Iterable[str], saved: Iterable[str]) -> None:
    """Warn of states that a checkpoint lacks, and of saved states that the run does not load, because a state may have
    been renamed. There is no warning for states that every run adds automatically (`BESIDES`).
    """
    lacking, unused = sorted({*wanted} - {*saved} - BESIDES), sorted({*saved} - {*wanted} - BESIDES)
    if lacking:
        listed, starts = ", ".join(f"`{name}`" for name in lacking), "starts" if len(lacking) == 1 else "start"
        log.warning("%s holds no %s, which %s afresh", source, listed, starts)
    if unused:
        log.warning("%s holds %s, which this run does not load", source, ", ".join(f"`{name}`" for name in unused))


def unreadable(folder: Path | str, reason: str) -> CheckpointError:
    """Build the error for a folder in which no checkpoint can be read; the hint names the command that examines the
    folder."""
    hint = f"`shoestring checkpoint verify {folder}` says what is damaged; restore a copy, or start in another folder"
    return CheckpointError(f"no checkpoint in `{folder}` can be read: {reason}", hint=hint)


def _checksum(tree: str, tensors: Mapping[str, Tensor]) -> str:
    """Compute the CRC-32 of a tree and its tensors, because safetensors itself does not detect a flipped bit in a
    tensor."""
    total = crc32(tree.encode())
    for name, tensor in sorted(tensors.items()):
        total = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = crc32(bytes_of(tensor), total)
    return f"{total:0{_DIGITS}x}"
