"""Reads photos and masks from folders: as training data, and to generate images from the user's own masks."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import shoestring as ss
from shoestring.core.errors import ConfigError, DataError
from shoestring.data.images import Images
from shoestring.data.pictures import read_picture
from shoestring_recipes.generation.styles import SIDE, STYLES, edge_map, swatches
from shoestring_recipes.images.files import read as read_clothes

READ = 512
"""Height and width to which a mask and its swatches are resized when read for a prediction."""
STRETCHED = 0.02
"""Maximum relative difference of the aspect ratios of a photo and its mask; larger differences are refused."""
SWATCH_SEED = 5


class Photos(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A data set of photos with masks; the swatch of each sample is the photo itself at twice the size.

    A sample has `inputs`, the mask, and `image`, the photo, uint8 (3, S, S); `swatch`, uint8 (3, 2 S, 2 S); `again`,
    the same photo, because no second photo has its style; and `style`, which is 0.
    """

    draws = False
    styles = ("photos",)

    def __init__(self, names: list[str], masks: Tensor, photos: Tensor) -> None:
        self.names, self.masks, self.photos = names, masks, photos
        self.fingerprint = Images(torch.cat([masks, resized(photos, masks.shape[-1])], 3), torch.zeros(len(masks)))
        self.fingerprint = self.fingerprint.fingerprint

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask, photo = self.masks[index], self.photos[index]
        image = resized(photo[None], mask.shape[-1])[0]
        return {"inputs": mask, "image": image, "again": image, "swatch": photo, "style": torch.tensor(0)}


def data(folder: str, size: int = SIDE, seed: int = 0, held_out: float = 0.1) -> tuple[Photos, Photos]:
    """Load training and held-out photos from the subfolders `photos` and `masks` of a folder. Photos and masks are
    paired by file name without suffix. The middle square of each file is used. All samples are held in memory, at 15
    bytes per pixel.

    Args:
        size: height and width of images, the same as the model's `size`.
        seed: seed of the choice of held-out photos.
        held_out: fraction of the photos that is held out; at least one photo is.

    Raises:
        DataError: there are fewer than two pairs, or some pairs cannot be used; the error names the first of these.
    """
    photos, masks = (_by_stem(Path(folder) / name) for name in ("photos", "masks"))
    names = sorted(photos.keys() & masks.keys())
    if len(names) < 2:
        raise DataError(
            f"`{folder}` has {len(names)} photos with masks, of {len(photos)} in `photos` and {len(masks)} in `masks`",
            hint="name a photo and its mask alike: photos/hill.jpg and masks/hill.png",
        )
    pairs, errors = [], []
    for name in names:
        try:
            pairs.append(_pair(photos[name], masks[name], size))
        except DataError as error:
            errors.append(error.args[0])
    if errors:
        some = "; ".join(errors[:3]) + ("; …" if len(errors) > 3 else "")
        raise DataError(f"{len(errors)} of {len(names)} pairs cannot be used: {some}", hint="mend or remove them")
    order = np.random.default_rng(seed).permutation(len(names)).tolist()
    count = min(max(1, round(held_out * len(names))), len(names) - 1)
    return _photos(names, pairs, order[count:]), _photos(names, pairs, order[:count])


def _photos(names: list[str], pairs: list[tuple[Tensor, Tensor]], chosen: list[int]) -> Photos:
    photos, masks = (torch.stack(column) for column in zip(*(pairs[index] for index in chosen), strict=True))
    return Photos([names[index] for index in chosen], masks, photos)


