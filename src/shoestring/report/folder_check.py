"""Refuses a folder that no run has written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoestring.core.errors import ConfigError


def check_run_folder(folder: Path, files: Sequence[str] = ("run.toml", "metrics.jsonl")) -> None:
    """Check that `folder` is a run folder: that it holds at least one of `files`.

    Raises:
        ConfigError: `folder` is not a folder, or holds none of the files.
    """
    hint = "give the folder that `shoestring train` wrote"
    if not folder.is_dir():
        raise ConfigError(f"no run folder at `{folder}`", hint=hint)
    if not any((folder / name).is_file() for name in files):
        raise ConfigError(f"`{folder}` is not a run folder: it has no {' and no '.join(files)}", hint=hint)
