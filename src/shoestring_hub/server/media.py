"""Converts clips with ffmpeg: one MP4 that every browser plays, and a poster. All of it runs in the sandbox.

The format of a file is decided by its first bytes, and ffmpeg is told to read it as this format. Otherwise ffmpeg
would guess the format from the content, and some formats are lists of other files to read. Sizes are read from the
headers first, and decoders refuse larger frames, so a small file cannot unpack to one that fills the memory or takes
hours.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import DataError
from shoestring.storage import foreign
from shoestring.storage.fields import Fields
from shoestring_hub.server.sandbox import ENVIRONMENT, INSIDE, SandboxLimits, command

FORMATS = {
    "mov": "MP4 or QuickTime",
    "matroska": "Matroska or WebM",
    "gif": "GIF",
    "avi": "AVI",
}
"""Accepted formats, by the name of ffmpeg's demuxer."""
HEAD = 16
"""Number of bytes at the start of a file that decide its format."""
DECODERS = (
    "h264,hevc,vp8,vp9,libvpx,libvpx-vp9,av1,libdav1d,mpeg4,mpeg2video,mjpeg,gif,png,rawvideo,ffv1,prores,"
    "aac,mp3,mp3float,opus,libopus,vorbis,flac,ac3,alac,pcm_s16le,pcm_s16be,pcm_s24le,pcm_u8,pcm_f32le"
)
PIXELS, SIDE, SMALLEST = 4096 * 2304, 8192, 16
"""Maximum pixels of a frame, and maximum and minimum pixels of each of its sides."""
SECONDS, FRAMES = 3600, 60 * 3600
"""Maximum length of a clip: an hour, at 60 frames a second."""
WORK = 1920 * 1080 * FRAMES
"""Maximum number of pixels of all frames of a clip together."""
STREAMS = 32
"""Maximum number of streams in a file."""
STALL = 20.0
"""Seconds without any progress after which ffmpeg is ended."""
PROBING = SandboxLimits(memory=1 << 30, seconds=15, file_size=1 << 20)
CONVERTING = SandboxLimits()
_TICK = 0.25  # seconds between checks of a running program
_TEXT = 1 << 20  # maximum bytes of a program's output
_PICTURE_SIZE = re.compile(r"Picture size (\d{1,10})x(\d{1,10}) (?:is invalid|exceeds)")
_SCALED = (
    "scale=w='if(gte(iw,ih),min(1920,iw),min(1080,iw))':h='if(gte(iw,ih),min(1080,ih),min(1920,ih))'"
    ":force_original_aspect_ratio=decrease:force_divisible_by=2,setsar=1,format=yuv420p"
)


class RejectedError(Exception):
    """The clip cannot be converted, now or later; the message is for the person who sent it."""


class StoppedError(Exception):
    """ffmpeg stalled, was killed, or found the disk full: another attempt may succeed."""


Tick = Callable[[float], None]
"""Called a few times a second with the fraction that is done; it may raise to end the conversion."""


@dataclass(frozen=True)
class ClipFacts:
    """Properties of a clip from its headers; a number that the headers lack is 0."""

    width: int
    height: int
    seconds: float
    frames: int
    audio: bool


def format_of(head: bytes) -> str:
    """The name of ffmpeg's demuxer for a file that begins with these bytes; empty if the format is not accepted."""
    if head[4:8] == b"ftyp":
        return "mov"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    return "avi" if head.startswith(b"RIFF") and head[8:12] == b"AVI " else ""


def convert(folder: Path, tick: Tick) -> ClipFacts:
    """Convert `clip/source` in a folder for the sandbox to `clip/out/video.mp4`, and draw `clip/out/poster.jpg`.

    Raises:
        RejectedError: the file is not an accepted clip, or is damaged.
        StoppedError: ffmpeg was interrupted.
    """
    source, video = folder / "clip" / "source", folder / "clip" / "out" / "video.mp4"
    video.parent.mkdir()
    with foreign.open_file(source) as file:
        reader = format_of(file.read(HEAD))
    if not reader:
        raise RejectedError(f"the file is none of {', '.join(FORMATS.values())}")
    facts = probe(folder, reader, "source", tick)
    check(facts)
    progress = _Progress(video, facts.seconds)
    _ffmpeg(folder, _conversion(reader), tick, progress)
    result = probe(folder, "mov", "out/video.mp4", lambda _: tick(1.0))
    if progress.seconds > SECONDS or progress.frames > FRAMES:
        raise RejectedError(f"it is longer than its headers say; at most {SECONDS // 60} minutes are accepted")
    if result.seconds < 0.9 * facts.seconds - 0.5:
        lengths = f"its headers announce {facts.seconds:.1f} s, but only {result.seconds:.1f} s can be read"
        raise RejectedError(f"the file is damaged, or its end is missing: {lengths}")
    at = f"{min(1.0, result.seconds / 2):.3f}"
    poster = ["-ss", at, *_input("mov", "out/video.mp4"), "-frames:v", "1", "-vf", "scale='min(640,iw)':-2"]
    poster += ["-q:v", "4", "-f", "image2", "-update", "1", str(INSIDE / "out" / "poster.jpg")]
    _ffmpeg(folder, poster, lambda _: tick(1.0), _Progress(folder / "clip" / "out" / "poster.jpg", 0))
    return result


