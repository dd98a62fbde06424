"""Clips: each ends with one result whatever is killed or stopped, and hostile ones are refused within limits."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Deadline, stored
from benchmarks.rows import Bar, Measured, NotRun
from shoestring_hub.client.clip import send_clip
from shoestring_hub.client.logins import log_in
from tests.hub.conftest import add_person
from tests.rigs.hub import clips
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import Visitor

TRANSCODES, BATCH = 100, 10
SIZES = ("640x360", "1280x720", "854x480")
LATE = 60.0
"""Seconds that a disturbed conversion may take on top of twice its plain time."""
SECONDS, MEMORY = 60.0, 2 << 30
"""Processor time and memory within which a hostile clip must have been refused."""


# -- under kills ------------------------------------------------------------------------------------------------------


def batch(first: int) -> dict[str, Any]:
    """Some clips on a hub of two workers, each converted in peace and then under kills and stops."""
    with (
        TemporaryDirectory() as root,
        patch.dict(os.environ, {"XDG_STATE_HOME": f"{root}/state"}),
        HubServer(Path(root) / "hub", "--clip-workers", "2") as server,
    ):
        visitor = Visitor(server.port)
        visitor.set_password(add_person(server.folder, "ada"), "ada")
        visitor.make_project("clips")
        log_in(server.address, visitor.make_token("clips"))
        return {"clips": [_transcode(server, visitor, Path(root), seed) for seed in range(first, first + BATCH)]}


def _transcode(server: HubServer, visitor: Visitor, root: Path, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    path = clips.make_clip(root / f"{seed}.mp4", draw.choice(SIZES), draw.uniform(5, 30), "-g", "25")
    plain, expected = _converted(visitor, path, time.monotonic() + 600)
    path.write_bytes(path.read_bytes() + b" ")  # another clip of the same pictures
    acts: list[str] = []
    ended = threading.Event()
    thread = threading.Thread(target=_disturb, args=(server.pid, plain, draw, acts, ended))
    thread.start()
    seconds, result = _converted(visitor, path, time.monotonic() + 600)
    ended.set()
    thread.join()
    equal = bool(result) and _shown(result) == _shown(expected)
    return {"seed": seed, "plain": plain, "seconds": seconds, "acts": acts, "equal": equal}


def _shown(video: bytes) -> str:
    """What a video shows and when, a line for each picture. Its bytes are not compared: in two conversions of one clip
    they differ now and then, for x264's two threads divide a limited rate by what each has just encoded."""
    entries = "packet=stream_index,pts,duration,flags"
    probe = ["ffprobe", "-v", "error", "-show_entries", entries, "-of", "csv=p=0", "-"]
    decode = ["ffmpeg", "-v", "error", "-i", "-", "-f", "null", "-"]
    ends = [subprocess.run(command, input=video, capture_output=True, timeout=60) for command in (probe, decode)]
    return "".join(f"{end.returncode} {end.stdout.decode()} {end.stderr.decode()}" for end in ends)


def _converted(visitor: Visitor, path: Path, limit: float) -> tuple[float, bytes]:
    """Seconds until a clip that is sent now is ready, and its video; empty if it never is."""
    start = time.monotonic()
    address = f"/clips/clips/{send_clip(path).partition(': ')[0].rpartition('/')[2]}"
    while time.monotonic() < limit:
        state = visitor.get(f"{address}/state").text
        if '"done"' in state:
            return time.monotonic() - start, visitor.get(f"{address}/video.mp4").body
        if '"failed"' in state:
            break
        time.sleep(0.1)
    return time.monotonic() - start, b""


def _disturb(server: int, plain: float, draw: random.Random, acts: list[str], ended: threading.Event) -> None:
    """Once or twice kill a worker, or stop its ffmpeg, at a drawn moment of the conversion."""
    for _ in range(draw.choice((1, 1, 2))):
        while not ended.is_set() and not clips.children(server):
            time.sleep(0.01)
        time.sleep(draw.random() * plain * 0.8)
        if ended.is_set() or not (running := clips.children(server)):
            return
        with suppress(OSError):
            kill = draw.random() < 0.5
            os.kill(clips.worker_of(running[0]) if kill else running[0], signal.SIGKILL if kill else signal.SIGSTOP)
            acts.append("kill" if kill else "stop")


