"""A virtual host: namespaces that an idle first process keeps alive, and commands that enter the namespaces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoestring.core.errors import ConfigError, WorldError
from shoestring.testing.netlab.lab_folders import ROOT
from shoestring.testing.netlab.machine import HINT, Identity, environment, namespace, tool, unshare

DISK = ROOT / "disk"
"""Path of the scratch disk, as processes on a host see it."""
SHARED = ROOT / "shared"
"""Path of the folder that all hosts share, as processes on a host see it."""
LOGS = ROOT / "logs"
"""Path of the lab's log folder, as processes on a host see it."""

# Arguments: host name, size of /dev/shm, size of the scratch disk, lab folder, log folder, shared folder or "". The
# folders for ROOT are mounted in the lab folder first, and then moved to ROOT, because the move hides the lab folder,
# which lies below ROOT.
_START = f"""
set -e
read -r pid _ </proc/self/stat
echo "$1" >/proc/sys/kernel/hostname
[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
echo reno >/proc/sys/net/ipv4/tcp_congestion_control
mount --bind "$4/names" /etc/hosts
mount -t tmpfs -o "mode=1777,size=$2" tmpfs /dev/shm
mount -t tmpfs -o mode=0755,size=64k tmpfs "$4/tree"
cd "$4/tree"
mkdir disk logs shared
mount -t tmpfs -o "mode=1777,size=$3" tmpfs disk
mount --bind "$5" logs
[ -z "$6" ] || mount --bind "$6" shared
cd /
mount --move "$4/tree" {ROOT}
mount -t proc proc /proc
echo "$pid"
exec env --ignore-signal=CHLD sleep infinity >/dev/null 2>&1
"""
# SIGCHLD is ignored so that the kernel reaps orphaned processes, which get the first process as parent. Reno is set,
# because default congestion controls differ between machines, and every kernel allows Reno in a namespace.


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """Settings of a virtual host.

    Sizes are limits of tmpfs file systems, such as "512m" or "2g"; only written data takes memory.
    """

    shm: str = "1g"
    """Size limit of `/dev/shm`."""
    disk: str = "1g"
    """Size limit of the scratch disk."""
    shared: Path | None = None
    """Folder of the machine that all hosts see as `SHARED`; None for no shared folder."""
    delay: float = 0.0
    """One-way delay between any two hosts in seconds; each host's link adds half of this delay."""

    def __post_init__(self) -> None:
        for name in ("shm", "disk"):
            if not re.fullmatch(r"[1-9]\d*[kmg]?", getattr(self, name)):
                raise ConfigError(f"netlab: {name}={getattr(self, name)!r} is not a size", hint='write "512m" or "2g"')
        if not 0 <= self.delay <= 10:
            raise ConfigError(f"netlab: delay={self.delay} is not in 0 … 10 seconds", hint="0.02 is 20 ms, one way")
        if self.shared is not None and not self.shared.is_dir():
            raise ConfigError(f"netlab: shared={str(self.shared)!r} is not a folder")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A running virtual host. The host's processes, memory and disk vanish when its first process ends."""

    number: int
    init: Identity
    pid_namespace: str
    disk: str
    waiters: tuple[subprocess.Popen[str], ...] = field(repr=False)

    @classmethod
    def start(cls, number: int, spec: HostSpec, *, switch: int, folder: Path, logs: Path) -> Host:
        """Start host `number` inside the PID namespace of the process with id `switch`, without a network connection.

        Raises:
            WorldError: the machine does not allow virtual hosts; the error contains the message of the tool that
                failed.
        """
        shared = str(spec.shared.resolve()) if spec.shared else ""
        arguments = [f"host{number}", spec.shm, spec.disk, str(folder), str(logs), shared]
        isolated = unshare("--mount", "--net", "--uts", "--ipc")
        waiter, pid = spawn(
            ["nsenter", "--target", str(switch), "--pid", *isolated, "sh", "-c", _START, "sh", *arguments]
        )
        identity, waiters = Identity.of(pid), (waiter,)
        if spec.delay:
            waiters += (start_relay(pid, f"h{number}", spec.delay / 2),)
        return cls(number=number, init=identity, pid_namespace=namespace(pid), disk=spec.disk, waiters=waiters)

    def path(self, path: str | Path) -> Path:
        """Convert a path on the host, such as `/dev/shm/x`, to a path that processes outside the host can open."""
        return Path(f"/proc/{self.init.pid}/root") / str(path).lstrip("/")

    def fill(self, free: int) -> None:
        """Shrink the scratch disk, without using memory, so that only `free` bytes (at least one page) are free."""
        usage = os.statvfs(self.path(DISK))
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        self._resize(str(max(used + free, usage.f_frsize)))

    def unfill(self) -> None:
        """Restore the size of the scratch disk."""
        self._resize(self.disk)

    def _resize(self, size: str) -> None:
        tool([*enter(self.init.pid), "mount", "-o", f"remount,size={size}", str(DISK)])

    def stop(self) -> None:
        """Kill all processes of the host at once, as a power failure would."""
        self.init.kill()
        for waiter in self.waiters:
            waiter.wait()


def enter(pid: int) -> list[str]:
    """Return a command prefix that runs a program on the host whose first process has the id `pid`."""
    return ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid"]


def inside(pid: int, command: Sequence[str]) -> list[str]:
    """Wrap a command to run on the host whose first process has the id `pid`, in this process's working folder."""
    # Entering a mount namespace changes the working folder, so a shell changes back to it.
    return [*enter(pid), "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(Path.cwd()), *command]


def start_switch() -> tuple[subprocess.Popen[str], int]:
    """Start the lab's first process, which ends when this process ends.

    Returns:
        The child process that waits for the lab's first process, and the id of the first process.
    """
    watch = Path(__file__).with_name("watch.py")
    owner = os.pidfd_open(os.getpid())
    try:
        return spawn([*unshare("--net"), sys.executable, "-I", "-S", str(watch), str(owner)], pass_fds=(owner,))
    finally:
        os.close(owner)


def start_relay(init: int, name: str, delay: float) -> subprocess.Popen[str]:
    """Start the relay that delays the frames of the host with first process `init`; the relay ends with the host."""
    relay = Path(__file__).with_name("relay.py")
    inside = ["nsenter", "--target", str(init), "--net", "--pid"]
    return spawn([*inside, sys.executable, "-I", "-S", str(relay), name, str(delay)])[0]


def spawn(command: list[str], *, pass_fds: tuple[int, ...] = ()) -> tuple[subprocess.Popen[str], int]:
    """Start a process in new namespaces, and wait until it is ready and prints its process id as seen from outside.

    Returns:
        The child process that waits for the new process, and the new process's id.

    Raises:
        WorldError: the new process ended; the error contains its last line of output.
    """
    pipe = subprocess.PIPE
    waiter = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        pass_fds=pass_fds,
        env=environment(),
        start_new_session=True,  # Ctrl-C must reach only the owner, which then cleans up
    )
    assert waiter.stdout is not None and waiter.stderr is not None
    with waiter.stdout, waiter.stderr:
        line = waiter.stdout.readline().strip()
        if line.isdigit():
            return waiter, int(line)
        words = (waiter.stderr.read().strip().splitlines() or [line or "no message"])[-1]
    waiter.wait()
    raise WorldError(f"netlab: cannot start a host: {words}", hint=HINT)
