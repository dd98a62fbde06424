"""Links that let a millisecond's worth of frames pass at once, as network cards hand them on (interrupt coalescing).

tbf sets a timer for each frame, at both ends of each link. On a virtual machine that is the most expensive thing about
a frame: four ranks on two cores lost a tenth of their time to it at 100 Mbit/s, which no cable takes from them. htb
works off what has gathered once its hysteresis is on. That is a setting of the whole machine, which counts for all
queues of htb there: it is on while a lab needs it, and then given back, by the next lab where an owner was killed.
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
    """Turn it on for the lab that has this folder.

    Raises:
        WorldError: this machine's kernel cannot.
    """
    with _alone():
        before = lab_folders.ROOT / _BEFORE
        try:
            if not before.exists():  # first, as this process may be killed at any line
                before.write_text(SETTING.read_text())
            SETTING.write_text("1")
        except OSError as error:
            if not needed():
                before.unlink(missing_ok=True)
            raise WorldError(
                f"netlab: this machine cannot coalesce frames: {error}",
                hint="it needs the kernel's htb, and leave to write this file",
            ) from error
        (folder / _MARK).touch()


def settle() -> None:
    """Give the machine its setting back where no lab needs another any more."""
    with contextlib.suppress(FileNotFoundError), _alone():
        before = lab_folders.ROOT / _BEFORE
        if before.exists() and not needed():
            SETTING.write_text(before.read_text())
            before.unlink()
            with contextlib.suppress(OSError):  # another lab is there
                lab_folders.ROOT.rmdir()


def needed() -> bool:
    """Whether there is a lab that needs it."""
    return any((folder / _MARK).exists() for folder in lab_folders.folders())


def resting() -> str:
    """The setting that the machine has when there is none."""
    before = lab_folders.ROOT / _BEFORE
    with contextlib.suppress(FileNotFoundError):
        return before.read_text()
    return SETTING.read_text()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time; FileNotFoundError where there is no lab."""
    folder = os.open(lab_folders.ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
