"""What the lab needs of the machine: two sets of tools, and processes told apart even when their numbers are reused."""

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

# One of everything the lab makes, in namespaces that are gone when the shell is.
TRIAL = """
set -e
ip link add name br0 type bridge
ip link add name v0 type veth peer name v1
tc qdisc add dev v0 root tbf rate 1mbit burst 16kb limit 64kb
mount -t tmpfs tmpfs /dev/shm
mount -t proc proc /proc
"""


def netlab_available() -> str | None:
    """Why no lab can start on this machine, in one line, or None when it can; leaves nothing behind."""
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
    return f"this machine allows no namespaces, veth or tbf: {_last_line(trial.stderr)}"


def unshare(*namespaces: str) -> list[str]:
    """The command prefix that starts a process as number one of a PID namespace and of the others named."""
    return ["unshare", "--fork", "--kill-child", "--pid", *namespaces]


def tool(command: Sequence[str], *, stdin: str = "") -> str:
    """Run a tool and give what it printed.

    Raises:
        WorldError: it failed; the message has the command and the tool's own words.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        what = " ".join([*command, *stdin.split()])
        raise WorldError(f"netlab: `{what}` failed: {' '.join(done.stderr.split())}", hint=HINT)
    return done.stdout


def environment() -> dict[str, str]:
    """The environment for the tools: English messages, and the folders that hold administrators' commands."""
    return {**os.environ, "PATH": _path(), "LC_ALL": "C"}


def _path() -> str:
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A process: its number, and when it started (clock ticks since boot), as numbers are used again."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Identity:
        """The identity of a running process.

        Raises:
            ProcessLookupError: there is none with that number.
        """
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid=pid, started=started)

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return _started(self.pid) == self.started

    def kill(self, sig: int = signal.SIGKILL) -> bool:
        """Signal this very process, never another that was given its number; False when it is gone."""
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
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return None if state in "ZX" else int(fields[18])


def namespace(pid: int | str, kind: str = "pid") -> str:
    """The name of a process's namespace, such as "pid:[4026531836]"; empty when the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def processes(pid_namespace: str) -> Iterator[tuple[Identity, dict[str, str]]]:
    """The live processes of one PID namespace, each with the environment it was started with."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or namespace(folder.name) != pid_namespace:
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            yield Identity.of(int(folder.name)), environ


def parent(pid: int) -> int:
    """The number of a process's parent; 0 when there is none to see."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
