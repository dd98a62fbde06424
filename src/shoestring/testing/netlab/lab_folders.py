"""One private folder a lab, with a record of who owns it, so that what a killed owner left can be told from the rest.

The kernel ends the namespaces with their owner (see `watch.py`); what can stay is this folder, and, where that first
process was stopped, the namespaces. `sweep` takes both away: only of labs whose owner, by number, start time, boot and
PID namespace, is known to be gone.
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
    """Who owns a lab, and the first process of each of its parts (None until it has started)."""

    boot: str
    pid_namespace: str
    owner: Identity
    switch: Identity | None
    hosts: dict[int, Identity]
    kept: bool
    """Whether it is the one of `shoestring lab up`."""

    @classmethod
    def mine(cls) -> LabRecord:
        """The record of a lab that this process is about to start."""
        me = Identity.of(os.getpid())
        return cls(boot=_boot(), pid_namespace=namespace("self"), owner=me, switch=None, hosts={}, kept=False)

    def write(self, folder: Path) -> None:
        """Write it, so that a reader finds the old one or the new one."""
        draft = folder / f"{_RECORD}.new"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / _RECORD)

    @classmethod
    def read(cls, folder: Path) -> LabRecord:
        """Read it back.

        Raises:
            OSError, ValueError, KeyError, TypeError: there is none, or it is not one of ours.
        """
        data = json.loads((folder / _RECORD).read_text())
        return cls(
            boot=str(data["boot"]),
            pid_namespace=str(data["pid_namespace"]),
            owner=_identity(data["owner"]),
            switch=_identity(data["switch"]) if data["switch"] else None,
            hosts={int(number): _identity(value) for number, value in data["hosts"].items()},
            kept=bool(data["kept"]),
        )

    def abandoned(self) -> bool:
        """Whether the owner is certainly gone; False where this process could not see it."""
        if self.boot != _boot():
            return True
        return self.pid_namespace == namespace("self") and not self.owner.alive()

    def end(self) -> None:
        """Kill what is left of the lab; its first process takes all others along."""
        if self.boot == _boot() and self.switch is not None:
            self.switch.kill()


def _identity(data: dict[str, int]) -> Identity:
    return Identity(pid=int(data["pid"]), started=int(data["started"]))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def create() -> Path:
    """A new folder, with an unguessable name and a record in it, that only this user can enter."""
    for _ in range(10):
        ROOT.mkdir(mode=0o700, exist_ok=True)
        _check_root()
        folder = ROOT / secrets.token_hex(8)
        # Another lab that ends takes the folder above away when it finds it empty.
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(mode=0o700)
            LabRecord.mine().write(folder)
            return folder
    raise WorldError(f"netlab: cannot make a folder in {ROOT}")


def discard(folder: Path) -> None:
    """Take a lab's folder away, and the one above it with the last of them."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        ROOT.rmdir()


def folders() -> list[Path]:
    """The folders of all labs on this machine, of live ones too."""
    return sorted(path for path in ROOT.iterdir() if path.is_dir()) if ROOT.is_dir() else []


def kept_lab() -> LabRecord | None:
    """Find the record of the lab that `shoestring lab up` has started; None where none runs."""
    for folder in folders():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = LabRecord.read(folder)
            if record.kept and not record.abandoned():
                return record
    return None


def sweep() -> None:
    """Clear away what labs whose owners were killed have left, and nothing of anybody else's."""
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
