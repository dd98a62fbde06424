"""What a lab leaves behind whose owner is killed: processes, namespaces, interfaces, mounts and folders."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoestring.testing.netlab import lab_folders, netlab
from shoestring.testing.netlab.lab_folders import LabRecord
from shoestring.testing.netlab.machine import Identity, parent

# An owner to be killed.
_OWNER = """
import sys
from shoestring.testing.netlab import netlab
with netlab(hosts=2, rate="100mbit", coalesce=len(sys.argv) > 1) as lab:
    lab.start(["sh", "-c", "sleep 1000 & exec sleep 1000"])
    print("up", flush=True)
    sys.stdin.read()
"""


def left_after(rounds: int) -> list[str]:
    """Start a lab, kill its owner with SIGKILL, start the next, `rounds` times: in words, whatever is left after all.

    Looked at are the processes and namespaces of those labs, and this machine's interfaces, mounts and lab folders.
    """
    before = surroundings()
    left: list[str] = []
    folders: list[Path] = []
    for _ in range(rounds):
        owner = start_owner()
        folders.append(folder_of(owner.pid))
        family = set(descendants(owner.pid))
        namespaces = {name for identity in family for name in _namespaces(identity.pid)} - _namespaces(os.getpid())
        kill(owner)
        # The names of namespaces are given again, so what counts is who was in them at the time of the kill.
        family |= set(_inhabitants(namespaces, time.clock_gettime(time.CLOCK_BOOTTIME)))
        left += [f"process {identity.pid}" for identity in family if not ends(identity)]
    with netlab(hosts=1):  # the next start, which clears away
        pass
    left += [f"folder {folder}" for folder in folders if folder.exists()]
    return left + sorted(surroundings() - before)


def start_owner(*, coalesce: bool = False) -> subprocess.Popen[str]:
    """Start a process that owns a lab of two hosts with programs on them, and waits to be killed."""
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _OWNER, *(["coalesce"] if coalesce else [])]
    owner = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert owner.stdout is not None
    if owner.stdout.readline() != "up\n":
        raise RuntimeError("the lab to be killed did not start")
    return owner


def kill(owner: subprocess.Popen[str]) -> None:
    """Kill the owner of a lab with SIGKILL."""
    owner.kill()
    owner.wait()
    assert owner.stdin is not None and owner.stdout is not None
    owner.stdin.close()
    owner.stdout.close()


def folder_of(owner: int) -> Path:
    """The folder of the lab that process `owner` has."""
    return next(folder for folder in lab_folders.folders() if LabRecord.read(folder).owner.pid == owner)


def surroundings() -> set[str]:
    """The interfaces of this process's own network, and its mounts where a lab makes some on its hosts."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    places = ("/proc", "/dev/shm", "/etc/hosts", str(lab_folders.ROOT))
    mounts = {f"mount {line[0]} at {line[4]}" for line in lines if line[4].startswith(places)}
    return mounts | {f"interface {path.name}" for path in Path("/sys/class/net").iterdir()}


def descendants(pid: int) -> Iterator[Identity]:
    """The processes that `pid` has started, directly or not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent(int(entry.name)) == pid:
            with suppress(ProcessLookupError):
                yield Identity.of(int(entry.name))
            yield from descendants(int(entry.name))


def _namespaces(pid: int) -> set[str]:
    names = set()
    for kind in ("net", "mnt", "uts", "ipc", "pid"):
        try:
            names.add(str(Path(f"/proc/{pid}/ns/{kind}").readlink()))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return names


def _inhabitants(namespaces: set[str], by: float) -> Iterator[Identity]:
    """The processes in any of the namespaces that have started by a time in seconds since boot."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and namespaces & _namespaces(int(entry.name)):
            with suppress(ProcessLookupError):
                identity = Identity.of(int(entry.name))
                if identity.started <= by * os.sysconf("SC_CLK_TCK"):
                    yield identity


def ends(identity: Identity, timeout: float = 20.0) -> bool:
    """Whether a process that is bound to end does."""
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return True
    try:
        return not identity.alive() or bool(select.select([handle], [], [], timeout)[0])
    finally:
        os.close(handle)
