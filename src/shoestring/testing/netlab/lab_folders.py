"""A private folder for each lab, with a record of the process that owns the lab, so that leftovers can be recognised.

When the owner ends, the lab's first process ends all namespaces (see `watch.py`). If the owner was killed, the lab's
folder is left; if the first process is suspended, the namespaces are left too. `sweep` removes leftover folders and
namespaces, but only of labs whose owner is known to have ended, by its process id, start time, boot and PID namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from shoestring.core.errors import WorldError
from shoestring.testing.netlab.machine import Identity, namespace

ROOT = Path("/run/shoestring-lab")
_RECORD = "lab.json"


@dataclass(frozen=True, kw_only=True)
class LabRecord:
    """A lab's owner, its first process (`switch`, None until it has started), and the first process of each host."""

    boot: str
    pid_namespace: str
    owner: Identity
    switch: Identity | None
    hosts: dict[int, Identity]
    standing: bool
    """Whether `shoestring lab up` has started this lab."""

    @classmethod
    def mine(cls) -> LabRecord:
        """Make the record of a lab that this process is about to start."""
        me = Identity.of(os.getpid())
        return cls(boot=_boot(), pid_namespace=namespace("self"), owner=me, switch=None, hosts={}, standing=False)

    def write(self, folder: Path) -> None:
        """Write the record to the lab's folder atomically, so that readers see either the old record or the new one."""
        draft = folder / f"{_RECORD}.new"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / _RECORD)

    @classmethod
    def read(cls, folder: Path) -> LabRecord:
        """Read the record in a lab's folder.

        Raises:
            OSError, ValueError, KeyError, TypeError: there is no record, or its content is malformed.
        """
        data = json.loads((folder / _RECORD).read_text())
        return cls(
            boot=str(data["boot"]),
            pid_namespace=str(data["pid_namespace"]),
            owner=_identity(data["owner"]),
            switch=_identity(data["switch"]) if data["switch"] else None,
            hosts={int(number): _identity(value) for number, value in data["hosts"].items()},
            standing=bool(data["standing"]),
        )

    def abandoned(self) -> bool:
        """Whether the owner has certainly ended; False if the owner's PID namespace is not visible to this process."""
        if self.boot != _boot():
            return True
        return self.pid_namespace == namespace("self") and not self.owner.alive()

    def end(self) -> None:
        """Kill the lab's first process if it still runs; the kernel then kills all other processes of the lab."""
        if self.boot == _boot() and self.switch is not None:
            self.switch.kill()


def _identity(data: dict[str, int]) -> Identity:
    return Identity(pid=int(data["pid"]), started=int(data["started"]))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def create() -> Path:
    """Create a lab's folder with a random name and a record in it; only this user can enter it."""
    for _ in range(10):
        ROOT.mkdir(mode=0o700, exist_ok=True)
        _check_root()
        folder = ROOT / secrets.token_hex(8)
        # A lab that ends removes ROOT if it is empty; then the next attempt creates it again.
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(mode=0o700)
            LabRecord.mine().write(folder)
            return folder
    raise WorldError(f"netlab: cannot make a folder in {ROOT}")


def discard(folder: Path) -> None:
    """Remove a lab's folder, and also ROOT if no other lab has a folder in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        ROOT.rmdir()


def folders() -> list[Path]:
    """List the folders of all labs on this machine, whether they run or were left behind."""
    return sorted(path for path in ROOT.iterdir() if path.is_dir()) if ROOT.is_dir() else []


def kept_lab() -> LabRecord | None:
    """Find the record of the running lab that `shoestring lab up` has started; None if there is none."""
    for folder in folders():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = LabRecord.read(folder)
            if record.standing and not record.abandoned():
                return record
    return None


def sweep() -> None:
    """Remove the folders and processes of labs whose owners were killed; running labs are not touched."""
    if not ROOT.is_dir():
        return
    _check_root()
    for folder in folders():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = LabRecord.read(folder)
            if record.abandoned():
                record.end()
                discard(folder)


def _check_root() -> None:
    status = ROOT.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise WorldError(f"netlab: {ROOT} is not a private folder of this user", hint="remove it")
