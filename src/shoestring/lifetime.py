"""Processes that end with the process that has started them, for whatever reason that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_POLL = 0.5
"""Seconds between looks at the parent, where the kernel does not tell of its end."""


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let this process get a signal as soon as its parent ends; at once if it has ended already.

    Linux sends the signal when the *thread* ends that has started this process: see `end_after` for parents whose
    threads end before them.

    Args:
        parent: id of the parent; taken before the fork, since a process gets another parent when its own ends.
    """
    send: Callable[[], None] = lambda: os.kill(os.getpid(), number)  # noqa: E731
    if not _told_by_kernel(number):
        end_after(parent, send)
    if os.getppid() != parent:  # it has ended before the kernel was asked
        send()


def end_after(parent: int, end: Callable[[], object]) -> None:
    """Call a function, which ends this process, within a second after its parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        end()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _told_by_kernel(number: signal.Signals) -> bool:
    """Ask the kernel for a signal when the parent ends; False where it cannot send one, as outside of Linux."""
    try:
        zero = ctypes.c_ulong(0)
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), zero, zero, zero) == 0
    except (OSError, AttributeError):
        return False
