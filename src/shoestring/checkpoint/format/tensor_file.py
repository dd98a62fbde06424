"""The format of safetensors: names of data types, and the header of a file of whole tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shoestring.core.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""Maps the names of data types in safetensors to torch's data types."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"


class Sized(Protocol):
    """A tensor, or a description of a tensor that is not in memory."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


def in_order(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors in the order in which a file stores them: tensors with larger elements come first, so that all
    tensors are aligned.

    Raises:
        CheckpointError: safetensors does not support a data type or a name.
    """
    for name, tensor in tensors.items():
        if name == _METADATA:
            raise CheckpointError(f"cannot write `{name}`: safetensors reserves this name")
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"cannot write `{name}`: safetensors does not support {tensor.dtype}")
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def header_of(tensors: Mapping[str, Sized], metadata: Mapping[str, str]) -> bytes:
    """Build the beginning of a file that stores these tensors one after the other: the header, preceded by its
    length."""
    header: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for name, tensor in tensors.items():
        span = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    if not tensor.numel():  # tensors without elements may have strides that no view allows
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data
