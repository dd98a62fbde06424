"""`shoestring predict`: runs a trained model on the user's own files, and writes a table and a page."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring import run as runs
from shoestring._torch import own_device
from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import Batch, Output
from shoestring.data.loader import stacked
from shoestring.models.loading import load_model
from shoestring.report.document import PageFrame, document, packaged, save
from shoestring.report.findings import Picture, png
from shoestring.report.folder_check import check_run_folder
from shoestring.report.markup import Markup, tag
from shoestring.report.markup import table as grid
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic
from shoestring.training.data_loading import to_device
from shoestring.training.user_code import UserCode, import_user_code
from shoestring.verbs.settings import FilePrediction

Row = dict[str, Any]
"""The key `file`, and the numbers, texts and pictures that the model predicts for the file; or the key `error`."""
FORMATS = (".csv", ".jsonl")
_SHOWN = 500
"""Maximum number of rows on the page."""
_BYTES = 16 << 20
"""Maximum total size of the pictures on the page, in bytes."""
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""First bytes of picture files that browsers can show -> type of the file."""
_SMALL = 256 << 10
"""Maximum size, in bytes, of a picture file that the page includes unchanged."""


def predict(run: str, folder: Path, settings: FilePrediction | None = None) -> list[Row]:
    """Run the model of a run on all files in a folder and its subfolders, on the GPU if there is one.

    The model does not get files that `run.read_file` cannot read; the rows of these files hold the error.

    Args:
        run: a run folder.

    Returns:
        A row for each file, or several if `run.predict` returns several, in the order of the files' names.

    Raises:
        ConfigError: `run.read_file` is not set, the user's functions do not fit each other, or there are no such files.
        CheckpointError: the run has no model.
        DataError: no file can be read.
        TrustError: the run folder names code that the user has not declared as trusted.
    """
    settings = settings or FilePrediction()
    check_run_folder(Path(run), ("run.toml",))
    loaded = runs.load(run, trusted=False)
    if not loaded.settings.read_file:
        hint = "name a function that makes a sample from a path; for text: shoestring generate, shoestring chat"
        raise ConfigError("`run.read_file` is not set, so files cannot be turned into samples", hint=hint)
    code = import_user_code(loaded, skip=("run.loss", "run.evaluate", "run.sinks"))
    model, _ = load_model(Path(run) / "best" if settings.best else run)
    device = own_device(0)
    predictor = _Predictor(code, model.to(device), device, loaded.settings.predict or "the default of `run.predict`")
    files, rows = _files(folder, settings.pattern), list[Row]()
    for start in range(0, len(files), settings.batch):
        rows += predictor.rows({str(path.relative_to(folder)): path for path in files[start : start + settings.batch]})
    if all("error" in row for row in rows):
        raise DataError(f"none of {len(files):,} files can be read; {rows[0]['file']}: {rows[0]['error']}")
    return rows


def _files(folder: Path, pattern: str) -> list[Path]:
    """Regular files below a folder that match a pattern, without hidden files, sorted by name."""
    if not folder.is_dir():
        raise ConfigError(f"`{folder}` is no folder", hint="name a folder with the files")
    below = (
        path for path in folder.rglob(pattern) if not any(part[0] == "." for part in path.parts[len(folder.parts) :])
    )
    files = sorted(path for path in below if path.is_file())
    if not files:
        raise ConfigError(f"`{folder}` holds no files that match `{pattern}`", hint="give another --pattern")
    return files


@dataclass(frozen=True)
class _Predictor:
    code: UserCode
    model: nn.Module
    device: torch.device
    name: str
    """Name, for error messages, of the function that makes the rows."""

    def rows(self, files: Mapping[str, Path]) -> Iterator[Row]:
        """Yield the rows of `files`, which maps names to paths."""
        samples: dict[str, Any] = {}
        errors: dict[str, str] = {}
        assert self.code.read_file is not None
        for name, path in files.items():
            try:
                samples[name] = self.code.read_file(path)
            except Exception as error:  # reading a broken file may raise any error of any library
                errors[name] = foreign.one_line(_message(error))
        described = dict(zip(samples, self._of_samples(list(samples.values())), strict=True))
        for name in files:
            for row in described.get(name, [{"error": errors.get(name, "")}]):
                yield {"file": foreign.one_line(name), **row}

    def _of_samples(self, samples: Sequence[Any]) -> list[list[Row]]:
        """The rows of each sample. All samples run in one batch, or in batches of one if they cannot be joined."""
        if not samples:
            return []
        try:
            batch = (self.code.collate or stacked)(list(samples))
        except DataError:
            if len(samples) == 1:
                raise
            return [rows for sample in samples for rows in self._of_samples([sample])]
        batch = to_device(batch, self.device)
        with torch.no_grad():
            made = (self.code.predict or classes)(self.code.forward(self.model, batch), batch)
        rows = [item if isinstance(item, list | tuple) else [item] for item in made]
        if len(rows) != len(samples) or not all(isinstance(row, Mapping) for part in rows for row in part):
            raise ConfigError(
                f"{self.name} returned {len(rows)} entries for {len(samples)} samples, or entries that are not dicts",
                hint="return a list with a dict, or a list of dicts, for each sample",
            )
        return [[{str(key): _plain(value) for key, value in row.items()} for row in part] for part in rows]


