"""One host: namespaces held by a first process that does nothing, and the way into them."""

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
"""The scratch disk, as a process on a host sees it."""
SHARED = ROOT / "shared"
"""The folder that all hosts share, as a process on a host sees it."""
LOGS = ROOT / "logs"
"""The lab's log folder, as a process on a host sees it."""

# Arguments: name, size of /dev/shm, size of the disk, the lab's folder, the log folder, the shared folder or "".
# The tree is made beside its place and then moved over it, because what it binds would be hidden by then.
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
# As SIGCHLD is ignored, the kernel reaps the orphans that a first process inherits. Reno, because every
# kernel lets a namespace choose it: else a slow link would behave as the machine's default does, which differs.


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What a host is made of.

    Sizes are tmpfs's ("512m", "2g"): they bound what may be written and take memory only as it is.
    """

    shm: str = "1g"
    """Size of `/dev/shm`."""
    disk: str = "1g"
    """Size of the scratch disk."""
    shared: Path | None = None
    """Folder of the machine that all hosts see as `SHARED`; None: there is none."""
    delay: float = 0.0
    """Seconds from any host to any other, one way, half of them at each end."""

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
    """A running host: its first process, with whose end all its processes, memory and disk are gone."""

    number: int
    init: Identity
    pid_namespace: str
    disk: str
    waiters: tuple[subprocess.Popen[str], ...] = field(repr=False)

    @classmethod
    def start(cls, number: int, spec: HostSpec, *, switch: int, folder: Path, logs: Path) -> Host:
        """Start host `number` inside the PID namespace of process `switch`, not yet connected.

        Raises:
            WorldError: the machine does not allow it; the message has the tool's own words.
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
        """Where the machine sees a path of this host's, such as `/dev/shm/x`."""
        return Path(f"/proc/{self.init.pid}/root") / str(path).lstrip("/")

    def fill(self, free: int) -> None:
        """Leave `free` bytes (at least one page) on the disk, by shrinking it: no memory is spent on filling."""
        usage = os.statvfs(self.path(DISK))
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        self._resize(str(max(used + free, usage.f_frsize)))

    def unfill(self) -> None:
        """Give the disk its whole size again."""
        self._resize(self.disk)

    def _resize(self, size: str) -> None:
        tool([*enter(self.init.pid), "mount", "-o", f"remount,size={size}", str(DISK)])

    def stop(self) -> None:
        """Kill all its processes at once, as power loss does."""
        self.init.kill()
        for waiter in self.waiters:
            waiter.wait()


def enter(pid: int) -> list[str]:
    """The command prefix that runs a program on the host whose first process is `pid`."""
    return ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid"]


def inside(pid: int, command: Sequence[str]) -> list[str]:
    """The command that runs `command` there, in the folder that this process is in."""
    # Entering a mount namespace loses the folder, so a shell goes back to it.
    return [*enter(pid), "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(Path.cwd()), *command]


def start_switch() -> tuple[subprocess.Popen[str], int]:
    """Start the lab's first process, which ends with this one: (the process that waits for it, its number)."""
    watch = Path(__file__).with_name("watch.py")
    owner = os.pidfd_open(os.getpid())
    try:
        return spawn([*unshare("--net"), sys.executable, "-I", "-S", str(watch), str(owner)], pass_fds=(owner,))
    finally:
        os.close(owner)


def start_relay(init: int, name: str, delay: float) -> subprocess.Popen[str]:
    """Start the relay of the host whose first process is `init`, with whose other processes it ends."""
    relay = Path(__file__).with_name("relay.py")
    inside = ["nsenter", "--target", str(init), "--net", "--pid"]
    return spawn([*inside, sys.executable, "-I", "-S", str(relay), name, str(delay)])[0]


def spawn(command: list[str], *, pass_fds: tuple[int, ...] = ()) -> tuple[subprocess.Popen[str], int]:
    """Start a first process that prints its number, as this machine counts, when it is ready.

    Raises:
        WorldError: it ended instead; the message has its last words.
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
        start_new_session=True,  # Ctrl-C is for the owner, which then clears up
    )
    assert waiter.stdout is not None and waiter.stderr is not None
    with waiter.stdout, waiter.stderr:
        line = waiter.stdout.readline().strip()
        if line.isdigit():
            return waiter, int(line)
        words = (waiter.stderr.read().strip().splitlines() or [line or "no message"])[-1]
    waiter.wait()
    raise WorldError(f"netlab: cannot start a host: {words}", hint=HINT)
