"""Runs a function before a process ends by a call that skips Python's cleanup, so that recorded data can be saved.

`os._exit`, `os.abort` and the `exec` functions run neither `finally` blocks nor `atexit` handlers. Inside the context
`before_leaving`, these functions first call a handler, and so does `os.kill` if a process kills itself. A fatal signal
from another process is not caught.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

_LEAVING = ("_exit", "abort", "execv", "execve")
"""Functions of `os` that are patched; all other `exec` functions of `os` call one of these functions."""


@contextmanager
def before_leaving(act: Callable[[str], None]) -> Iterator[None]:
    """Context that calls `act` once, with the name of the function that is about to end this process; not in a fork."""
    process, originals = os.getpid(), {name: getattr(os, name) for name in (*_LEAVING, "kill")}
    done: list[str] = []

    def leaving(name: str) -> None:
        if os.getpid() == process and not done:
            done.append(name)
            act(f"os.{name}")

    def wrapped(name: str) -> Callable[..., Any]:
        @wraps(originals[name])
        def leave(*arguments: Any, **named: Any) -> Any:
            program = arguments[0] if arguments and name.startswith("exec") else None
            if program is None or os.access(program, os.X_OK):  # otherwise `exec` fails and the program continues
                leaving(name)
            return originals[name](*arguments, **named)

        return leave

    @wraps(originals["kill"])
    def kill(pid: int, number: int, /) -> None:
        if pid == process and number in (signal.SIGKILL, signal.SIGABRT) and os.getpid() == process:
            leaving("kill")
        originals["kill"](pid, number)

    ours = {**{name: wrapped(name) for name in _LEAVING}, "kill": kill}
    for name, function in ours.items():
        setattr(os, name, function)
    try:
        yield
    finally:
        for name, function in ours.items():
            if getattr(os, name) is function:  # do not undo a patch by other code
                setattr(os, name, originals[name])
