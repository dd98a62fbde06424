"""Data sets of labelled images in MNIST's file format, read into memory as tensors.

Images stay uint8 until they are on the device. Augmentation is part of the model (`models/images.py`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoestring.core.errors import DataError
from shoestring.storage import foreign

_TYPES = {8: np.uint8, 9: np.int8, 11: np.dtype(">i2"), 12: np.dtype(">i4"), 13: np.dtype(">f4"), 14: np.dtype(">f8")}
_LIMIT = 1 << 30
"""Maximum size of a decompressed file in bytes; the largest known one (EMNIST) has 0.55 GB."""
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package `dataset-fashion-mnist`: 60,000 training and 10,000 test images of 28 x 28 pixels in ten
classes (MIT licence)."""


class Images(Dataset[dict[str, Tensor]]):
    """Labelled images; samples have `inputs`, uint8 (C, H, W), and `targets`, a 0-d int64.

    Args:
        images: (N, C, H, W), uint8.
        labels: (N,), int64.
    """

    draws = False
    """See `Loader`."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if images.dtype is not torch.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
            shapes = f"{tuple(images.shape)} of {images.dtype} and {tuple(labels.shape)}"
            raise DataError(f"images and labels are {shapes}, not (N, C, H, W) of bytes and (N,)")
        self.images, self.labels = images, labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.images[index], "targets": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        at = torch.as_tensor(indices)
        pairs = zip(self.images[at], self.labels[at], strict=True)
        return [{"inputs": image, "targets": label} for image, label in pairs]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all images and labels."""
        digest = hashlib.blake2b(self.images.numpy().tobytes(), digest_size=16)
        digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()


def read_idx(path: Path) -> Tensor:
    """Read the array in an IDX file (MNIST's format), of any shape; the file may be gzipped.

    Raises:
        DataError: the file cannot be read, is not an IDX file, or has a length that does not match its shape.
    """
    try:
        read = foreign.read_gzip if path.suffix == ".gz" else foreign.read_bytes
        raw = read(path, _LIMIT)
    except (OSError, ValueError) as error:
        raise DataError(f"`{path}` cannot be read: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise DataError(f"`{path}` is not an IDX file, the format of MNIST")
    kind, dimensions = np.dtype(_TYPES[raw[2]]), raw[3]
    header = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", raw[4:header]) if len(raw) >= header else (0,)
    if len(raw) != header + math.prod(shape) * kind.itemsize:
        raise DataError(f"`{path}` has {len(raw)} bytes, which does not fit its shape {shape}")
    try:
        array = np.frombuffer(raw, kind, offset=header).reshape(shape)
    except ValueError as error:
        raise DataError(f"`{path}` has a shape of {dimensions} dimensions that cannot be read: {error}") from error
    return torch.from_numpy(array.astype(kind.newbyteorder("=")))


def read_mnist(folder: Path, part: str) -> Images:
    """Read the training images (`part` is `train`) or test images (`t10k`) from a folder with MNIST's four files.

    Raises:
        DataError: a file is missing or broken, or the numbers of images and labels differ.
    """
    arrays = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        paths = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
        if not paths:
            hint = "apt install dataset-fashion-mnist" if folder == FASHION_MNIST else "MNIST's files are needed"
            raise DataError(f"there is no `{folder / name}.gz`", hint=hint)
        arrays.append(read_idx(paths[0]))
    images, labels = arrays
    try:
        return Images(images[:, None], labels)
    except (DataError, IndexError) as error:
        raise DataError(f"`{folder}`: the {part} files do not fit each other: {error}") from error


def mnist(folder: Path) -> tuple[Images, Images]:
    """Training and test images of a folder with MNIST's four files.

    Raises:
        DataError: as for `read_mnist`.
    """
    return read_mnist(folder, "train"), read_mnist(folder, "t10k")


def fashion_mnist() -> tuple[Images, Images]:
    """Fashion-MNIST (Xiao et al., 2017): training and test images, for use as `run.data`."""
    return mnist(FASHION_MNIST)
