"""Represents clips by four small frames: of emoji, over which a window moves, or of untrusted GIF, WebP and MP4 files.

Pillow reads GIF and WebP, ffmpeg reads MP4. For both, the size of a file, the pixels of a frame and the number of
frames are limited; for Pillow also the pixels of all frames together, for ffmpeg also memory and processor time.
"""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring import figures
from shoestring.core.errors import ConfigError, DataError
from shoestring.storage import foreign

SIDE = 24
"""Height and width of a frame in pixels."""
QUARTERS = 4
"""Number of frames that represent a clip, one from each quarter of the clip."""
STEPS = 16
"""Number of frames of an emoji's clip, in which a window goes round the four corners of the picture."""
LARGEST = 32 << 20
"""Maximum size of a file in bytes."""
PIXELS, FRAMES = 4096 * 2304, 1000
"""Maximum number of pixels of a frame, and of frames of a clip."""
WORK = 400_000_000
"""Maximum number of pixels of all frames of a GIF or WebP together."""
MEMORY, SECONDS = 2 << 30, 20
"""Address space of ffmpeg in bytes, and its processor time in seconds."""
DECODERS = "h264,hevc,vp9,libvpx-vp9,av1,libdav1d,mpeg4,mjpeg,aac,mp3,mp3float,opus,flac,ac3,alac"
"""Decoders that ffmpeg may use, including audio decoders, because it probes the sound before it reads frames."""
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}


def format_of(head: bytes) -> str:
    """Return the format of a file by its first bytes: `gif`, `webp`, `mp4`, or empty."""
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    return "mp4" if head[4:8] == b"ftyp" else ""


