"""Claim the run folder, so that only one process uses it at a time; write the run file and the environment to it."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shoestring.checkpoint.tiers.file_acts import Files, Lock
from shoestring.checkpoint.tiers.plain import none_in
from shoestring.core.errors import ConfigError
from shoestring.data import Data
from shoestring.run import Run, vouch
from shoestring.storage import foreign
from shoestring.storage.whole import made_above, write_atomic
from shoestring.training.clock import SPENT

# Tables and keys that identify a run. Runs with different values of any of these cannot load each other's checkpoints.
IDENTITY = (("run", "model"), ("run", "data"), ("run", "seed"), ("model",), ("data",))


LOCK = ".lock"
QUICK = 60.0
"""Seconds of preparation above which a run that ends before its first step leaves its prepared data to the next run."""


def claim(run: Run, stack: ExitStack) -> Path:
    """Create and lock the run folder, and write the resolved run file and the environment to it.

    The lock is released when `stack` is closed or this process ends. A run that ends before its first step removes the
    files that it wrote, except data that took long to prepare. If a run was killed before its first step, the next run
    in the folder replaces its files.

    Raises:
        ConfigError: the folder belongs to another run, is in use, cannot be written, or holds a run although
            `run.resume` is off.
    """
    named = Path(run.settings.folder) if run.settings.folder else None
    while True:
        folder = named or _free(Path("runs") / run.name, run)
        new = not folder.exists()
        _check(folder, run)
        lock = _locked(folder)
        if named or run.settings.resume or not (folder / "run.toml").exists():
            break
        lock.release()  # another process has claimed the folder since `_free` looked
    stack.callback(lock.release, remove=True)
    _check(folder, run)
    stack.callback(_undo, folder, time.monotonic() if new else None)
    try:
        write_atomic(folder / "environment.json", json.dumps(environment(run.settings.seed), indent=2).encode())
        write_atomic(folder / "run.toml", run.toml.encode())
    except OSError as error:
        raise _unwritable(folder, error.strerror) from error
    vouch(folder)
    return folder


def check_claim(run: Run) -> list[str]:
    """Check whether `claim` would succeed, without writing anything.

    Returns:
        Lines about a run that is now in the folder and would make `claim` fail.

    Raises:
        ConfigError: `claim` would fail even without such a run.
    """
    folder = Path(run.settings.folder) if run.settings.folder else _free(Path("runs") / run.name, run)
    _check_kind(folder, run)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    reason = errno.EACCES if not os.access(there, os.W_OK | os.X_OK) else 0
    if not there.is_dir():
        reason = errno.EEXIST if there == folder else errno.ENOTDIR
    if reason:
        raise _unwritable(folder, os.strerror(reason))
    if (folder / LOCK).is_file():
        if (lock := Lock.of(folder / LOCK)) is None:
            return [_in_use(folder, (folder / LOCK).read_text(errors="replace")[:200].strip()).parts()[1]]
        lock.release()
    if run.settings.resume is False and _has_begun(folder):
        return ["; ".join(_taken(folder).parts()[1:])]
    return []


def check_resume(run: Run) -> None:
    """Raise CheckpointError if `run.resume` names a path that does not exist."""
    resume = run.settings.resume
    if isinstance(resume, str) and resume != "auto" and not Path(resume).exists():
        raise none_in(resume)


def _unwritable(folder: Path, reason: str | None) -> ConfigError:
    message = f"cannot write the run folder `{folder}`: {reason}"
    return ConfigError(message, hint="choose another folder with --run.folder")


def _in_use(folder: Path, holder: str | None) -> ConfigError:
    message = f"`{folder}` is in use by {holder or 'another process'}"
    return ConfigError(message, hint="end that run first, or choose another --run.folder")


def _locked(folder: Path) -> Lock:
    try:
        with made_above(folder / LOCK):
            return Files().lock(folder / LOCK, f"process {os.getpid()} on {platform.node()}")
    except BlockingIOError as error:
        raise _in_use(folder, error.strerror) from None
    except OSError as error:
        raise _unwritable(folder, error.strerror) from error


def _undo(folder: Path, claimed: float | None) -> None:
    """If the run ended before its first step, remove the files that `claim` wrote, so that the folder is free again.

    Args:
        claimed: time at which `claim` created the folder; None if the folder already existed. A new folder is removed
            with all data that the run has prepared in it, unless preparing took long.
    """
    if _has_begun(folder):
        return
    if claimed is not None and time.monotonic() - claimed < QUICK:
        shutil.rmtree(folder, ignore_errors=True)
        return
    made = ("run.toml", "environment.json", "choices.json", "history.jsonl", "report.html", "trackers.json")
    with suppress(OSError):  # `rmdir` fails if prepared data is left; unlinking fails on a read-only disk
        for name in (*made, "metrics.jsonl", SPENT, LOCK):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _has_begun(folder: Path) -> bool:
    """Whether a folder holds metrics, checkpoints or results; a run writes these only after its first step."""
    rows = folder / "metrics.jsonl"
    exported = any((folder / name).exists() for name in ("checkpoints", "model", "best", "summary.json"))
    return exported or (rows.exists() and rows.stat().st_size > 0)


def _free(folder: Path, run: Run) -> Path:
    """`folder` itself if `run.resume` allows resuming; otherwise the first of folder, folder-2, … that holds no run."""
    if run.settings.resume in ("auto", True):
        return folder
    number, free = 1, folder
    while (free / "run.toml").exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _check(folder: Path, run: Run) -> None:
    _check_kind(folder, run)
    there = (folder / "run.toml").is_file() and run.settings.resume is False
    if there and (_has_begun(folder) or not run.settings.folder):
        raise _taken(folder)  # a run that has no step yet counts too if `run.folder` is not set: it may be starting


def _taken(folder: Path) -> ConfigError:
    hint = "add --run.resume auto to continue it, or choose another --run.folder"
    return ConfigError(f"`{folder}` holds a run already", hint=hint)


def _check_kind(folder: Path, run: Run) -> None:
    """Raise ConfigError if a folder holds another run's files, or if `run.resume` is true but the folder has no run."""
    path = folder / "run.toml"
    if not path.is_file():
        if run.settings.resume is True:
            raise ConfigError(
                f"`{folder}` holds no run to resume", hint="with --run.resume auto the run then starts from scratch"
            )
        return
    if not _has_begun(folder) and not (folder / "environment.json").exists():
        raise ConfigError(
            f"`{path}` was not written by a run, and this run would replace it", hint="choose another --run.folder"
        )
    if run.settings.resume is not False:
        check_same(folder, run.document)


