"""Tensors computed for samples, on disk by a hash of the sample: a teacher's logits for later epochs and runs.

A cache is a folder of segments, each a safetensors file that appears complete or not at all. Processes write segments
of their own and read those of all, so several ranks, runs and trials may share a folder, and a killed one loses what it
had not written yet and damages nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shoestring.core.errors import DataError
from shoestring.core.task import Batch
from shoestring.storage.whole import write_atomic

SEGMENT = 64 << 20
"""Bytes of a segment, which are in memory until it is written."""
KEYS = "keys"
_INPUTS = ("inputs", "input_ids", "attention_mask", "position_ids")


class SampleCache:
    """The tensors of each sample, read and written by the keys of `sample_keys`.

    Args:
        folder: of all caches; this one is the folder of its identity in there.
        identity: what the tensors are a function of besides the sample: the model's hash, its settings. Tensors of
            another identity are never returned.

    Raises:
        DataError: a segment of another identity lies there, or one cannot be read.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        text = json.dumps(dict(identity), sort_keys=True)
        self.identity = {"identity": text}
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self._places: dict[bytes, tuple[Path, int]] = {}
        self._files: dict[Path, Any] = {}
        self._unwritten: dict[bytes, int] = {}
        self._buffers: dict[str, Tensor] = {}  # one of each name, so that many small tensors do not split up the heap
        self._seen = -1
        self.refresh()

    def __len__(self) -> int:
        return len(self._places.keys() | self._unwritten.keys())

    def refresh(self) -> None:
        """Find the segments that others have written since."""
        changed = self.folder.stat().st_mtime_ns if self.folder.is_dir() else -1
        if changed == self._seen:
            return
        self._seen = changed
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._files:
                self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(str(path), "pt")
            metadata, keys = file.metadata(), file.get_tensor(KEYS).numpy()
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot read `{path}`: {error}", hint="delete it; it is computed again") from error
        if metadata != self.identity:
            raise DataError(f"`{path}` is of another teacher", hint="delete it; it is computed again")
        self._files[path] = file
        self._places |= {key.tobytes(): (path, row) for row, key in enumerate(keys)}

    def missing(self, keys: Sequence[bytes]) -> bool:
        """Whether any of them is not there, after a look at what others have written since."""
        if not self._has(keys):
            self.refresh()
        return not self._has(keys)

    def _has(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._places or key in self._unwritten for key in keys)

    def read(self, keys: Sequence[bytes]) -> dict[str, Tensor]:
        """The tensors of samples that are there, stacked, by name."""
        rows = [self._read(key) for key in keys]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _read(self, key: bytes) -> dict[str, Tensor]:
        if key in self._unwritten:
            return {name: buffer[self._unwritten[key]] for name, buffer in self._buffers.items()}
        path, row = self._places[key]
        file = self._files[path]
        return {name: file.get_slice(name)[row] for name in file.keys() if name != KEYS}  # noqa: SIM118

    def write(self, keys: Sequence[bytes], tensors: Mapping[str, Tensor]) -> None:
        """Add those samples that are not there yet; `tensors` are by name, with one row for each key."""
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
        """Write what is in memory."""
        if count := len(self._unwritten):
            tensors = {name: buffer[:count] for name, buffer in self._buffers.items()}
            tensors[KEYS] = torch.frombuffer(bytearray(b"".join(self._unwritten)), dtype=torch.uint8).view(count, -1)
            path = self.folder / f"{os.urandom(8).hex()}.safetensors"
            write_atomic(path, save(tensors, metadata=self.identity))
            self._open(path)
            self._unwritten.clear()

    def close(self) -> None:
        """Write what is in memory and close all files."""
        self.flush()
        self._buffers.clear()
        self._files.clear()
        self._places.clear()


def sample_keys(batch: Batch) -> list[bytes]:
    """16 bytes for each sample of a batch, which are equal where a model sees the same: a hash of its inputs.

    So a key needs no number from the loader, stays valid when the data set grows or is shuffled, and two data sets
    share what they have in common.
    """
    if isinstance(batch, Mapping):
        inputs = {name: batch[name] for name in _INPUTS if name in batch}
    else:
        inputs = {"inputs": batch[0]}
    rows = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in inputs.items()}
    names = json.dumps([(name, str(array.dtype), array.shape[1:]) for name, array in rows.items()]).encode()
    return [
        hashlib.blake2b(names + b"".join(row.tobytes() for row in sample), digest_size=16).digest()
        for sample in zip(*rows.values(), strict=True)
    ]