def quarters(frames: Tensor) -> Tensor:
    """Return the frames in the middle of each quarter of a clip, (frames, …) → (QUARTERS, …); short clips repeat
    some."""
    return frames[[(2 * quarter + 1) * len(frames) // (2 * QUARTERS) for quarter in range(QUARTERS)]]


def animated(picture: Tensor) -> Tensor:
    """Return the clip of an emoji's picture (3, H, W): a window that moves round its corners, (STEPS, 3, SIDE, SIDE).
    The frame in the middle of each quarter shows one corner, so each of the four shows pixels that no other does."""
    return torch.stack([_window(picture, step) for step in range(STEPS)])


def corners(pictures: Tensor) -> Tensor:
    """Return the frames that represent the clips of pictures (N, 3, H, W), which are `quarters(animated(picture))` for
    each picture: (N, QUARTERS, 3, SIDE, SIDE)."""
    return torch.stack([_window(pictures, step) for step in quarters(torch.arange(STEPS)).tolist()], 1)


def _window(pictures: Tensor, step: int) -> Tensor:
    down, right = pictures.shape[-2] - SIDE, pictures.shape[-1] - SIDE
    path, pause = [(0, 0), (0, right), (down, right), (down, 0)], STEPS // QUARTERS
    corner, part = divmod((step - pause // 2) % STEPS, pause)
    (top, left), (below, beside) = path[corner], path[(corner + 1) % QUARTERS]
    top, left = top + (below - top) * part // pause, left + (beside - left) * part // pause
    return pictures[..., top : top + SIDE, left : left + SIDE]


def read_clip(path: Path) -> Tensor:
    """Read a GIF, WebP or MP4 file as the middle squares of four frames, uint8 (QUARTERS, 3, SIDE, SIDE).

    Transparency is rendered on white; a still picture is a clip of one frame.

    Raises:
        DataError: the file cannot be read, has another format, is damaged, or exceeds a limit.
        ConfigError: reading the file needs a program or package that is not installed.
    """
    try:
        content = foreign.read_bytes(path, LARGEST)
    except OSError as error:
        raise DataError(f"`{path.name}` cannot be read: {error.strerror or error}") from error
    kind = format_of(content[:16])
    if not kind:
        raise DataError(f"`{path.name}` is no GIF, WebP or MP4")
    return quarters(_by_ffmpeg(path) if kind == "mp4" else _by_pillow(content, path.name))


def _by_pillow(content: bytes, name: str) -> Tensor:
    """Decode all frames of a GIF or WebP, (frames, 3, SIDE, SIDE)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("reading clips needs Pillow", hint='pip install "shoestring[reply]"') from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged metadata, and about sizes, which `_frames` checks
            clip = Image.open(BytesIO(content), formats=("GIF", "WEBP"))
            frames = [_small(frame) for frame in _frames(clip, name)]
        if not frames:
            raise DataError(f"`{name}` is damaged: it has no frame")
        return torch.stack(frames)
    except DataError:
        raise
    except Exception as error:  # a damaged file may raise any error in a decoder
        reason = str(error).partition(" <_io")[0][:200] or type(error).__name__  # without an address in memory
        raise DataError(f"`{name}` is damaged: {foreign.one_line(reason)}") from error


def _frames(clip: Any, name: str) -> Iterator[Any]:
    """Yield the same Pillow image once for each of its frames, moved to that frame; frames may differ in size."""
    total = 0
    for number in range(FRAMES + 1):
        try:
            clip.seek(number)
        except EOFError:
            return
        pixels = clip.width * clip.height
        total += pixels
        if pixels > PIXELS:
            raise DataError(f"`{name}` has {clip.width:,} × {clip.height:,} pixels; at most {PIXELS:,} are read")
        if number == FRAMES or total > WORK:
            raise DataError(f"`{name}` has more than {number:,} frames of {pixels:,} pixels, which are too many")
        yield clip


def _small(frame: Any) -> Tensor:
    from PIL import Image, ImageOps

    coloured = frame.convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")
    pixels = np.asarray(ImageOps.fit(flat, (SIDE, SIDE), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _by_ffmpeg(path: Path) -> Tensor:
    """Decode all frames of an MP4, (frames, 3, SIDE, SIDE)."""
    missing = [tool for tool in ("ffmpeg", "prlimit") if shutil.which(tool, path=_ENVIRONMENT["PATH"]) is None]
    if missing:
        raise ConfigError(f"`{path.name}` needs {missing[0]}, which is not installed", hint="apt install ffmpeg")
    bounds = ["prlimit", f"--as={MEMORY}", f"--cpu={SECONDS}", "--core=0", "--"]
    guards = ["-v", "error", "-nostdin", "-protocol_whitelist", "file", "-codec_whitelist", DECODERS]
    source = ["-max_pixels", str(PIXELS), "-threads", "1", "-f", "mov", "-i", f"file:{path.resolve()}"]
    shape = f"scale={SIDE}:{SIDE}:force_original_aspect_ratio=increase,crop={SIDE}:{SIDE}"
    output = ["-map", "0:v:0", "-vf", shape, "-frames:v", str(FRAMES + 1), "-pix_fmt", "rgb24", "-f", "rawvideo"]
    command = [*bounds, "ffmpeg", *guards, *source, *output, "pipe:1"]
    try:
        done = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, timeout=3 * SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"`{path.name}` takes longer than {figures.duration(3 * SECONDS)} to read") from error
    count = len(done.stdout) // (3 * SIDE * SIDE)
    if done.returncode or not count:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        reason = foreign.one_line(lines[-1])[:200] if lines else f"ffmpeg ended with code {done.returncode}"
        raise DataError(f"`{path.name}` is damaged or too large: {reason.replace(str(path.resolve()), path.name)}")
    if count > FRAMES:
        raise DataError(f"`{path.name}` has more than {FRAMES:,} frames, which are too many")
    pixels = np.frombuffer(done.stdout[: count * 3 * SIDE * SIDE], np.uint8).reshape(count, SIDE, SIDE, 3)
    return torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)


def gif(frames: Tensor, enlarged: int = 4, milliseconds: int = 120) -> bytes:
    """Return frames, uint8 (frames, 3, H, W), as a GIF that repeats without end.

    Args:
        enlarged: factor by which height and width are enlarged.
    """
    from PIL import Image

    shown = [Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames]
    shown = [one.resize((enlarged * one.width, enlarged * one.height), Image.Resampling.BICUBIC) for one in shown]
    content = BytesIO()
    shown[0].save(content, "GIF", save_all=True, append_images=shown[1:], duration=milliseconds, loop=0)
    return content.getvalue()
