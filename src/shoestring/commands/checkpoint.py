"""The actions of `shoestring checkpoint`. As in `cli`, importing this module imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from shoestring.core.errors import ConfigError


@dataclass(frozen=True)
class Ls:
    """List the checkpoints of a run, on disk and in this host's shared memory."""

    run: Positional[Path]
    """Path of a run folder, of its folder of checkpoints, or of one checkpoint."""
    json: bool = False
    """Print JSON in place of a table."""

    def __call__(self) -> int:
        from shoestring.commands.archive import Archive

        _print([checkpoint.row() for checkpoint in Archive.of(self.run).some()], self.json)
        return 0


@dataclass(frozen=True)
class Verify:
    """Read every checkpoint and say what is damaged; the exit code is 1 if anything is."""

    run: Positional[Path]
    """Path of a run folder, of its folder of checkpoints, or of one checkpoint."""
    step: Positional[int | None] = None
    """Step of the one checkpoint to verify; defaults to all."""
    json: bool = False
    """Print JSON in place of a table."""

    def __call__(self) -> int:
        from shoestring.commands.archive import Archive, verified

        rows = verified(Archive.of(self.run), self.step)
        _print(rows, self.json)
        return 1 if any(row["damage"] for row in rows) else 0


@dataclass(frozen=True)
class Show:
    """Show the content of a checkpoint: its states, and its tensors with types, shapes and shards."""

    run: Positional[Path]
    """Path of a run folder, of its folder of checkpoints, or of one checkpoint."""
    step: Positional[int | None] = None
    """Step of the checkpoint; defaults to the newest one on disk."""
    json: bool = False
    """Print JSON in place of a table."""

    def __call__(self) -> int:
        from shoestring.commands.archive import Archive, shown

        found = shown(Archive.of(self.run).pick(self.step))
        print(json.dumps(found, indent=2) if self.json else "\n".join(_described(found)))
        return 0


@dataclass(frozen=True)
class Export:
    """Convert a checkpoint for other programs."""

    run: Positional[Path]
    """Path of a run folder, of its folder of checkpoints, or of one checkpoint."""
    to: Path
    """Path of a new folder for the result."""
    step: Positional[int | None] = None
    """Step of the checkpoint; defaults to the newest one on disk."""
    way: Annotated[Literal["safetensors", "dcp", "hf"], arg(name="as")] = "safetensors"
    """Format to write: weights under their own names (safetensors), all states for torch.distributed.checkpoint (dcp),
    or a Hugging Face model (hf)."""

    def __call__(self) -> int:
        from shoestring.commands.archive import Archive
        from shoestring.commands.interchange import export

        archive = Archive.of(self.run)
        for path in export(archive, archive.pick(self.step), self.to, self.way):
            print(path)
        return 0


@dataclass(frozen=True)
class Import:
    """Convert what another program wrote to a checkpoint, from which a run resumes on any number of ranks."""

    folder: Positional[Path]
    """Folder or file that torch.distributed.checkpoint, safetensors or Hugging Face wrote."""
    to: Path
    """Path of a run folder without checkpoints; it may be new."""
    way: Annotated[Literal["safetensors", "dcp"], arg(name="as")] = "safetensors"
    """Format of `folder`; a Hugging Face model counts as safetensors."""
    step: int | None = None
    """Number of steps that count as done; defaults to the number in `folder`, or to 0."""
    model: str = "model"
    """Name of the model's state in a dcp checkpoint; empty if it holds the state of a model and nothing else."""
    optimizer: str = "optimizer"
    """Name of the optimizer's state in a dcp checkpoint."""

    def __call__(self) -> int:
        from shoestring.commands.archive import Archive
        from shoestring.commands.interchange import take_in

        if self.step is not None and self.step < 0:
            raise ConfigError(f"--step must not be negative, got {self.step}")
        print(take_in(Archive.of(self.to), self.folder, self.way, self.step, self.model, self.optimizer))
        return 0


@dataclass(frozen=True)
class Prune:
    """Delete older checkpoints, and those that the run went back from, once those that are kept have been verified."""

    run: Positional[Path]
    """Path of a run folder, or of its folder of checkpoints."""
    keep: int
    """Number of the newest checkpoints on disk to keep."""
    memory: bool = False
    """Delete what a run that has died left in this host's shared memory as well."""
    json: bool = False
    """Print JSON in place of a table."""

    def __call__(self) -> int:
        from shoestring.commands.archive import Archive
        from shoestring.commands.pruning import prune

        gone = [str(path) for path in prune(Archive.of(self.run), self.keep, self.memory)]
        print(json.dumps(gone, indent=2) if self.json else "\n".join(f"deleted {path}" for path in gone))
        return 0


@dataclass(frozen=True)
class Checkpoint:
    """List, verify, show, export, import and delete the checkpoints of a run."""

    action: (
        Annotated[Ls, subcommand("ls", prefix_name=False)]
        | Annotated[Verify, subcommand("verify", prefix_name=False)]
        | Annotated[Show, subcommand("show", prefix_name=False)]
        | Annotated[Export, subcommand("export", prefix_name=False)]
        | Annotated[Import, subcommand("import", prefix_name=False)]
        | Annotated[Prune, subcommand("prune", prefix_name=False)]
    )
    """Action on the checkpoints of the run."""

    def __call__(self, overrides: Sequence[str]) -> int:
        return self.action()


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rows under the names of their columns, aligned; numbers to the right."""
    if not rows:
        return
    cells = [[_cell(name, value) for name, value in row.items()] for row in rows]
    columns = list(zip(list(rows[0]), *cells, strict=True))
    numeric = [all(isinstance(row[column[0]], int | float) for row in rows) for column in columns]
    for line in zip(*columns, strict=True):
        widths = [max(map(len, column)) for column in columns]
        placed = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        yield "  ".join(placed).rstrip()


def _cell(name: str, value: Any) -> str:
    if name == "bytes":
        return size(value)
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def size(nbytes: int) -> str:
    """A number of bytes with its unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"


def _print(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    print(json.dumps(rows, indent=2) if as_json else "\n".join(table(rows)))


def _described(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines that `show` prints."""
    yield from (f"{name}: {size(value) if name == 'bytes' else value}" for name, value in found["checkpoint"].items())
    yield ""
    yield from table([{**state, "values": _values(state["values"])} for state in found["states"]])
    yield ""
    yield from table(
        [
            {**tensor, "shape": " x ".join(map(str, tensor["shape"])), "pieces": _pieces(tensor["pieces"])}
            for tensor in found["tensors"]
        ]
    )


def _values(values: Mapping[str, Any]) -> str:
    listed = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return listed if len(listed) <= 70 else f"{listed[:67]}..."


def _pieces(pieces: Sequence[Any]) -> str:
    """Their number, and along which dimensions the tensor is cut."""
    if len(pieces) == 1:
        return "whole"
    cut = [str(dim) for dim, firsts in enumerate(zip(*(offset for offset, _ in pieces), strict=True)) if any(firsts)]
    return f"{len(pieces)} along {', '.join(cut) or 'nothing: copies'}"
