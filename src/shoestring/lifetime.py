"""Ends this process when its parent, the process that started it, ends for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_POLL = 0.5
"""Seconds between two checks whether the parent still runs, if the kernel cannot signal the parent's end."""


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal as soon as its parent ends, or at once if the parent has already ended.

    Linux sends the signal when the parent's *thread* that started this process ends; use `end_after` if this thread
    ends before the parent.

    Args:
        parent: process id of the parent, determined before the fork, because an orphaned process gets another parent.
    """
    send: Callable[[], None] = lambda: os.kill(os.getpid(), number)  # noqa: E731
    if not _told_by_kernel(number):
        end_after(parent, send)
    if os.getppid() != parent:  # the parent ended before the kernel was asked
        send()


def end_after(parent: int, end: Callable[[], object]) -> None:
    """Call the function `end`, which ends this process, within a second after the parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        end()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _told_by_kernel(number: signal.Signals) -> bool:
    """Ask the kernel for a signal when the parent ends; False if the kernel cannot send one, as outside Linux."""
    try:
        zero = ctypes.c_ulong(0)
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), zero, zero, zero) == 0
    except (OSError, AttributeError):
        return False
