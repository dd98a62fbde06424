"""Switches on batching of frames on the links: frames of one millisecond pass at once (as in interrupt coalescing).

The queueing discipline tbf sets a timer for each frame, at both ends of each link. On a virtual machine, the timers of
tbf are the largest cost of a frame: at 100 Mbit/s, four ranks on two cores lost a tenth of their time to these timers,
a cost that a real cable does not have. The queueing discipline htb sends all waiting frames at once if its hysteresis
is on. Hysteresis is a setting of the kernel for all htb queues of the machine. The setting is switched on while a lab
needs it and restored afterwards; if the lab's owner was killed, the next lab restores it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from shoestring.core.errors import WorldError
from shoestring.testing.netlab import lab_folders

SETTING = Path("/sys/module/sch_htb/parameters/htb_hysteresis")
_MARK = "coalesces"
_BEFORE = "htb_hysteresis"


def begin(folder: Path) -> None:
    """Switch htb's hysteresis on for the lab with this folder.

    Raises:
        WorldError: the kernel lacks htb, or its setting cannot be written.
    """
    with _alone():
        before = lab_folders.ROOT / _BEFORE
        try:
            if not before.exists():  # saved first, since this process may be killed at any time
                before.write_text(SETTING.read_text())
            SETTING.write_text("1")
        except OSError as error:
            if not needed():
                before.unlink(missing_ok=True)
            raise WorldError(
                f"netlab: this machine cannot coalesce frames: {error}",
                hint="coalescing needs the kernel's htb, and permission to write this file",
            ) from error
        (folder / _MARK).touch()


def settle() -> None:
    """Restore the machine's own setting of htb's hysteresis if no lab needs hysteresis any more."""
    with contextlib.suppress(FileNotFoundError), _alone():
        before = lab_folders.ROOT / _BEFORE
        if before.exists() and not needed():
            SETTING.write_text(before.read_text())
            before.unlink()
            with contextlib.suppress(OSError):  # ROOT is not empty: another lab has a folder in it
                lab_folders.ROOT.rmdir()


def needed() -> bool:
    """Whether a lab needs htb's hysteresis."""
    return any((folder / _MARK).exists() for folder in lab_folders.folders())


def resting() -> str:
    """Return the value of htb's hysteresis that this machine has without labs."""
    before = lab_folders.ROOT / _BEFORE
    with contextlib.suppress(FileNotFoundError):
        return before.read_text()
    return SETTING.read_text()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Context that only one process can be in at a time; raises FileNotFoundError if no lab has a folder."""
    folder = os.open(lab_folders.ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