def check_same(folder: Path, document: dict[str, Any]) -> None:
    """Check that the run file in a folder on this host, if there is one, describes the same run as `document`.

    Raises:
        ConfigError: the run file describes another run, or cannot be read.
    """
    path = folder / "run.toml"
    if not path.is_file():
        return
    try:
        former = foreign.read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read `{path}`: {error}") from error
    for keys in IDENTITY:
        was, is_now = _at(former, keys), _at(document, keys)
        if was != is_now:
            told = "; ".join(_differences(".".join(keys), was, is_now))
            raise ConfigError(f"`{folder}` belongs to another run: {told}", hint="choose another --run.folder")


def _differences(key: str, was: object, is_now: object) -> Iterator[str]:
    """Yield a description of each key whose value differs, with the former and the present value."""
    if isinstance(was, dict) and isinstance(is_now, dict) and was and is_now:
        for name in sorted({**was, **is_now}):
            yield from _differences(f"{key}.{name}", was.get(name), is_now.get(name))
    elif was != is_now:
        yield f"its `{key}` is {_shown(was)}, this one's is {_shown(is_now)}"


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)


def _at(document: dict[str, Any], keys: tuple[str, ...]) -> object:
    """The value under nested keys; [data] is completed with defaults, because earlier versions had fewer keys."""
    value: Any = document
    for key in keys:
        value = value.get(key, {})
    value = json.loads(json.dumps(value))
    if keys == ("data",) and isinstance(value, dict):
        value = json.loads(json.dumps(asdict(Data()))) | value
    return value


def environment(seed: int) -> dict[str, Any]:
    """Command, seed, host, commit and versions of a run, to reproduce it."""
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
    """The commit of the working directory, with "-dirty" if there are changes; empty outside a git repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
