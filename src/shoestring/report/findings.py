"""Writes and reads the tables and pictures of evaluations in a run folder; a resumed run removes those of later steps.

`evaluations.jsonl` has one row per table or picture; a picture is a PNG file in `pictures/` named by step and name.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Table
from shoestring.report.sinks import JsonLines
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

FILE, FOLDER = "evaluations.jsonl", "pictures"
MOST_ITEMS = 32
"""Maximum number of tables and pictures from one evaluation; any more are left out."""
MOST_ROWS = 1000
"""Maximum number of rows in a table; any more are left out, and the table's note reports this."""
MOST_PIXELS = 2048
"""Maximum height and width of a picture; a larger picture is reduced to every second, third … row and column."""
MOST_FILES = 1000
"""Maximum number of pictures in a run folder; the oldest are deleted."""
MOST_BYTES = 16 << 20
"""Maximum total size of the pictures in a page, in bytes; pictures beyond it are reported as not shown."""
_LONGEST = 8 << 20
"""Maximum length of a row of the file in bytes."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NAME = re.compile(r"\d{8}-[\w.-]{1,80}\.png", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture that an evaluation returns.

    `pixels` is an array, a tensor or a Pillow image of shape (H, W), (H, W, 1), (H, W, 3), (1, H, W) or (3, H, W). It
    holds integers from 0 to 255 or real numbers from 0 to 1. Values outside of the range are clipped; NaN becomes 0.
    """

    pixels: Any
    caption: str = ""

    def bytes_of_pixels(self) -> np.ndarray:
        """The pixels as uint8 (H, W) or (H, W, 3), at most `MOST_PIXELS` on a side.

        Raises:
            ConfigError: the pixels have another shape or type.
        """
        pixels = self.pixels
        if hasattr(pixels, "detach"):  # a tensor; numpy lacks some of torch's 16-bit types
            pixels = pixels.detach().cpu()
            pixels = pixels.float() if pixels.is_floating_point() else pixels
        array = np.asarray(pixels)
        if array.ndim == 3 and array.shape[0] in (1, 3):
            array = np.moveaxis(array, 0, 2)
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[:, :, 0]
        right = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
        if not right or not array.size or array.dtype.kind not in "buif":
            raise ConfigError(
                f"a picture has the shape {tuple(np.shape(self.pixels))} and the type {array.dtype}",
                hint="give bytes or real numbers from 0 to 1 of the shape (H, W), (H, W, 3) or (3, H, W)",
            )
        step = -(-max(array.shape[:2]) // MOST_PIXELS)
        array = array[::step, ::step]
        if array.dtype.kind == "f":
            array = np.nan_to_num(array, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1) * 255
        elif array.dtype.kind == "b":
            array = array * 255
        return np.ascontiguousarray(array.clip(0, 255).round().astype(np.uint8))


Finding = Table | Picture


def png(pixels: np.ndarray) -> bytes:
    """A PNG file (ISO/IEC 15948) of uint8 pixels, (H, W) or (H, W, 3)."""
    height, width = pixels.shape[:2]
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)  # each row begins with its filter type, 0 for no filter
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return _SIGNATURE + b"".join(chunks)


class Findings:
    """A sink that writes tables and pictures to a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._rows = folder, None if not (folder / FILE).exists() else JsonLines(folder / FILE)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing: metrics have a sink of their own."""

    def show(self, step: int, findings: Mapping[str, Finding]) -> None:
        """Write the tables and pictures of an evaluation after `step`; pictures come before the rows that name them."""
        self._rows = self._rows or JsonLines(self.folder / FILE)
        rows = [{"step": step, "name": name} | self._stored(step, name, item) for name, item in findings.items()]
        for row in rows:
            self._rows.append(row)
        files = sorted((self.folder / FOLDER).glob("*.png"))
        for path in files[: max(len(files) - MOST_FILES, 0)]:
            path.unlink(missing_ok=True)

    def _stored(self, step: int, name: str, item: Finding) -> dict[str, Any]:
        if isinstance(item, Table):
            rows = [[_cell(cell) for cell in row] for row in item.rows[:MOST_ROWS]]
            left_out = f"The first {MOST_ROWS:,} of {len(item.rows):,} rows." if len(item.rows) > MOST_ROWS else ""
            note = " ".join(filter(None, (item.note, left_out)))
            return {"title": item.title, "head": [str(cell) for cell in item.head], "rows": rows, "note": note}
        (self.folder / FOLDER).mkdir(exist_ok=True)
        plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:60]
        if plain != name:  # part of the name's hash keeps different names different
            plain += f"-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}"
        file = f"{step:08d}-{plain}.png"
        write_atomic(self.folder / FOLDER / file, png(item.bytes_of_pixels()))
        return {"picture": file, "caption": item.caption}

    def truncate_after(self, step: int) -> None:
        """Remove the rows and pictures of evaluations at later steps than `step`."""
        if self._rows is not None:
            self._rows.truncate_after(step)
        for path in (self.folder / FOLDER).glob("*.png"):
            if _NAME.fullmatch(path.name) and int(path.name[:8]) > step:
                path.unlink()

    def close(self) -> None:
        """Close the file."""
        if self._rows is not None:
            self._rows.close()


def _cell(cell: object) -> str | float:
    """Convert a cell to a number or text; numbers of torch and numpy become Python floats."""
    if isinstance(cell, str):
        return cell
    try:
        return float(cell)  # pyrefly: ignore[bad-argument-type]
    except (TypeError, ValueError):
        return str(cell)


def read(folder: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the newest table or picture of each name from a run folder, which may be untrusted; the row of a
    picture gets the entry `source`, a data URL, which is empty if the page would become too large.

    Args:
        problems: list to which a line is added for each row or file that cannot be read.
    """
    newest: dict[str, dict[str, Any]] = {}
    path, skipped = folder / FILE, 0
    try:
        foreign.check_within(path, folder)
        for line in foreign.read_lines(path, _LONGEST):
            row = _row(line)
            if row is None:
                skipped += 1
            else:
                newest[row["name"]] = row
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        problems.append(f"{FILE} could not be read to its end: {error}")
    if skipped:
        problems.append(f"{FILE}: {skipped} unreadable line{'s' * (skipped > 1)} left out")
    room = MOST_BYTES
    for row in list(newest.values())[-4 * MOST_ITEMS :]:
        if "picture" in row:
            source = _source(folder, str(row["picture"]), room, problems)
            room -= len(source)
            row["source"] = source
        yield row


def _row(line: bytes) -> dict[str, Any] | None:
    """Parse a line to a row; None if the line is not a valid row."""
    try:
        row = foreign.parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("name"), str) and type(row.get("step")) is int
    return row if whole else None


def _source(folder: Path, file: str, room: int, problems: list[str]) -> str:
    """The data URL of a picture; empty if the file is not a PNG in this run's folder or is larger than `room`."""
    if not _NAME.fullmatch(file):
        problems.append(f"{FILE} names a file that is no picture of this run")
        return ""
    try:
        data = foreign.read_bytes(folder / FOLDER / file, max(room * 3 // 4, 0), within=folder)
    except OSError as error:
        problems.append(f"{FOLDER}/{file} is not shown: {error.strerror or error}")
        return ""
    if not data.startswith(_SIGNATURE):
        problems.append(f"{FOLDER}/{file} is no PNG file")
        return ""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
