"""Loads free photos that come with Debian's opencv-doc, scikit-image and scikit-learn, and crops them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.pictures import read_picture

SMALLEST, LARGEST = 200, 640
"""Minimum length of a photo's shorter side, and length to which longer sides are reduced, in pixels."""
SIDE = 96
"""Side of a crop in pixels."""
_FLAT = 12.0
"""Standard deviation of grey values below which a crop counts as empty."""
_DRAWS = 50


@dataclass(frozen=True)
class PhotoPackage:
    """A package that contains photos."""

    hint: str
    """Command that installs the package."""
    root: str
    """Absolute path of the folder with the photos, or a Python package's name and the folder inside the package."""
    files: str
    """File names of the photos, separated by spaces."""

    def folder(self) -> Path:
        if self.root.startswith("/"):
            return Path(self.root)
        package, _, below = self.root.partition("/")
        spec = find_spec(package)
        return Path(spec.origin).parent / below if spec and spec.origin else Path(package)


PACKAGES = {
    "opencv-doc": PhotoPackage(
        "apt install opencv-doc",
        "/usr/share/doc/opencv-doc/examples/data",
        "Blender_Suzanne1.jpg HappyFish.jpg WindowsLogo.jpg aero1.jpg aero3.jpg aloeL.jpg apple.jpg baboon.jpg "
        "basketball1.png board.jpg building.jpg cards.png chicky_512.png ela_original.jpg fruits.jpg gradient.png "
        "graf1.png home.jpg leuvenA.jpg messi5.jpg orange.jpg rubberwhale1.png smarties.png "
        "squirrel_cls.jpg stuff.jpg tmpl.png",
    ),
    "scikit-image": PhotoPackage(
        'pip install "shoestring[quality]"',
        "skimage/data",
        "astronaut.png brick.png camera.png chelsea.png coffee.png grass.png gravel.png hubble_deep_field.jpg "
        "moon.png retina.jpg rocket.jpg",
    ),
    "scikit-learn": PhotoPackage(
        'pip install "shoestring[quality]"', "sklearn/datasets/images", "china.jpg flower.jpg"
    ),
}


@cache
def photos() -> dict[str, Tensor]:
    """Map the name of each photo's file to the photo in grey, uint8 (H, W), with sides from `SMALLEST` to `LARGEST`.

    Raises:
        ConfigError: a package is not installed or does not contain a photo.
    """
    by_name: dict[str, Tensor] = {}
    for package, source in PACKAGES.items():
        for name in source.files.split():
            path = source.folder() / name
            if not path.is_file():
                raise ConfigError(f"`{package}` is not installed: the photo `{path}` is missing", hint=source.hint)
            by_name[name] = reduced(read_picture(path, 1)[0])
    return {name: photo for name, photo in by_name.items() if min(photo.shape) >= SMALLEST}


def reduced(photo: Tensor) -> Tensor:
    """Reduce a photo, uint8 (H, W), so that no side is longer than `LARGEST`."""
    scale = LARGEST / max(photo.shape)
    if scale >= 1:
        return photo
    size = [max(1, int(side * scale)) for side in photo.shape]
    small = interpolate(photo[None, None].float(), size, mode="bicubic", antialias=True)
    return small[0, 0].clamp(0, 255).round().to(torch.uint8)


def crops(photo: Tensor, count: int, draws: np.random.Generator) -> Tensor:
    """Return at most `count` random crops of a photo, uint8 (crops, `SIDE`, `SIDE`), without crops that are nearly
    empty."""
    chosen = []
    for _ in range(_DRAWS):
        top, left = (int(draws.integers(side - SIDE + 1)) for side in photo.shape)
        crop = photo[top : top + SIDE, left : left + SIDE]
        if len(chosen) < count and crop.float().std() >= _FLAT:
            chosen.append(crop)
    return torch.stack(chosen) if chosen else photo.new_zeros(0, SIDE, SIDE)


def grid(picture: Tensor, crops: int) -> Tensor:
    """Return crops of a grey image on an even square grid, row by row: uint8 (crops, `SIDE`, `SIDE`).

    Raises:
        DataError: the image is smaller than a crop.
    """
    height, width = picture.shape
    if min(height, width) < SIDE:
        raise DataError(f"it has {width} × {height} pixels, but at least {SIDE} × {SIDE} are needed")
    tops, lefts = (torch.linspace(0, side - SIDE, round(crops**0.5)).int().tolist() for side in (height, width))
    return torch.stack([picture[top : top + SIDE, left : left + SIDE] for top in tops for left in lefts])
