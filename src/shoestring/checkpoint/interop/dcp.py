"""Export and import checkpoints in the format of torch.distributed.checkpoint (DCP).

The export uses torch's own writer, with one chunk for each piece of a tensor in shoestring's files. The format consists
of pickles: the file `.metadata`, and one archive of torch.save for each tensor. The import does not unpickle, because
unpickling can run code. Instead, `pickles.inert` parses the pickles, and the import accepts only tensors and plain
data.
"""

from __future__ import annotations

import io
import itertools
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePath
from reprlib import repr
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from shoestring import figures
from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.layout import Box
from shoestring.checkpoint.format.tensor_file import DTYPES
from shoestring.checkpoint.interop.exports import Saved, Stored
from shoestring.checkpoint.interop.pickles import DEPTH, NODES, Call, Name, Outside, inert, plain, spend
from shoestring.core.errors import CheckpointError
from shoestring.storage.guarded import open_regular, read_regular

METADATA: Final = ".metadata"
LIMIT: Final = 1 << 28  # maximum size of a .metadata file in bytes
_SHORT: Final = 1 << 26  # maximum size of any other pickle in bytes
_CONTENTS: Final = 1 << 20  # maximum size of an archive's table of contents in bytes; torch writes a few hundred bytes
_CHUNKS: Final = 1 << 14  # maximum number of chunks of a tensor
_OF_ZIP: Final = (zipfile.BadZipFile, struct.error)
_OF_DCP: Final = "torch.distributed.checkpoint.metadata."
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}


# -- export -----------------------------------------------------------------------------------------------------------


