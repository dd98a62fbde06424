"""Runs a program on untrusted files: without network, with limits, and without access to other files of the machine.

The program gets new namespaces. Its file system holds the programs and libraries of the machine, read-only, and one
folder; it has no `/proc`, `/dev`, `/tmp` or home, no capability and no network but a loopback device that is down. The
kernel ends the program when the process that started it ends.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
"""The whole environment of the program."""
INSIDE = Path("/clip")
"""Path under which the program sees its folder."""
_NEEDED = ("ffmpeg", "ffprobe", "mount", "nice", "pivot_root", "prlimit", "setpriv", "sh", "umount", "unshare")
# `umount` needs /proc, which only the old root has. The libraries of ffmpeg include links to /etc/alternatives.
_ENTER = """
set -e
mount -t tmpfs -o size=1m,mode=755 clip "$1/root"
cd "$1/root"
bind() { mount --rbind "/$1" "$1"; mount -o "remount,bind,$2" "$1"; }
for name in usr bin lib lib32 lib64; do
  if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$name"
  elif [ -d "/$name" ]; then mkdir "$name"; bind "$name" ro; fi
done
mkdir -p etc/alternatives clip old
if [ -d /etc/alternatives ]; then bind etc/alternatives ro; fi
if [ -f /etc/ld.so.cache ]; then : > etc/ld.so.cache; bind etc/ld.so.cache ro; fi
mount --bind "$1/clip" clip
mount -o remount,bind,nosuid,nodev,noexec clip
pivot_root . old
cd /
ln -s old/proc proc
umount -l old
rm proc
rmdir old
shift
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use, as enforced by the kernel."""

    memory: int = 2 << 30
    """Address space in bytes."""
    seconds: int = 4 * 3600
    """Processor time in seconds."""
    file_size: int = 4 << 30
    """Size of each file that it writes, in bytes."""
    processes: int = 256
    """Processes and threads of the hub's user; has no effect for root."""


def command(folder: Path, arguments: Sequence[str], limits: SandboxLimits) -> list[str]:
    """The command that runs, in the sandbox, a program that is installed on the machine.

    Args:
        folder: a folder with the subfolders `root`, which must be empty, and `clip`, which the program sees as `/clip`
            and may write to.
    """
    bounds = (
        f"--as={limits.memory}",
        f"--cpu={limits.seconds}",
        f"--fsize={limits.file_size}",
        f"--nproc={limits.processes}",
        "--nofile=256",
        "--core=0",
    )
    spaces = ("--map-root-user", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
    ended = ("setpriv", "--pdeathsig", "KILL", "nice", "-n", "10", "prlimit", *bounds)
    return [*ended, "unshare", *spaces, "--", "sh", "-c", _ENTER, "sh", str(folder.resolve()), *arguments]


def fault() -> str:
    """The reason why the sandbox does not work on this machine; empty if it works."""
    if missing := [name for name in _NEEDED if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]:
        return f"this machine lacks {', '.join(missing)}"
    with TemporaryDirectory(prefix="hub-sandbox-") as temporary:
        folder = Path(temporary)
        for name in ("root", "clip"):
            (folder / name).mkdir()
        run = command(folder, ["ffmpeg", "-hide_banner", "-version"], SandboxLimits(seconds=10))
        try:
            done = subprocess.run(run, capture_output=True, text=True, env=ENVIRONMENT, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"ffmpeg does not start in a sandbox: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        return f"this machine does not allow a sandbox for ffmpeg: {lines[-1][:200]}"
    return ""