def transcodes(runs: Path, check: Callable[[], None], deadline: Deadline) -> Measured | NotRun:
    """How many conversions end with the pictures of an undisturbed one, in time."""
    if reason := clips.missing():
        return NotRun(reason)
    results = []
    for first in range(0, TRANSCODES, BATCH):
        results += stored(runs / f"clips-{first}.json", check, partial(batch, first))["clips"]
    good = [one for one in results if one["equal"] and one["seconds"] <= 2 * one["plain"] + LATE]
    acts = [act for one in results for act in one["acts"]]
    slowest = max(one["seconds"] - 2 * one["plain"] for one in results)
    note = f"{acts.count('kill')} workers killed, {acts.count('stop')} ffmpegs stopped; at worst 2x + {slowest:.0f} s"
    return Measured(len(good), note)


# -- hostile media ----------------------------------------------------------------------------------------------------


def _hostile(root: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of clips that must be refused."""
    secret = clips.make_clip(root / "secret.ts", "64x48", 1.0)
    small = clips.make_clip(root / "small.mp4", "64x48", 4.0, "-movflags", "+faststart").read_bytes()
    yield "playlist of another's clip", clips.playlist(secret)
    yield "playlist of a URL", clips.playlist(secret).replace(b"file://", b"http://127.0.0.1:9")
    yield "concatenation", f"ffconcat version 1.0\nfile '{secret}'\n".encode()
    yield "session description", b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
    yield "MP4 head on a playlist", small[:32] + clips.playlist(secret)
    yield "GIF of 65,535 squared", clips.gif(65535)
    yield "GIF of one pixel", clips.gif(1)
    yield "cut MP4", small[: len(small) * 6 // 10]
    yield "MP4 without content", small[:16] + bytes(1 << 20)
    for head in (small[:16], b"\x1a\x45\xdf\xa3", b"GIF89a", b"RIFF\0\0\0\0AVI "):
        yield f"noise after {head[:6]!r}", head + random.Random(0).randbytes(1 << 20)
    black = ["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i"]
    encode = ["-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p"]
    for name, source, options in (
        ("8k in a tiny file", "color=size=7680x4320:rate=1:duration=2", []),
        ("30 hours in a tiny file", "color=size=64x48:rate=1/3600:duration=108000", []),
        ("300,000 pictures", "color=size=16x16:rate=1000:duration=300", ["-g", "9999"]),
    ):
        path = root / "made.mp4"
        subprocess.run([*black, source, *options, *encode, str(path)], check=True, timeout=300)
        yield name, path.read_bytes()
    path = root / "made.mkv"
    many = [word for _ in range(40) for word in ("-map", "0:v")]
    source = "color=size=16x16:rate=10:duration=1"
    subprocess.run([*black, source, *many, *encode, str(path)], check=True, timeout=300)
    yield "40 streams", path.read_bytes()


def hostile(deadline: Deadline) -> Measured | NotRun:
    """How many hostile clips are not refused within the limits, if nobody looks at their first bytes before."""
    if reason := clips.missing():
        return NotRun(reason)
    from shoestring_hub.server.configure import Place, configure

    with TemporaryDirectory() as root:
        configure(Place(Path(root) / "hub"))
        from shoestring_hub.server.serve import prepare

        prepare()
        from shoestring_hub.server.clip_worker import work_once
        from tests.rigs.hub.lab import Lab

        lab, wrong, worst = Lab("hostile"), [], 0.0
        cases = list(_hostile(Path(root)))
        for name, data in cases:
            clip = clips.queue(lab, data, name)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert work_once()
            after, job = resource.getrusage(resource.RUSAGE_CHILDREN), clips.job_of(clip)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            worst = max(worst, seconds)
            if job.state != "failed" or seconds > SECONDS or after.ru_maxrss * 1024 > MEMORY or job.clip.video:
                wrong.append(f"{name}: {job.state} after {seconds:.0f} s: {job.reason}")
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    note = f"{len(cases)} clips; at most {worst:.1f} s of processor time and {memory:.0f} MiB; wrong: {wrong or 'none'}"
    return Measured(len(wrong), note)


def rows(runs: Path, check: Callable[[], None]) -> Iterator[Bar]:
    peers = ("django", "gunicorn")
    what = (
        f"of {TRANSCODES} transcodes under kills and SIGSTOP, those with one result within 2x their plain time + 60 s"
    )
    measure = partial(transcodes, runs, check)
    yield Bar("hub.clips-transcodes", what, ">=", TRANSCODES, measure, kind="exact", seeds=(0,), peers=peers)
    what = f"hostile clips that are not refused within {SECONDS:.0f} s of processor time and 2 GiB"
    yield Bar("hub.clips-hostile", what, "<=", 0, hostile, kind="exact", peers=peers)
