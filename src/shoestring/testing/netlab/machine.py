"""The machine that runs a lab: the tools that a lab needs, and processes identified by more than their reusable ids."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import WorldError

TOOLS = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "mount")}
HINT = "run as root on Linux with iproute2 and util-linux"

# Creates everything that a lab needs, in namespaces that end with the shell, to test whether the machine allows it.
TRIAL = """
set -e
ip link add name br0 type bridge
ip link add name v0 type veth peer name v1
tc qdisc add dev v0 root tbf rate 1mbit burst 16kb limit 64kb
mount -t tmpfs tmpfs /dev/shm
mount -t proc proc /proc
"""


def netlab_available() -> str | None:
    """Return the reason why no lab can start on this machine, in one line; None if a lab can start."""
    if sys.platform != "linux":
        return "netlab needs Linux"
    if os.geteuid() != 0:
        return "netlab needs root"
    for package, names in TOOLS.items():
        for name in names:
            if shutil.which(name, path=_path()) is None:
                return f"netlab needs `{name}` (package {package})"
    shell = [*unshare("--mount", "--net", "--uts", "--ipc"), "sh", "-c", TRIAL]
    trial = subprocess.run(shell, capture_output=True, text=True, env=environment())
    if trial.returncode == 0:
        return None
    reason = (trial.stderr.strip().splitlines() or ["no message"])[-1]
    return f"this machine allows no namespaces, veth or tbf: {reason}"


def unshare(*namespaces: str) -> list[str]:
    """Return a command prefix that runs a program in a new PID namespace and in new `namespaces` of other kinds."""
    return ["unshare", "--fork", "--kill-child", "--pid", *namespaces]


def tool(command: Sequence[str], *, stdin: str = "") -> str:
    """Run a tool and return its output.

    Raises:
        WorldError: the tool failed; the error contains the command and the tool's message.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        what = " ".join([*command, *stdin.split()])
        raise WorldError(f"netlab: `{what}` failed: {' '.join(done.stderr.split())}", hint=HINT)
    return done.stdout


def environment() -> dict[str, str]:
    """Return the environment for the tools: with English messages, and with /usr/sbin and /sbin on the PATH."""
    return {**os.environ, "PATH": _path(), "LC_ALL": "C"}


def _path() -> str:
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identifies a process by its id and its start time in clock ticks since boot, because ids are reused."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Look up the identity of a running process.

        Raises:
            ProcessLookupError: there is no such process.
        """
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid=pid, started=started)

    def alive(self) -> bool:
        """Whether the process still runs; a zombie counts as ended."""
        return _started(self.pid) == self.started

    def kill(self, sig: int = signal.SIGKILL) -> bool:
        """Send a signal, but never to another process with the same id; return False if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive():
                    signal.pidfd_send_signal(handle, sig)
                    return True
            finally:
                os.close(handle)
        return False


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name comes before the state, in brackets, and may itself contain spaces and brackets.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def namespace(pid: int | str, kind: str = "pid") -> str:
    """Return the name of a process's namespace, such as "pid:[4026531836]"; empty if the process has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def processes(pid_namespace: str) -> Iterator[tuple[Identity, dict[str, str]]]:
    """Yield the live processes of a PID namespace, with the environments in which they were started."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or namespace(folder.name) != pid_namespace:
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            yield Identity.of(int(folder.name)), environ


def parent(pid: int) -> int:
    """Return the id of a process's parent; 0 if the process has ended or the parent is in an outer PID namespace."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