def classes(output: Output, batch: Batch) -> list[Row]:
    """The most likely class of each sample and its probability, from logits of shape (samples, classes).

    Raises:
        ConfigError: the output has a different form.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        hint = "name a function that makes rows from the model's output: run.predict = 'package.module:callable'"
        raise ConfigError(f"the model returned a {type(output).__name__}, not logits of classes", hint=hint)
    best = logits.float().softmax(-1).max(-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"class": index, "probability": probability} for index, probability in pairs]


def _plain(value: Any) -> Any:
    """Convert a value to a number, a text or a picture."""
    if isinstance(value, str | bool | int | float | Picture):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _message(error: Exception) -> str:
    return error.args[0] if isinstance(error, DataError | ConfigError) else f"{type(error).__name__}: {error}"[:300]


# -- files and the page -----------------------------------------------------------------------------------------------


def save_table(rows: Sequence[Row], path: Path) -> None:
    """Write rows as CSV or JSON Lines, depending on the suffix of `path`; pictures are left out.

    Raises:
        ConfigError: the suffix is neither of these, or the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"`{path}` is neither .csv nor .jsonl", hint="choose another --out")
    plain = [{key: value for key, value in row.items() if not isinstance(value, Picture)} for row in rows]
    text = io.StringIO(newline="")
    if path.suffix == ".csv":
        writer = csv.DictWriter(text, _columns(plain))
        writer.writeheader()
        writer.writerows(plain)
    else:
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in plain)
    try:
        write_atomic(path, text.getvalue().encode(errors="replace"))
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error.strerror}", hint="choose another --out") from error


def save_pictures(rows: Sequence[Row], folder: Path) -> list[Row]:
    """Write the pictures in rows as PNG files, numbered by row; return the rows with file names in their place.

    Raises:
        ConfigError: a file cannot be written.
    """
    named = []
    for number, row in enumerate(rows):
        pictures = {key: value for key, value in row.items() if isinstance(value, Picture)}
        names = {key: f"{number:06}-{place}.png" for place, key in enumerate(pictures)}
        named.append(row | names)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for key, picture in pictures.items():
                write_atomic(folder / names[key], png(picture.bytes_of_pixels()))
        except OSError as error:
            raise ConfigError(
                f"cannot write to `{folder}`: {error.strerror}", hint="choose another folder with --pictures"
            ) from error
    return named


def _columns(rows: Sequence[Row]) -> list[str]:
    """The keys of all rows in order of first appearance, with `error` last."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [*(key for key in columns if key != "error"), *(["error"] if "error" in columns else [])]


def save_page(rows: Sequence[Row], title: str, folder: Path, path: Path) -> None:
    """Write the first rows as a page, with the pictures that `run.predict` returned and small picture files."""
    shown, room = rows[:_SHOWN], _BYTES
    columns = _columns(shown)
    lines = []
    for row in shown:
        cells = []
        for column in columns:
            value, kind, content = row.get(column, ""), "", b""
            if isinstance(value, Picture):
                kind, content = "png", png(value.bytes_of_pixels())
            elif column == "file":
                with suppress(OSError):  # also if the file is larger than `_SMALL`
                    content = foreign.read_bytes(folder / str(value), _SMALL)
                kind = next((kind for start, kind in _SIGNATURES.items() if content.startswith(start)), "")
            source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}" if kind else ""
            source = source if len(source) <= room else ""
            room -= len(source)
            picture = tag("img", src=source, alt="") if source else Markup()
            words = f"{value:.4g}" if isinstance(value, float) else "" if isinstance(value, Picture) else str(value)
            cells.append(tag("span", picture, words) if source else words)
        lines.append(cells)
    failed = sum("error" in row for row in rows)
    left_out = f" {failed:,} could not be read." if failed else ""
    first = f" The first {_SHOWN:,} are shown." if len(rows) > _SHOWN else ""
    head = tag(
        "div", tag("h1", title), tag("p", f"{len(rows):,} rows.{left_out}{first}", class_="quiet"), class_="title"
    )
    body = tag("section", grid("A row for each file", columns, lines), class_="predictions")
    save(path, document(title, head, body, {}, PageFrame(packaged("shoestring.report", "page.css"), "")))