def write(saved: Saved, names: Sequence[str], folder: Path) -> None:
    """Write some states of a checkpoint to a folder that `torch.distributed.checkpoint.load` reads.

    Raises:
        CheckpointError: a tensor is damaged or incomplete; then the folder has no .metadata file.
        OSError: the folder cannot be written.
    """
    planner = _Pieces()
    states = {name: _replaced(saved.state(name), planner.stored) for name in names}
    writer = FileSystemWriter(folder, overwrite=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no process group on purpose
        try:
            save(states, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # wraps the errors of all ranks, here of one rank
            raise error.failures[0][0] from None


def _replaced(value: Any, stored: dict[int, tuple[Tensor, Stored]]) -> Any:
    """Replace each `Stored` in a state by an empty tensor, so that torch flattens the state like any other state.

    Args:
        stored: mapping to which each empty tensor is added, by the tensor's id, together with the `Stored` that it
            replaces.
    """
    if isinstance(value, Stored):
        empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
        stored[id(empty)] = empty, value
        return empty
    if isinstance(value, Mapping):
        return {key: _replaced(item, stored) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, stored) for item in value)
    return value


class _Pieces(DefaultSavePlanner):
    """A planner for torch's writer, which plans one chunk for each piece, and reads each piece only when torch writes
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, tuple[Tensor, Stored]] = {}
        """Maps the id of an empty tensor to the tensor itself, which must stay alive, and to the `Stored` that it
        replaces."""
        self._reads: dict[tuple[str, tuple[int, ...]], Any] = {}

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if id(value) not in self.stored:
                items += create_default_local_save_plan({name: value}, True).items
                continue
            _, stored = self.stored[id(value)]
            for box, read in stored.cover():
                chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
                self._reads[name, box.offset] = read
                data = TensorWriteData(chunk, TensorProperties(dtype=stored.dtype), torch.Size(stored.shape))
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        assert write_item.index.offset is not None
        tensor = self._reads[write_item.index.fqn, tuple(write_item.index.offset)]().contiguous()
        # If a tensor is a view of a larger storage, torch copies the tensor and keeps all copies in memory. Avoid this
        # by returning a tensor whose storage has exactly the tensor's size.
        alone = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else tensor
        return alone.view(tensor.dtype).view(tensor.shape)


# -- import -----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, Any]:
    """Read the nested states in a folder that torch.distributed.checkpoint wrote. Tensors with a single chunk are
    memory-mapped; other tensors are copied.

    Raises:
        CheckpointError: the folder is damaged, or contains an object that is neither a tensor nor plain data.
    """
    path = folder / METADATA
    try:
        metadata = _state(inert(read_regular(path, LIMIT), str(path)), f"{_OF_DCP}Metadata")
        entries: Mapping[str, Any] = metadata["state_dict_metadata"]
        places: dict[Key, Place] = {}
        for index, info in metadata["storage_data"].items():
            key, storage = _key(index), _state(info, "torch.distributed.checkpoint.filesystem._StorageInfo")
            if storage.get("transform_descriptors"):
                raise ValueError("its files are compressed or encrypted")
            file, (offset, length) = storage["relative_path"], _numbers((storage["offset"], storage["length"]))
            if not isinstance(file, str) or PurePath(file).name != file or file in ("", ".", "..") or "\0" in file:
                raise ValueError(f"{repr(file)} is not the name of a file in its folder")
            places[key] = file, offset, length
        # Tensors must not share bytes, because tensors that share bytes could be many times as large as the files.
        for (file, start, length), (next_file, following, _) in itertools.pairwise(sorted(set(places.values()))):
            if file == next_file and start + length > following:
                raise ValueError(f"two tensors share bytes of `{file}`")
        budget = iter(range(NODES))
        paths = plain(metadata["planner_data"], str(path), budget) or {}
        states: dict[str, Any] = {}
        for name, entry in entries.items():
            value = _value(folder, name, entry, places, budget)
            _put(states, paths.get(name, (name,)), value, budget)
    except OSError as error:
        raise CheckpointError(f"cannot read `{error.filename or path}`: {error.strerror}") from error
    except (ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, *_OF_ZIP) as e:
        raise CheckpointError(f"`{folder}` is damaged, or not what torch writes: {e}") from e
    return states


def _state(value: Any, target: str) -> Any:
    """Return the state of an object in a pickle; raises ValueError unless the object has the type `target`."""
    if not isinstance(value, Call) or value.target != target:
        raise ValueError(f"{repr(value.target if isinstance(value, Call) else value)} instead of a {target}")
    return value.state


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Call) or value.target != "torch.Size":
        raise ValueError(f"{repr(value)} is not a size")
    (numbers,) = value.arguments
    return _numbers(numbers)


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    for number in values:
        if type(number) is not int or not 0 <= number < 1 << 60:
            raise ValueError(f"{repr(number)} is not a valid size")
    return tuple(values)


Key = tuple[str, tuple[int, ...] | None]
Place = tuple[str, int, int]  # (name of a file, offset, length in bytes)


def _key(index: Any) -> Key:
    fields = _state(index, f"{_OF_DCP}MetadataIndex")
    offset = fields.get("offset")  # torch omits an offset of None, the default
    return fields["fqn"], None if offset is None else _size(offset)


def _value(folder: Path, name: str, entry: Any, places: Mapping[Key, Place], budget: Iterator[int]) -> Any:
    """Read the value of an entry: a tensor, or plain data."""
    if isinstance(entry, Call) and entry.target == f"{_OF_DCP}BytesStorageMetadata":
        file, offset, length = places[name, None]
        with _archive(folder / file, offset, length) as (_, archive):
            return plain(inert(_pickle(archive), name), name, budget)
    fields = _state(entry, f"{_OF_DCP}TensorStorageMetadata")
    dtype, *_ = _state(fields["properties"], f"{_OF_DCP}TensorProperties")
    if not isinstance(dtype, Name) or dtype.name not in _DTYPES:
        raise ValueError(f"`{name}` has the data type {dtype}, which is not supported")
    chunks = []
    if len(fields["chunks"]) > _CHUNKS:
        raise ValueError(f"`{name}` has {len(fields['chunks']):,} chunks")
    for record in fields["chunks"]:
        chunk = _state(record, f"{_OF_DCP}ChunkStorageMetadata")
        box = Box(_size(chunk["offsets"]), _size(chunk["sizes"]))
        chunks.append((box, lambda part, box=box: _chunk(folder, places[name, box.offset], box, _DTYPES[dtype.name])))
    pieces = tuple((box, lambda part, box=box, load=load: load(part)[part.inside(box)]) for box, load in chunks)
    return Stored(name, _DTYPES[dtype.name], _size(fields["size"]), pieces).read()


def _chunk(folder: Path, place: Place, box: Box, dtype: torch.dtype) -> Tensor:
    """Memory-map a tensor that torch.save wrote."""
    file, offset, length = place
    with _archive(folder / file, offset, length) as (window, archive):
        rebuilt = inert(_pickle(archive), file)
        if not isinstance(rebuilt, Call) or not rebuilt.target.startswith("torch._utils._rebuild_tensor_v"):
            raise ValueError(f"an object that is not a tensor is in the place of a tensor of shape {list(box.shape)}")
        storage, first, shape, strides = rebuilt.arguments[:4]
        if _numbers(shape) != box.shape or not isinstance(storage, Outside) or not storage.key[2].isdecimal():
            raise ValueError(f"a tensor has shape {shape} instead of {list(box.shape)}")
        (info,) = (member for member in archive.infolist() if member.filename.endswith(f"/data/{storage.key[2]}"))
        start = offset + window.content(info)
    data = _bytes(folder / file, start, info)
    numbers = (data.clone() if data.data_ptr() % dtype.itemsize else data).view(dtype)
    (first,) = _numbers([first])
    last = first + sum((extent - 1) * stride for extent, stride in zip(shape, _numbers(strides), strict=True))
    if prod(shape) and not (
        last < len(numbers) and prod(shape) <= len(numbers)
    ):  # strides of 0 would make a large tensor from few bytes
        raise ValueError("a tensor that is larger than its bytes")
    return numbers.as_strided(shape, strides, first) if prod(shape) else torch.empty(shape, dtype=dtype)


def _bytes(path: Path, start: int, info: zipfile.ZipInfo) -> Tensor:
    if not info.file_size:
        return torch.empty(0, dtype=torch.uint8)
    if info.compress_type != zipfile.ZIP_STORED or start + info.file_size > path.stat().st_size:
        raise ValueError(f"`{path}` is compressed or truncated")
    with open_regular(path) as file:
        data = np.memmap(file, np.uint8, mode="c", offset=start, shape=(info.file_size,))
    if crc32(data.data) != info.CRC:
        raise ValueError(f"`{path}` is damaged: a checksum does not match")
    return torch.from_numpy(data)


@contextmanager
def _archive(path: Path, offset: int, length: int) -> Iterator[tuple[_Window, zipfile.ZipFile]]:
    """Open the archive that torch.save wrote to a range of a file's bytes."""
    with _Window(path, offset, length, _CONTENTS) as window, zipfile.ZipFile(window) as archive:
        window.most = _SHORT
        yield window, archive


def _pickle(archive: zipfile.ZipFile) -> bytes:
    """Read the pickle in an archive of torch.save; raises ValueError if the archive's numbers are big-endian."""
    members = {PurePath(info.filename).name: info for info in archive.infolist()}
    if "byteorder" in members and _stored(archive, members["byteorder"]) != b"little":
        raise ValueError("its numbers are big-endian")
    return _stored(archive, members["data.pkl"])


def _stored(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read a short, uncompressed file in an archive.

    Compressed files are refused, because torch writes none, and their real size is only known after decompression.
    """
    if info.compress_type != zipfile.ZIP_STORED or max(info.file_size, info.compress_size) > _SHORT:
        raise ValueError(f"`{info.filename[:80]}` is compressed, or longer than {figures.size(_SHORT)}")
    return archive.read(info)


class _Window(io.RawIOBase):
    """A range of a file's bytes that can be read like a whole file."""

    def __init__(self, path: Path, offset: int, length: int, most: int) -> None:
        self.most = most
        """Maximum number of bytes of one read; a longer read raises ValueError."""
        self._file, self._offset, self._length, self._at = open_regular(path), offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        if size > self.most:
            raise ValueError(f"{figures.size(size)} that are no tensor's")
        self._file.seek(self._offset + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data

    def content(self, info: zipfile.ZipInfo) -> int:
        """Return the offset in the window at which the content of an archived file begins, directly after the file's
        header."""
        self.seek(info.header_offset + 26)
        lengths = self.read(4) or b""
        return info.header_offset + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))

    def close(self) -> None:
        self._file.close()
        super().close()


def _put(states: dict[str, Any], path: Sequence[Any], value: Any, budget: Iterator[int]) -> None:
    """Put a value at its path in the nested states, which undoes flattening.

    Args:
        path: keys of mappings, and integers for indices of lists.
        budget: see `spend`; one item is taken for each item added to a list.
    """
    if not 0 < len(path) <= DEPTH:
        raise ValueError(f"a value is nested {len(path)} deep")
    into: Any = states
    for at, following in zip(path, [*path[1:], None], strict=True):
        fresh: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(into, list):
            (at,) = _numbers([at])
            while len(into) <= at:
                spend(budget)
                into.append(None)
            into[at] = fresh if into[at] is None else into[at]
        elif not isinstance(into, dict):
            raise ValueError(f"the path {path} leads into a value that is not a mapping or list")
        else:
            into.setdefault(at, fresh)
        into = into[at]


def renamed(states: Mapping[str, Any], model: str, optimizer: str) -> dict[str, Any]:
    """Rename the states of another program to the names that a job uses.

    Args:
        model: name of the model in `states`; empty if `states` itself is the model's state dict.
        optimizer: name of the optimizer in `states`; `states` may lack an optimizer.

    Raises:
        CheckpointError: `states` has no such model.
    """
    if not model:
        return {"model": dict(states)}
    if not isinstance(states.get(model), dict):
        raise CheckpointError(
            f"the checkpoint has no `{model}`", hint=f"it has: {', '.join(map(str, states))}; use --model"
        )
    rest = {name: state for name, state in states.items() if name not in (model, optimizer, "model", "optimizer")}
    job = {"model": states[model], **{name: state for name, state in rest.items() if name == "progress"}}
    if isinstance(states.get(optimizer), dict):
        state = {"state": {}, **states[optimizer]}
        groups = state.get("param_groups")
        dicts = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
        if any(type(key) is int for group in dicts for key in group.get("params", ())):
            # Flattening has turned the parameter numbers, which are the keys of the optimizer's state, into strings.
            state["state"] = {int(key): value for key, value in state["state"].items()}
        job["optimizer"] = state
    return job


def with_step(states: Mapping[str, Any], step: int | None) -> tuple[dict[str, Any], int]:
    """Add the state `progress`; returns all states, and the number of completed steps.

    The number of steps is `step` if it is not None, else the number in the imported progress, else 0.
    """
    saved = states.get("progress", {})
    known = saved.get("step") if isinstance(saved, dict) else None
    done = step if step is not None else known if type(known) is int else 0
    progress = {"total": 0, "tokens": 0, "count": 0.0, **(saved if isinstance(saved, dict) else {}), "step": done}
    return {**states, "progress": progress}, done
