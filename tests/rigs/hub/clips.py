"""Small videos, hostile ones, and workers that convert clips in processes of the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoestring_hub.server.sandbox import fault
from tests.waiting import until

TOOLS = ("ffmpeg", "ffprobe", "unshare", "setpriv", "prlimit")


def missing() -> str:
    """Why clips cannot be converted on this machine; empty if they can."""
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(lacking)}"
    return fault()


def make_clip(path: Path, size: str = "64x48", seconds: float = 1.0, *options: str, sound: bool = False) -> Path:
    """Write a video, whose name says its format."""
    inputs = ["-f", "lavfi", "-i", f"testsrc2=size={size}:rate=10:duration={seconds}"]
    inputs += ["-f", "lavfi", "-i", f"sine=duration={seconds}"] if sound else []
    codec = {".mp4": ["-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p"], ".avi": ["-c:v", "mjpeg"]}
    chosen = codec.get(path.suffix, ["-c:v", "libvpx", "-cpu-used", "8"] if path.suffix in (".webm", ".mkv") else [])
    command = ["ffmpeg", "-v", "error", "-y", "-threads", "1", *inputs, *chosen, *options, str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return path


def playlist(target: Path) -> bytes:
    """A playlist that names another file, as an uploaded `clip.mp4` may be one."""
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:6\n#EXTINF:6,\nfile://{target}\n#EXT-X-ENDLIST\n".encode()


def gif(side: int) -> bytes:
    """A GIF of a few bytes that announces a square of so many pixels."""
    size = side.to_bytes(2, "little") * 2
    return b"GIF89a" + size + b"\x80\0\0" + b"\0\0\0\xff\xff\xff" + b"," + bytes(4) + size + b"\0\x02\x02D\x01\0;"


def store(lab: Any, data: bytes, name: str = "clip", run: Any = None, person: Any = None) -> Any:
    """Send a clip to a project as its pages do, with chunks first."""
    from shoestring_hub.protocol import CHUNK, digest
    from shoestring_hub.server import chunks, clips

    parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    for part in parts:
        chunks.put(lab.project.pk, digest(part), part)
    access = lab.access_of(person) if person else lab.access
    return clips.commit(access, clips.SentClip(name, len(data), [digest(part) for part in parts]), run)


def queue(lab: Any, data: bytes, name: str = "clip") -> Any:
    """A clip whose first bytes nobody has looked at, as if the check of uploads had a hole."""
    from unittest.mock import patch

    from shoestring_hub.server import media

    with patch.object(media, "format_of", lambda head: "mov"):
        return store(lab, data, name)


def job_of(clip: Any) -> Any:
    """The present row of a clip's job."""
    from shoestring_hub.server.models import ClipJob

    return ClipJob.objects.select_related("clip").get(clip=clip)


def fork(run: Callable[[], object]) -> int:
    """Run a function in a process of its own."""
    from django.db import connections

    connections.close_all()
    if child := os.fork():
        return child
    try:
        run()
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def end(process: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Kill a child, and wait for it."""
    os.kill(process, number)
    os.waitpid(process, 0)


def children(process: int) -> list[int]:
    """All living descendants of a process that are called ffmpeg."""
    own, found = {process}, []
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            words = (path / "stat").read_text()
        except OSError:
            continue
        name, _, rest = words.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if int(parent) in own:
            own.add(int(path.name))
            if name == "ffmpeg" and state != "Z":
                found.append(int(path.name))
    return found


def worker_of(ffmpeg: int) -> int:
    """The worker that has started an ffmpeg, which has one process between the two."""
    parent = lambda process: int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])  # noqa: E731
    return parent(parent(ffmpeg))


def ffmpeg_of(process: int, seconds: float = 20.0) -> int:
    """The ffmpeg that a worker has started, once it has."""
    until(lambda: children(process), seconds=seconds)
    return children(process)[0]


def is_alive(process: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def convert_all(seconds: float = 60.0, step: Callable[[], object] = lambda: None) -> None:
    """Work in this process until no job is left."""
    from shoestring_hub.server.clip_worker import work_once
    from shoestring_hub.server.models import ClipJob

    limit = time.monotonic() + seconds
    while ClipJob.objects.filter(state__in=(ClipJob.WAITING, ClipJob.HELD)).exists():
        assert time.monotonic() < limit, list(ClipJob.objects.values())
        if not work_once():
            time.sleep(0.05)
        step()