def check(facts: ClipFacts) -> None:
    """Refuse a clip whose headers announce more than the hub converts.

    Raises:
        RejectedError: the clip is too large, too small or too long; the message says what is accepted.
    """
    width, height = facts.width, facts.height
    if min(width, height) < SMALLEST or max(width, height) > SIDE or width * height > PIXELS:
        raise _of_size(width, height)
    if facts.seconds > SECONDS:
        raise RejectedError(f"it takes {facts.seconds / 60:,.0f} minutes; at most {SECONDS // 60} are accepted")
    if facts.frames > FRAMES or width * height * facts.frames > WORK:
        raise RejectedError(f"it has {facts.frames:,} pictures of {width:,} × {height:,} pixels, which are too many")


def _of_size(width: int, height: int) -> RejectedError:
    accepted = f"sides from {SMALLEST} to {SIDE:,} and at most {PIXELS:,} in all are accepted"
    return RejectedError(f"its pictures have {width:,} × {height:,} pixels; {accepted}")


def probe(folder: Path, reader: str, name: str, tick: Tick) -> ClipFacts:
    """Read the headers of a file in a folder for the sandbox.

    Raises:
        RejectedError: the file is damaged, or holds no video or too many streams.
    """
    shown = "stream=codec_type,width,height,avg_frame_rate,nb_frames,duration:format=duration,nb_streams"
    arguments = ["ffprobe", *_guards(reader), "-show_entries", shown, "-of", "json", str(INSIDE / name)]
    path = folder / "clip" / name
    code, text, problem = _run(command(folder, arguments, PROBING), tick, _Progress(path, 0))
    if code or _PICTURE_SIZE.search(problem):
        raise _error(code, problem)
    try:
        return _facts(Fields(foreign.parse_json(text), "ffprobe's answer", DataError))
    except (ValueError, DataError) as error:
        raise RejectedError(f"its headers cannot be understood: {error}") from error


def _facts(answer: Fields) -> ClipFacts:
    streams = [Fields(stream, "a stream", DataError) for stream in answer.tables("streams")]
    if len(streams) > STREAMS:
        raise RejectedError(f"it has {len(streams)} streams; at most {STREAMS} are accepted")
    video = next((stream for stream in streams if stream.get("codec_type") == "video"), None)
    if video is None:
        raise RejectedError("it holds no video")
    lengths = [_number(video.get("duration")), _number(answer.entries("format").get("duration"))]
    seconds = max(lengths)
    rate, _, over = str(video.get("avg_frame_rate")).partition("/")
    per_second = _number(rate) / (_number(over) or 1.0)
    frames = _number(video.get("nb_frames")) or seconds * min(per_second, 60.0)
    return ClipFacts(
        width=video.count("width", 0, least=0),
        height=video.count("height", 0, least=0),
        seconds=seconds,
        frames=int(frames),
        audio=any(stream.get("codec_type") == "audio" for stream in streams),
    )


def _number(text: object) -> float:
    """A number that ffprobe prints as text; 0 if there is none."""
    try:
        number = float(str(text))
    except ValueError:
        return 0.0
    return number if 0 < number < 1e15 else 0.0


# -- ffmpeg -----------------------------------------------------------------------------------------------------------


def _guards(reader: str) -> list[str]:
    """Options before an input of ffmpeg: the protocols, decoders and frame size that are allowed, and the format."""
    allowed = ["-protocol_whitelist", "file", "-codec_whitelist", DECODERS, "-max_pixels", str(PIXELS)]
    return ["-v", "error", "-hide_banner", *allowed, "-f", reader]


