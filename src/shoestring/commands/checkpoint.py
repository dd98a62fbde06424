"""Arguments of `shoestring checkpoint`, and the printing of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from shoestring import figures
from shoestring.commands.printing import PrintsResult, say, table
from shoestring.commands.shared import RunPath
from shoestring.verbs.settings import CheckpointImport, ExportFormat


@dataclass(frozen=True)
class CheckpointsOfRun:
    """Arguments that name the checkpoints of a run."""

    run: RunPath
    """Path of a run folder, of its folder of checkpoints, or of one checkpoint."""


@dataclass(frozen=True)
class ListCheckpoints(PrintsResult, CheckpointsOfRun):
    """Arguments of `shoestring checkpoint ls`."""

    def __call__(self) -> int:
        from shoestring.verbs.archive import list_checkpoints

        rows = [checkpoint.row() for checkpoint in list_checkpoints(self.run)]
        self.output.show(rows, table(rows))
        return 0


@dataclass(frozen=True)
class VerifyCheckpoints(PrintsResult, CheckpointsOfRun):
    """Arguments of `shoestring checkpoint verify`."""

    step: Positional[int | None] = None
    """Step of the checkpoints to verify; by default all checkpoints are verified."""

    def __call__(self) -> int:
        from shoestring.verbs.archive import verify

        rows = verify(self.run, self.step)
        self.output.show(rows, table(rows))
        return 1 if any(row["damage"] for row in rows) else 0


@dataclass(frozen=True)
class OneCheckpoint(CheckpointsOfRun):
    """Arguments that name one checkpoint."""

    step: Positional[int | None] = None
    """Step of the checkpoint; defaults to the newest checkpoint on disk."""


@dataclass(frozen=True)
class ShowCheckpoint(PrintsResult, OneCheckpoint):
    """Arguments of `shoestring checkpoint show`."""

    def __call__(self) -> int:
        from shoestring.verbs.archive import show

        content = show(self.run, self.step)
        self.output.show(content, _described(content))
        return 0


@dataclass(frozen=True)
class ExplainResume(PrintsResult, CheckpointsOfRun):
    """Arguments of `shoestring checkpoint explain`."""

    def __call__(self) -> int:
        from shoestring.verbs.archive import explain

        explanation = explain(self.run)
        self.output.show(explanation.facts(), explanation.lines())
        return 0


@dataclass(frozen=True, kw_only=True)
class ExportCheckpoint(OneCheckpoint):
    """Arguments of `shoestring checkpoint export`."""

    to: Path
    """Path of a new folder for the result."""
    format: Annotated[ExportFormat, arg(name="as")] = "safetensors"
    """Format to write: weights under their own names (safetensors), all states for torch.distributed.checkpoint (dcp),
    or a Hugging Face model (hf)."""

    def __call__(self) -> int:
        from shoestring.verbs.interchange import export

        for path in export(self.run, self.to, self.step, self.format):
            say(path)
        return 0


@dataclass(frozen=True)
class ImportCheckpoint:
    """Arguments of `shoestring checkpoint import`."""

    folder: Positional[Path]
    """Folder or file that torch.distributed.checkpoint, safetensors or Hugging Face wrote."""
    to: Path
    """Path of a run folder without checkpoints; it may be a new folder."""
    settings: CheckpointImport = field(default_factory=CheckpointImport)
    """Settings of the import."""

    def __call__(self) -> int:
        from shoestring.verbs.interchange import import_checkpoint

        say(import_checkpoint(self.folder, self.to, self.settings))
        return 0


@dataclass(frozen=True)
class TrimCheckpoints(PrintsResult, CheckpointsOfRun):
    """Arguments of `shoestring checkpoint trim`."""

    keep: int
    """Number of newest checkpoints on disk to keep."""
    memory: bool = False
    """Delete also the checkpoints that a dead run left in this host's shared memory."""

    def __call__(self) -> int:
        from shoestring.verbs.trim import trim

        gone = [str(path) for path in trim(self.run, self.keep, memory=self.memory)]
        self.output.show(gone, (f"deleted {path}" for path in gone))
        return 0


def _described(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `shoestring checkpoint show` prints."""
    yield from (
        f"{name}: {figures.size(value) if name == 'bytes' else value}" for name, value in content["checkpoint"].items()
    )
    yield ""
    states = []
    for state in content["states"]:
        values = ", ".join(f"{name}={value!r}" for name, value in state["values"].items())
        states.append({**state, "values": values if len(values) <= 70 else f"{values[:67]}..."})
    yield from table(states)
    yield ""
    yield from table(
        [
            {**tensor, "shape": " x ".join(map(str, tensor["shape"])), "pieces": _pieces(tensor["pieces"])}
            for tensor in content["tensors"]
        ]
    )


def _pieces(pieces: Sequence[Any]) -> str:
    """Describe a tensor's shards: how many there are, and along which dimensions the tensor is sharded."""
    if len(pieces) == 1:
        return "whole"
    cut = [str(dim) for dim, firsts in enumerate(zip(*(offset for offset, _ in pieces), strict=True)) if any(firsts)]
    return f"{len(pieces)} along {', '.join(cut) or 'nothing: copies'}"