def _by_stem(folder: Path) -> dict[str, Path]:
    """Map the names of a folder's files, without suffixes, to their paths; hidden files are left out."""
    if not folder.is_dir():
        raise DataError(
            f"`{folder}` is no folder", hint="data.arguments.folder must contain the folders `photos` and `masks`"
        )
    return {path.stem: path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."}


def _pair(photo_path: Path, mask_path: Path, size: int) -> tuple[Tensor, Tensor]:
    """Read a photo at twice the size `size`, and its mask at the size `size`."""
    photo, mask = read_picture(photo_path), read_picture(mask_path)
    shapes = [one.shape[2] / one.shape[1] for one in (photo, mask)]
    if abs(shapes[0] / shapes[1] - 1) > STRETCHED:
        sizes = (f"{one.shape[2]} × {one.shape[1]}" for one in (photo, mask))
        raise DataError("`{}` has {} pixels and its mask {}".format(photo_path.name, *sizes))
    return resized(middle(photo)[None], 2 * size)[0], reduced(middle(mask), size)


def middle(picture: Tensor) -> Tensor:
    """Crop an image (C, H, W) to its middle square."""
    height, width = picture.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return picture[:, top : top + side, left : left + side]


def reduced(mask: Tensor, size: int) -> Tensor:
    """Resize a mask (C, S, S) without mixing colours."""
    return F.interpolate(mask[None].float(), (size, size), mode="nearest-exact")[0].to(torch.uint8)


def resized(pictures: Tensor, size: int) -> Tensor:
    """Resize images, uint8 (N, C, H, W)."""
    scaled = F.interpolate(pictures.float(), (size, size), mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).to(torch.uint8)


# -- files of one's own ------------------------------------------------------------------------------------------------


@lru_cache(8)
def styles_of(folder: Path, channels: Literal[1, 3]) -> Tensor:
    """Return the swatches for the files of a folder: uint8 (styles, channels, S, S). The swatches are the images in the
    folder `styles` beside `folder`. Without that folder, there is one grey swatch for each style in `STYLES`."""
    own = folder.resolve().parent / "styles"
    if own.is_dir():
        paths = _by_stem(own).values()
        if paths:
            return torch.cat([resized(middle(read_picture(path, channels))[None], READ) for path in paths])
    if channels == 3:
        raise ConfigError(f"there are no pictures in `{own}`", hint="put pictures of the style there")
    draws = [np.random.default_rng([SWATCH_SEED, number]) for number in range(len(STYLES))]
    return (255 * torch.from_numpy(swatches(range(len(STYLES)), draws))[:, None]).to(torch.uint8)


def read_drawing(path: Path) -> dict[str, Tensor]:
    """Read an image of clothes and return the map of its edges, once for each style, for models of grey images; see
    `read_mask`."""
    margin = (SIDE - 28) // 2
    clothes = F.pad(read_clothes(path)["inputs"], [margin] * 4)
    return _in_styles(edge_map(clothes[None] / 255)[0], styles_of(path.parent, 1))


def read_mask(path: Path) -> dict[str, Tensor]:
    """Read a mask in the colours of `model.colors`, and repeat the mask for each style: `inputs` and `swatch`, both
    uint8 (styles, 3, S, S)."""
    return _in_styles(reduced(middle(read_picture(path)), READ), styles_of(path.parent, 3))


def _in_styles(mask: Tensor, swatch: Tensor) -> dict[str, Tensor]:
    return {"inputs": mask.expand(len(swatch), -1, -1, -1), "swatch": swatch}


def describe(output: dict[str, Tensor], batch: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
    """Return the images generated from each mask, as one row for each style."""
    styles = batch["inputs"].shape[1]
    made, unknown = (output[key].unflatten(0, (-1, styles)) for key in ("made", "unknown"))
    rows = []
    for pictures, swatch, wrong in zip(made, batch["swatch"], unknown.any(1).tolist(), strict=True):
        pairs = enumerate(zip(pictures, swatch, strict=True), 1)
        drawn = [
            {"style": number, "swatch": ss.Picture(pixels=texture), "made": ss.Picture(pixels=one)}
            for number, (one, texture) in pairs
        ]
        rows.append([{"error": "the mask has a colour that is not in model.colors"}] if wrong else drawn)
    return rows