def _input(reader: str, name: str) -> list[str]:
    return [*_guards(reader), "-threads", "2", "-i", str(INSIDE / name)]


def _conversion(reader: str) -> list[str]:
    video = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-maxrate", "8M", "-bufsize", "16M"]
    audio = ["-c:a", "aac", "-b:a", "128k", "-ac", "2", "-ar", "48000"]
    chosen = ["-map", "0:v:0", "-map", "0:a:0?", "-sn", "-dn", "-map_metadata", "-1", "-map_chapters", "-1"]
    ends = ["-fps_mode", "vfr", "-frames:v", str(FRAMES + 1), "-t", str(SECONDS + 1)]
    told = ["-progress", "pipe:1", "-stats_period", "0.5"]
    form = ["-movflags", "+faststart", "-threads", "2", "-filter_threads", "1", "-f", "mp4"]
    filters = ["-vf", _SCALED]
    output = str(INSIDE / "out" / "video.mp4")
    return [*_input(reader, "source"), *chosen, *filters, *ends, *video, *audio, *told, *form, output]


class _Progress:
    """Progress of a running program, as its output and the file that it writes show."""

    def __init__(self, output: Path, total: float) -> None:
        self.seconds, self.frames = 0.0, 0
        self._output, self._total, self._rest = output, total, b""

    def read(self, data: bytes) -> None:
        """Parse what `-progress` has printed since the last call."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, text = line.decode(errors="replace").partition("=")
            if name == "out_time_us":
                self.seconds = max(self.seconds, _number(text) / 1e6)
            elif name == "frame":
                self.frames = max(self.frames, int(_number(text)))

    @property
    def fraction(self) -> float:
        """The fraction that is done; 0 if the length is not known."""
        return min(0.99, self.seconds / self._total) if self._total else 0.0

    def sign(self) -> tuple[float, ...]:
        """Numbers that change as long as the program works."""
        try:
            written = self._output.stat()
        except OSError:
            return self.seconds, self.frames
        return self.seconds, self.frames, written.st_size, written.st_mtime


def _ffmpeg(folder: Path, arguments: Sequence[str], tick: Tick, progress: _Progress) -> None:
    run = command(folder, ["ffmpeg", "-nostdin", "-y", *arguments], CONVERTING)
    code, _, problem = _run(run, tick, progress)
    if code:
        raise _error(code, problem)


def _error(code: int, problem: str) -> Exception:
    """The error for a failed program: the clip is at fault, unless a signal, the disk or the sandbox ended it."""
    lines = [line for line in problem.splitlines() if line.strip() and "Last message repeated" not in line]
    last = foreign.one_line(lines[-1]).replace(f"{INSIDE}/", "")[:200] if lines else f"it ended with code {code}"
    if "No space left on device" in problem:
        return StoppedError("the hub's disk is full")
    if size := _PICTURE_SIZE.search(problem):
        return _of_size(int(size[1]), int(size[2]))
    if code == -signal.SIGXCPU or (code == 255 and not lines):  # ffmpeg exits with 255 on this signal
        return RejectedError(f"converting it takes more than {CONVERTING.seconds // 3600} hours of processor time")
    if code < 0:
        return StoppedError(f"ffmpeg was ended by signal {-code}")
    if last.partition(":")[0] in ("unshare", "mount", "umount", "pivot_root", "prlimit", "setpriv", "sh"):
        return StoppedError(f"the sandbox did not start: {last}")
    return RejectedError(f"ffmpeg cannot read it: {last}")


def _run(arguments: Sequence[str], tick: Tick, progress: _Progress) -> tuple[int, bytes, str]:
    """Run a program; returns its exit code, the first bytes of its output, and the last of its errors.

    Raises:
        StoppedError: the program made no progress for `STALL` seconds.
    """
    output, errors = bytearray(), bytearray()
    sign, since = progress.sign(), time.monotonic()
    with (
        subprocess.Popen(
            arguments, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ)
        try:
            while selector.get_map():
                for key, _ in selector.select(_TICK):
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stdout:
                        progress.read(data)
                        output += data[: _TEXT - len(output)]
                    else:
                        errors = (errors + data)[-4096:]
                tick(progress.fraction)
                if (now := progress.sign()) != sign:
                    sign, since = now, time.monotonic()
                elif time.monotonic() - since > STALL:
                    raise StoppedError(f"ffmpeg made no progress for {STALL:.0f} s")
        except BaseException:
            process.kill()  # its namespaces end with it
            raise
    return process.returncode, bytes(output), errors.decode(errors="replace")
