"""A disk cache of tensors computed for samples, such as a teacher's logits, for use in later epochs and runs.

A cache is a folder of segments, each a safetensors file that is written atomically. A process writes its own segments
and reads the segments of all processes, so several ranks, runs and trials may share a folder. A process that is killed
loses only the samples it had not written yet.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from shoestring.core.attachments import Attachments
from shoestring.core.errors import DataError
from shoestring.core.task import Batch
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

SEGMENT = 64 << 20
"""Size of a segment in bytes; a segment is kept in memory until it is written."""
KEYS = "keys"
_INPUTS = ("inputs", "input_ids", "attention_mask", "position_ids")


class SampleCache:
    """Stores the tensors of samples on disk, under the keys that `sample_keys` returns.

    Args:
        folder: parent folder of caches; this one uses a subfolder named by its identity.
        identity: everything that the tensors depend on besides the sample, such as the model's hash and settings.
            Tensors stored under another identity are never returned.

    Raises:
        DataError: a segment has another identity or cannot be read.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        text = json.dumps(dict(identity), sort_keys=True)
        self.identity = {"identity": text}
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self._places: dict[bytes, tuple[Path, int]] = {}
        self._files: dict[Path, Any] = {}
        self._unwritten: dict[bytes, int] = {}
        self._buffers: dict[str, Tensor] = {}  # one buffer for each name: many small tensors would fragment the heap
        self._modified = -1
        self.refresh()

    def __len__(self) -> int:
        return len(self._places.keys() | self._unwritten.keys())

    def refresh(self) -> None:
        """Open the segments that other processes have written since the last call."""
        changed = self.folder.stat().st_mtime_ns if self.folder.is_dir() else -1
        if changed == self._modified:
            return
        self._modified = changed
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._files:
                self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file = foreign.open_safetensors(path)
            metadata, keys = file.metadata(), file.get_tensor(KEYS).numpy()
            rows = {file.get_slice(name).get_shape()[:1] == [len(keys)] for name in file.keys()}  # noqa: SIM118
            if rows != {True} or keys.ndim != 2:
                raise ValueError("its tensors do not have one row for each sample")
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise DataError(
                f"cannot read `{path}`: {error}", hint="delete it; its tensors will be computed again"
            ) from error
        if metadata != self.identity:
            raise DataError(
                f"`{path}` was written with another teacher", hint="delete it; its tensors will be computed again"
            )
        self._files[path] = file
        self._places |= {key.tobytes(): (path, row) for row, key in enumerate(keys)}

    def missing(self, keys: Sequence[bytes]) -> bool:
        """Whether any of the samples is missing, after opening the segments that other processes have written in the
        meantime."""
        if not self._has(keys):
            self.refresh()
        return not self._has(keys)

    def _has(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._places or key in self._unwritten for key in keys)

    def read(self, keys: Sequence[bytes]) -> dict[str, Tensor]:
        """Read the tensors of samples by name, stacked with one row for each sample; all samples must be present."""
        rows = [self._read(key) for key in keys]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _read(self, key: bytes) -> dict[str, Tensor]:
        if key in self._unwritten:
            return {name: buffer[self._unwritten[key]] for name, buffer in self._buffers.items()}
        path, row = self._places[key]
        file = self._files[path]
        return {name: file.get_slice(name)[row] for name in file.keys() if name != KEYS}  # noqa: SIM118

    def write(self, keys: Sequence[bytes], tensors: Mapping[str, Tensor]) -> None:
        """Add the samples that are missing; `tensors` maps names to tensors with one row for each key."""
        host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        shapes = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in host.items()}
        if shapes != {name: (buffer.dtype, buffer.shape[1:]) for name, buffer in self._buffers.items()}:
            self.flush()
            rows = max(1, SEGMENT // sum(tensor[0].nbytes for tensor in host.values()))
            self._buffers = {name: torch.empty((rows, *shape), dtype=dtype) for name, (dtype, shape) in shapes.items()}
        for number, key in enumerate(keys):
            if not self._has([key]):
                if len(self._unwritten) == len(next(iter(self._buffers.values()))):
                    self.flush()
                for name, tensor in host.items():
                    self._buffers[name][len(self._unwritten)] = tensor[number]
                self._unwritten[key] = len(self._unwritten)

    def flush(self) -> None:
        """Write the samples in memory as a segment."""
        if count := len(self._unwritten):
            tensors = {name: buffer[:count] for name, buffer in self._buffers.items()}
            tensors[KEYS] = torch.frombuffer(bytearray(b"".join(self._unwritten)), dtype=torch.uint8).view(count, -1)
            path = self.folder / f"{os.urandom(8).hex()}.safetensors"
            write_atomic(path, save(tensors, metadata=self.identity))
            self._open(path)
            self._unwritten.clear()

    def close(self) -> None:
        """Write the samples in memory and close all files."""
        self.flush()
        self._buffers.clear()
        self._files.clear()
        self._places.clear()


def must_compute(cache: SampleCache, keys: Sequence[bytes], attachments: Attachments) -> bool:
    """Whether the tensors of some samples have to be computed; a collective if parameters are sharded.

    A sharded model runs on all ranks or on none, so if one rank lacks a sample, the result is True on all ranks.
    """
    missing = cache.missing(keys)
    if attachments.divided != "parameters":
        return missing
    return any(answer == b"1" for answer in attachments.world.gather(b"1" if missing else b"0"))


def sample_keys(batch: Batch, also: Sequence[str] = ()) -> list[bytes]:
    """A key of 16 bytes for each sample of a batch: a hash of the model's inputs.

    Because keys depend only on content, they stay valid when the data set grows or is shuffled, and data sets with
    common samples share them.

    Args:
        also: names of further entries of the batch that the cached tensors depend on.
    """
    if isinstance(batch, Mapping):
        inputs = {name: batch[name] for name in (*_INPUTS, *also) if name in batch}
    else:
        inputs = {"inputs": batch[0]}
    rows = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in inputs.items()}
    names = json.dumps([(name, str(array.dtype), array.shape[1:]) for name, array in rows.items()]).encode()
    return [
        hashlib.blake2b(names + b"".join(row.tobytes() for row in sample), digest_size=16).digest()
        for sample in zip(*rows.values(), strict=True)
    ]
