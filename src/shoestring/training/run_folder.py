"""The folder of one run: who may write in it, and what is written at its start."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import tomllib
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shoestring.checkpoint.tiers.file_acts import Files, Lock
from shoestring.core.errors import ConfigError
from shoestring.run import Run
from shoestring.storage.whole import write_atomic

# What makes two runs the same one: with another of these, a checkpoint of one run does not fit the other.
IDENTITY = (("run", "model"), ("run", "data"), ("run", "seed"), ("model",), ("data",))


LOCK = ".lock"


def claim(run: Run, stack: ExitStack) -> Path:
    """The run's folder, made and proven writable, with the resolved run file and the environment in it.

    It is locked until `stack` is closed, or this process ends. A run that ends before its first step leaves nothing but
    prepared data; what one left that was killed before is replaced.

    Raises:
        ConfigError: it is another run's, in use, holds a run that was not to be resumed, or cannot be written.
    """
    named = Path(run.settings.folder) if run.settings.folder else None
    while True:
        folder = named or _free(Path("runs") / run.name, run)
        _check(folder, run)
        lock = _locked(folder)
        if named or run.settings.resume or not (folder / "run.toml").exists():
            break
        lock.release()  # another run has taken it in between
    stack.callback(lock.release, remove=True)
    _check(folder, run)
    stack.callback(_undo, folder)
    try:
        write_atomic(folder / "environment.json", json.dumps(environment(run.settings.seed), indent=2).encode())
        write_atomic(folder / "run.toml", run.dump().encode())
    except OSError as error:
        raise ConfigError(
            f"cannot write the run folder `{folder}`: {error.strerror}", hint="choose another with --run.folder"
        ) from error
    return folder


def _locked(folder: Path) -> Lock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Files().lock(folder / LOCK, f"process {os.getpid()} on {platform.node()}")
    except BlockingIOError as error:
        raise ConfigError(
            f"`{folder}` is in use by {error.strerror}", hint="end that run first, or choose another --run.folder"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write the run folder `{folder}`: {error.strerror}", hint="choose another with --run.folder"
        ) from error


def _undo(folder: Path) -> None:
    """Undo the claim of a run that ended before its first step, so that the folder can be claimed again."""
    if _has_begun(folder):
        return
    made = ("run.toml", "environment.json", "history.jsonl", "report.html", "trackers.json", "metrics.jsonl", LOCK)
    with suppress(OSError):  # prepared data stays, and then the folder does; a disk may be read-only by now
        for name in made:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _has_begun(folder: Path) -> bool:
    """Whether the run in a folder has done a step."""
    rows = folder / "metrics.jsonl"
    return (rows.exists() and rows.stat().st_size > 0) or (folder / "checkpoints").exists()


def _free(folder: Path, run: Run) -> Path:
    """The folder itself to resume in, else the first of folder, folder-2, folder-3 … that holds no run."""
    if run.settings.resume in ("auto", True):
        return folder
    number, free = 1, folder
    while (free / "run.toml").exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _check(folder: Path, run: Run) -> None:
    path = folder / "run.toml"
    if not path.is_file():
        if run.settings.resume is True:
            raise ConfigError(
                f"`{folder}` holds no run to resume", hint="use --run.resume auto to start where there is none"
            )
        return
    begun = _has_begun(folder)
    if not begun and not (folder / "environment.json").exists():
        raise ConfigError(
            f"`{path}` was not written by a run, and the run would replace it", hint="choose another --run.folder"
        )
    if run.settings.resume is not False:
        check_same(folder, run)
    elif begun or not run.settings.folder:  # a folder that nobody named may be that of a start at the same time
        raise ConfigError(
            f"`{folder}` holds a run already",
            hint="add --run.resume auto to continue it, or choose another --run.folder",
        )


def check_same(folder: Path, run: Run) -> None:
    """Make sure that a folder on this host, if there is one, is of this very run.

    Raises:
        ConfigError: it is of another one, or cannot be read.
    """
    path = folder / "run.toml"
    if not path.is_file():
        return
    try:
        former = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read `{path}`: {error}") from error
    for keys in IDENTITY:
        was, is_now = _at(former, keys), _at(run.document, keys)
        if was != is_now:
            raise ConfigError(
                f"`{folder}` belongs to another run: its `{'.'.join(keys)}` is {was!r}, this one's is {is_now!r}",
                hint="choose another --run.folder",
            )


def _at(document: dict[str, Any], keys: tuple[str, ...]) -> object:
    value: Any = document
    for key in keys:
        value = value.get(key, {})
    return json.loads(json.dumps(value))


def environment(seed: int) -> dict[str, Any]:
    """What the run ran on, for whoever wants to repeat it."""
    return {
        "command": sys.argv,
        "seed": seed,
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": _git(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("shoestring", "torch")},
        "platform": platform.platform(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _git() -> str:
    """The commit of the working directory, with a mark when it has changes; empty outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
