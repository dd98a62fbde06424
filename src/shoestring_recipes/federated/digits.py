"""Digits of three domains, loaded from installed packages: scans, UCI's digits and rendered fonts, all of one size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.pictures import read_picture
from shoestring.naming import installed

SIDE, BOX = 16, 14
"""Height and width of images, and of the square that a digit fills, in pixels."""
DARK = 0.25
"""Brightness, relative to the brightest pixel, up to which a pixel is background."""
SCANS = Path("/usr/share/doc/opencv-doc/examples/data/digits.png")
"""5,000 handwritten digits of MNIST, from Debian's package opencv-doc."""
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique", "DejaVuSansMono",
    "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic", "STIXGeneral", "STIXGeneralBol",
    "STIXGeneralItalic", "STIXGeneralBolIta", "cmr10", "cmb10", "cmss10", "cmtt10", "cmti10",
)  # fmt: skip
"""Fonts that come with matplotlib, all under free licences."""
RENDERED = 3000
"""Number of rendered digits."""
MISSING = 'pip install "shoestring[federated]"'


class Domain(NamedTuple):
    """The digits of a domain."""

    images: Tensor
    """Bright digits on black, uint8 (N, 1, SIDE, SIDE)."""
    labels: Tensor
    """The digits, int64 (N,)."""
    groups: Tensor
    """Number of each sample's group, which is never divided among clients or between training and held-out samples: a
    font, or a hundred consecutive samples of UCI's digits, which are by a few writers. The writers of scans are
    unknown, so each scan is a group of its own."""


def normalised(pixels: np.ndarray) -> np.ndarray:
    """Crop a bright digit (H, W) to its bounding box and scale it to `BOX`, keeping its aspect ratio; returns uint8
    (SIDE, SIDE), or zeros for an empty image."""
    from PIL import Image

    pixels = pixels.astype(np.float32)
    ys, xs = np.nonzero(pixels > DARK * pixels.max())
    out = np.zeros((SIDE, SIDE), np.float32)
    if not len(ys):
        return out.astype(np.uint8)
    crop = pixels[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
    scale = BOX / max(crop.shape)
    height, width = (max(1, round(side * scale)) for side in crop.shape)
    small = np.asarray(Image.fromarray(crop).resize((width, height), Image.Resampling.BILINEAR))
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    out[top : top + height, left : left + width] = small
    return (255 * out / out.max()).round().astype(np.uint8)


def scans() -> Domain:
    """Handwritten digits that were scanned, from MNIST."""
    if not SCANS.is_file():
        raise ConfigError(f"the digits `{SCANS}` are missing", hint="apt install opencv-doc")
    sheet = read_picture(SCANS, 1)[0].numpy()
    if sheet.shape != (1000, 2000):
        raise DataError(f"`{SCANS}` has the shape {sheet.shape}, not (1000, 2000)")
    cells = sheet.reshape(50, 20, 100, 20).swapaxes(1, 2).reshape(-1, 20, 20)
    return _domain(list(cells), np.repeat(np.arange(10), 500), np.arange(len(cells)))


def uci() -> Domain:
    """Handwritten digits of 8 x 8 pixels, from scikit-learn (Alpaydin and Kaynak, 1998)."""
    if not installed("sklearn"):
        raise ConfigError("UCI's digits come with scikit-learn, which is not installed", hint=MISSING)
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return _domain(list(digits.images), digits.target, np.arange(len(digits.target)) // 100)


def fonts(count: int = RENDERED) -> Domain:
    """Digits in the fonts that come with matplotlib, rotated by up to 15 degrees."""
    from PIL import Image, ImageDraw, ImageFont

    spec = find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise ConfigError("the fonts come with matplotlib, which is not installed", hint=MISSING)
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    if lacking := [name for name in FONTS if not (folder / f"{name}.ttf").is_file()]:
        raise ConfigError(f"the font `{lacking[0]}` is not in `{folder}`", hint=MISSING)
    loaded = [ImageFont.truetype(folder / f"{name}.ttf", 40) for name in FONTS]
    rng = np.random.default_rng(0)
    chosen, labels = rng.integers(len(FONTS), size=count), rng.integers(10, size=count)
    pictures = []
    for font, digit, angle in zip(chosen, labels, rng.uniform(-15, 15, count), strict=True):
        picture = Image.new("L", (64, 64))
        ImageDraw.Draw(picture).text((32, 32), str(digit), font=loaded[font], fill=255, anchor="mm")
        pictures.append(np.asarray(picture.rotate(angle, Image.Resampling.BILINEAR)))
    return _domain(pictures, labels, chosen)


def _domain(pictures: list[np.ndarray], labels: np.ndarray, groups: np.ndarray) -> Domain:
    images = torch.from_numpy(np.stack([normalised(picture) for picture in pictures]))[:, None]
    if not images.flatten(1).any(1).all():
        raise DataError(f"digit number {int(images.flatten(1).any(1).long().argmin())} of a domain is empty")
    return Domain(images, torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(groups.astype(np.int64)))


DOMAINS: dict[str, Callable[[], Domain]] = {"scans": scans, "uci": uci, "fonts": fonts}


@cache
def domain(name: str) -> Domain:
    """The digits of a domain named in `DOMAINS`; loaded only once."""
    return DOMAINS[name]()
