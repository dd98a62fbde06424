"""Cells of a recipe's comparison: seeds drawn after settings are fixed, and results that are made once and stored."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness import Deadline, stored
from shoestring.processors import processors

Call = tuple[Callable[..., dict[str, Any]], *tuple[Any, ...]]
"""A function that other processes can import, and its arguments."""


def seeds_of(runs: Path, deadline: Deadline, fixed: object, count: int) -> list[int]:
    """Seeds that were drawn after the settings `fixed`, which JSON can hold: other settings draw others."""
    name = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:8]
    draw = lambda: {"seeds": [secrets.randbelow(2**31) for _ in range(count)]}  # noqa: E731
    return stored(runs / f"seeds-{name}.json", deadline.check, draw)["seeds"]


def made(runs: Path, deadline: Deadline, calls: Mapping[str, Call]) -> dict[str, dict[str, Any]]:
    """The results of calls by the names under which they are stored, as many at a time as there are processors."""
    paths = {name: runs / f"{name}.json" for name in calls}
    missing = {name: call for name, call in calls.items() if not paths[name].exists()}
    with ProcessPoolExecutor(min(processors(), len(missing)) or 1, get_context("spawn")) as pool:
        started: dict[str, Future[dict[str, Any]]] = {name: pool.submit(*call) for name, call in missing.items()}
        try:
            return {
                name: stored(path, deadline.check, started[name].result if name in started else dict)
                for name, path in paths.items()
            }
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
