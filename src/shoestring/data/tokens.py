"""Token files: the format, its writer, and the data set of samples.

A token file is one block of `HEADER_BYTES` bytes (magic bytes, then JSON padded with spaces) followed by the token ids,
little-endian uint16 or uint32. Every document is preceded by one end-of-text token, so that each byte of the text is
part of a target and bits per byte of a held-out file are exact.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import IGNORED
from shoestring.storage import foreign
from shoestring.storage.whole import open_aside, put_in_place

MAGIC = b"SSTOKENS"
VERSION = 1
HEADER_BYTES = 1024
_AGAIN = "delete it and prepare the corpus again"


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a token file."""

    tokens: int
    bytes: int
    """Length in bytes (UTF-8) of the text that the tokens encode, without the end-of-text tokens."""
    documents: int
    vocab_size: int
    fingerprint: str
    """SHA-256 of the payload as little-endian uint32, so equal tokens give equal fingerprints in either dtype."""
    tokenizer: str
    """Hash of the tokenizer with which the file was written."""
    recipe: str = ""
    """Hash of the source files and settings that the file depends on; a file is reused only if this hash is
    unchanged."""
    skipped: int = 0
    duplicates: int = 0
    dtype: str = "uint16"
    version: int = VERSION


class TokenWriter:
    """Writes a token file incrementally, under a temporary name until it is complete.

    Leaving the `with` block without `finish` removes the temporary file, also after an exception. If the process is
    killed, the next writer of this file removes it.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.tokens = self.bytes = self.documents = 0
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._hash = hashlib.sha256()
        self._file = open_aside(path)
        self._file.write(b" " * HEADER_BYTES)

    def append(self, tokens: np.ndarray, *, size: int, documents: int = 1) -> None:
        """Add `tokens`, integers of shape (n,), which encode `size` bytes of text in `documents` documents."""
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._hash.update(tokens.astype("<u4").tobytes())
        self.tokens += len(tokens)
        self.bytes += size
        self.documents += documents

    def finish(self, *, tokenizer: str, recipe: str, skipped: int = 0, duplicates: int = 0) -> Header:
        """Write the header, sync to disk and rename the file to its final name."""
        header = Header(
            tokens=self.tokens,
            bytes=self.bytes,
            documents=self.documents,
            vocab_size=self.vocab_size,
            fingerprint=self._hash.hexdigest(),
            tokenizer=tokenizer,
            recipe=recipe,
            skipped=skipped,
            duplicates=duplicates,
            dtype=self._dtype.name,
        )
        self._file.seek(0)
        self._file.write((MAGIC + json.dumps(asdict(header)).encode()).ljust(HEADER_BYTES))
        put_in_place(self._file, self.path)
        self._file.close()
        return header

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):  # closing the file tries again to write the buffered data
            self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


def read_header(path: Path) -> Header:
    """The header of the token file at `path`, checked against the file's size.

    Raises:
        DataError: the file is missing, not a token file, of another version, or truncated.
    """
    try:
        with foreign.open_file(path) as file:
            block = file.read(HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}", hint="check the path") from error
    if not block.startswith(MAGIC):
        raise DataError(f"{path} is not a token file", hint="a .tokens file is one that `prepare` wrote")
    try:
        table: dict[str, Any] = foreign.parse_json(block[len(MAGIC) :])
        version = table["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: its header cannot be read", hint=_AGAIN) from error
    if version != VERSION:
        raise DataError(f"{path} has version {version} of the token format, not {VERSION}", hint=_AGAIN)
    counts = ("tokens", "bytes", "documents", "vocab_size", "skipped", "duplicates")
    is_consistent = (
        set(table) == {field.name for field in fields(Header)}
        and all(type(table[name]) is int and table[name] >= 0 for name in counts)
        and all(isinstance(table[name], str) for name in ("fingerprint", "tokenizer", "recipe"))
        and table["dtype"] in ("uint16", "uint32")
    )
    if not is_consistent:
        raise DataError(f"{path} is damaged: its header is inconsistent", hint=_AGAIN)
    header = Header(**table)
    expected = HEADER_BYTES + header.tokens * np.dtype(header.dtype).itemsize
    if size != expected:
        raise DataError(f"{path} is damaged: {size} bytes long instead of {expected}", hint=_AGAIN)
    return header


def _map(path: Path, header: Header) -> np.ndarray:
    dtype = np.dtype(header.dtype).newbyteorder("<")
    if header.tokens == 0:
        return np.empty(0, dtype)
    with foreign.open_file(path) as file:
        shape = (header.tokens,)  # `read_header` has checked that the file is large enough
        return np.memmap(file, dtype, mode="r", offset=HEADER_BYTES, shape=shape)  # own file: checked above


def verify(path: Path) -> Header:
    """Check the content hash of a whole file and the range of its ids; returns the header.

    Raises:
        DataError: the file's tokens are not those that were written.
    """
    header = read_header(path)
    payload, digest, largest = _map(path, header), hashlib.sha256(), -1
    for start in range(0, len(payload), 1 << 22):
        piece = payload[start : start + (1 << 22)]
        digest.update(piece.astype("<u4").tobytes())
        largest = max(largest, int(piece.max()))
    if digest.hexdigest() != header.fingerprint or largest >= header.vocab_size:
        raise DataError(f"{path} is damaged: its tokens are not the ones that were written", hint=_AGAIN)
    return header


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Map-style data set of the samples of a token file, or of its tokens from `start` to `stop`.

    Sample i covers the tokens from i·T to i·T + T, so consecutive samples share one token and every token except the
    first is a target once. An incomplete last sample is dropped or, with `pad_last`, padded: inputs with 0, targets
    with `IGNORED`. The file is memory-mapped; pickling the data set stores the file's path but not its tokens.

    Args:
        path: a token file.
        sequence: T, the number of targets in a sample.
        pad_last: whether an incomplete last sample is padded instead of dropped; for evaluation, in which every target
            is used.
        start: index of the first token.
        stop: index after the last token; None for the end of the file.
        size: bytes of text in this range; None if the range is the whole file.
        documents: number of documents in this range; None if the range is the whole file.

    Raises:
        DataError: the file is unusable, or too short for one sample.
    """

    draws = False
    """See `Loader`."""

    def __init__(
        self,
        path: Path,
        sequence: int,
        *,
        pad_last: bool = False,
        start: int = 0,
        stop: int | None = None,
        size: int | None = None,
        documents: int | None = None,
    ) -> None:
        if sequence < 1:
            raise ConfigError(f"a sample cannot have {sequence} tokens", hint="data.sequence must be at least 1")
        self.path, self.sequence, self.pad_last = path, sequence, pad_last
        self.header = read_header(path)
        self.start, self.stop = start, self.header.tokens if stop is None else stop
        self.tokens = self.stop - self.start
        self.bytes = self.header.bytes if size is None else size
        self.documents = self.header.documents if documents is None else documents
        self._payload: np.ndarray | None = None
        if self.tokens <= sequence:
            raise DataError(
                f"{path} holds {self.tokens} tokens, fewer than one sample of {sequence} tokens and the token after it",
                hint="use more text or a smaller data.sequence",
            )

    @property
    def fingerprint(self) -> str:
        """Identifies the samples: two data sets have equal fingerprints if and only if their samples are equal."""
        layout = f"{self.start}-{self.stop}/{self.sequence}{'+' if self.pad_last else ''}"
        return f"{self.header.fingerprint}:{layout}"

    @property
    def content(self) -> str:
        """Identifies the tokens; does not depend on how they are cut into samples."""
        return f"{self.header.fingerprint}:{self.start}-{self.stop}"

    @property
    def targets(self) -> int:
        """Number of targets in all samples, over which the mean loss is taken."""
        return self.tokens - 1 if self.pad_last else len(self) * self.sequence

    @property
    def targets_per_byte(self) -> float:
        """Number of targets per byte of text; 0 if the number of bytes is unknown."""
        return self.targets / self.bytes if self.bytes else 0.0

    @property
    def skipped(self) -> int:
        """Number of files left out of the corpus because they are not UTF-8."""
        return self.header.skipped

    @property
    def duplicates(self) -> int:
        """Number of documents left out of the corpus because an earlier document has the same text."""
        return self.header.duplicates

    @property
    def notes(self) -> Iterable[str]:
        """Sentences for the user about how records became samples; empty for a token file."""
        return ()

    @property
    def ids(self) -> np.ndarray:
        """All tokens of the range, (tokens,), memory-mapped read-only."""
        if self._payload is None:
            self._payload = _map(self.path, self.header)
        return self._payload[self.start : self.stop]

    def __len__(self) -> int:
        targets = self.tokens - 1
        return -(-targets // self.sequence) if self.pad_last else targets // self.sequence

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The samples as {"inputs": (T,), "targets": (T,)}, int64; all are views of one gathered array (len(indices), T
        + 1)."""
        where = np.asarray(indices, np.int64)[:, None] * self.sequence + np.arange(self.sequence + 1)
        beyond = where >= self.tokens
        rows = self.ids[np.minimum(where, self.tokens - 1)].astype(np.int64)
        targets = rows[:, 1:]
        if beyond.any():
            targets = np.where(beyond[:, 1:], IGNORED, targets)
            rows[beyond] = 0
        pairs: Iterable[tuple[Tensor, Tensor]] = zip(
            torch.from_numpy(rows[:, :-1]).unbind(), torch.from_numpy(targets).unbind(), strict=True
        )
        return [{"inputs": inputs, "targets": wanted} for inputs, wanted in pairs]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_payload": None}
