"""Reads untrusted picture files with Pillow, to uint8 tensors of one or three channels."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import ConfigError, DataError
from shoestring.storage import foreign

_BYTES = 256 << 20
"""Maximum size of a file in bytes."""
_PIXELS = 100_000_000
"""Maximum number of pixels; a file of a few kB may claim any number."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def read_picture(path: Path, channels: Literal[1, 3] = 3) -> Tensor:
    """Read a picture as uint8 (channels, height, width), rotated or mirrored according to its EXIF orientation.

    Values of 16 bits are reduced to their upper 8 bits, only the first of several frames is read, and transparency is
    rendered on white.

    Raises:
        DataError: the file cannot be read, is not a picture of a known format (BMP, GIF, JPEG, PNG, PPM, TIFF, WebP),
            is damaged, or has too many pixels.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError("reading pictures needs Pillow", hint='pip install "shoestring[pictures]"') from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of damaged metadata, and of sizes, which are checked below
            content = BytesIO(foreign.read_bytes(path, _BYTES))
            picture = Image.open(content, formats=_FORMATS)  # own file: bytes that foreign.py has read
            if picture.width * picture.height > _PIXELS:
                raise ValueError(f"it has {picture.width:,} × {picture.height:,} pixels")
            picture = ImageOps.exif_transpose(picture)
            if picture.mode.startswith("I"):  # 16-bit integers; Pillow would clip them at 255
                values = np.asarray(picture).astype(np.int64)
                upper = values >> 8 if values.max(initial=0) > 255 else values
                picture = Image.fromarray(upper.clip(0, 255).astype(np.uint8))
            elif picture.mode == "F":
                raise ValueError("its pixels are real numbers")
            elif picture.has_transparency_data:
                white = Image.new("RGBA", picture.size, "white")
                picture = Image.alpha_composite(white, picture.convert("RGBA"))
            pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # a damaged file may raise any error in a decoder
        words = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, UnidentifiedImageError):  # the error's own text contains a memory address
            words = "its format is not known"
        raise DataError(f"`{path}` is no picture that can be read: {foreign.one_line(words)[:200]}") from error
    tensor = torch.from_numpy(pixels.copy())
    return tensor[None] if channels == 1 else tensor.permute(2, 0, 1).contiguous()
