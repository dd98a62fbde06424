"""Reads people's ratings of the images in six public data sets, in the form in which their authors publish them.

The data sets are free for research and can be downloaded from their authors' pages. Set `run.data` to
`…public_sets:data`, and pass the set's name and folder as arguments:

    [data.arguments]
    name = "tid2013"
    folder = "/data/tid2013"
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError, DataError, nearest
from shoestring.data.pictures import read_picture
from shoestring.storage import foreign
from shoestring.training.held_out import HeldOut
from shoestring_recipes.quality.measures import agreement
from shoestring_recipes.quality.photos import grid

_LIMIT = 64 << 20


class Rated(NamedTuple):
    """An image with its rating."""

    path: Path
    rating: float
    """Mean rating by people, in the unit of the data set."""
    content: str
    """Identifier of the scene; images of one scene are never on both sides of a split."""


@dataclass(frozen=True)
class PublicSet:
    """The layout of a data set, and the range of its ratings."""

    read: Callable[[Path], Iterator[Rated]]
    best: float
    """Rating of a perfect image."""
    worst: float
    """Rating that counts as quality 0; higher than `best` if the set rates the loss of quality."""


def _table(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    """Read the rows of a table as dictionaries by the names in the first row, without spaces around names and
    values."""
    rows = csv.DictReader(foreign.read_text(path, _LIMIT).splitlines(), delimiter=delimiter, skipinitialspace=True)
    return [{str(key).strip(): str(value).strip() for key, value in row.items()} for row in rows]


def _matlab(path: Path) -> dict[str, Any]:
    """Read the arrays in a MATLAB file."""
    from scipy.io import loadmat

    return loadmat(BytesIO(foreign.read_bytes(path, _LIMIT)))  # own file: bytes that foreign.py has read


def _live(root: Path) -> Iterator[Rated]:
    """Read LIVE, release 2, which stores the ratings of all five kinds of distortion in one row, kind after kind; omits
    undistorted images."""
    counts = {"jp2k": 227, "jpeg": 233, "wn": 174, "gblur": 174, "fastfading": 174}
    scores, names = _matlab(root / "dmos.mat"), _matlab(root / "refnames_all.mat")["refnames_all"].ravel()
    paths = [root / kind / f"img{number + 1}.bmp" for kind, count in counts.items() for number in range(count)]
    for path, name, rating, original in zip(paths, names, scores["dmos"].ravel(), scores["orgs"].ravel(), strict=True):
        if not original:
            yield Rated(path, float(rating), str(name.item()))


def _csiq(root: Path) -> Iterator[Rated]:
    """Read CSIQ, from the sheet `all_by_image` of csiq.DMOS.xlsx, saved as csiq.DMOS.csv."""
    forms = {
        "noise": "AWGN",
        "jpeg": "JPEG",
        "jpeg 2000": "jpeg2000",
        "fnoise": "fnoise",
        "blur": "BLUR",
        "contrast": "contrast",
    }
    for row in _table(root / "csiq.DMOS.csv"):
        form = forms[row["dst_type"].lower()]
        folder = {"AWGN": "awgn", "JPEG": "jpeg", "BLUR": "blur"}.get(form, form)
        name = f"{row['image']}.{form}.{row['dst_lev']}.png"
        yield Rated(root / "dst_imgs" / folder / name, float(row["dmos"]), row["image"])


def _tid2013(root: Path) -> Iterator[Rated]:
    for line in foreign.read_text(root / "mos_with_names.txt", _LIMIT).split("\n"):
        if line.strip():
            rating, name = line.split()
            yield Rated(root / "distorted_images" / name, float(rating), name[:3].upper())


def _kadid10k(root: Path) -> Iterator[Rated]:
    for row in _table(root / "dmos.csv"):
        yield Rated(root / "images" / row["dist_img"], float(row["dmos"]), row["ref_img"])


def _live_challenge(root: Path) -> Iterator[Rated]:
    """Read LIVE In the Wild, in which every image shows its own scene; omits the first seven images, which trained the
    raters."""
    names = _matlab(root / "Data/AllImages_release.mat")["AllImages_release"].ravel()[7:]
    ratings = _matlab(root / "Data/AllMOS_release.mat")["AllMOS_release"].ravel()[7:]
    for name, rating in zip(names, ratings, strict=True):
        yield Rated(root / "Images" / str(name.item()), float(rating), str(name.item()))


def _koniq10k(root: Path) -> Iterator[Rated]:
    for row in _table(root / "koniq10k_scores_and_distributions.csv"):
        yield Rated(root / "1024x768" / row["image_name"], float(row["MOS"]), row["image_name"])


SETS = {
    "live": PublicSet(_live, best=0, worst=100),
    "csiq": PublicSet(_csiq, best=0, worst=1),
    "tid2013": PublicSet(_tid2013, best=9, worst=0),
    "kadid10k": PublicSet(_kadid10k, best=5, worst=1),
    "live-challenge": PublicSet(_live_challenge, best=100, worst=0),
    "koniq10k": PublicSet(_koniq10k, best=5, worst=1),
}


def ratings(name: str, folder: str | Path) -> list[Rated]:
    """Read the rated images of a data set, with ratings rescaled to quality: 0 is the worst and 1 the best.

    Raises:
        ConfigError: there is no data set with this name.
        DataError: files are missing or have another format.
    """
    if name not in SETS:
        raise ConfigError(f"there is no public set `{name}`", hint=nearest(name, SETS))
    chosen, root = SETS[name], Path(folder)
    hint = "name the folder of the unpacked set"
    try:
        pictures = list(chosen.read(root))
        for rated in pictures:
            foreign.check_within(rated.path, root)
            if not np.isfinite(rated.rating):
                raise ValueError(f"the rating of {rated.path.name} is not a finite number")
    except OSError as error:
        raise DataError(f"{name}: `{error.filename}`: {error.strerror}", hint=hint) from error
    except (KeyError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        message = f"`{root}` is not laid out as {name} is published: {foreign.one_line(str(error))[:200]}"
        raise DataError(message, hint=hint) from error
    if not pictures:
        raise DataError(f"`{root}` has no ratings of {name}", hint=hint)
    span = chosen.best - chosen.worst
    return [rated._replace(rating=(rated.rating - chosen.worst) / span) for rated in pictures]


class RatedCrops(Dataset[dict[str, Tensor]]):
    """A data set of crops of rated images; a sample has `inputs`, uint8 (crops, H, W), and `quality`, (crops,).

    Args:
        rated: the rated images.
        crops: number of crops per image on an even grid, a square number.
    """

    draws = False

    def __init__(self, rated: Sequence[Rated], crops: int) -> None:
        self.rated, self.crops = rated, crops
        self.quality = torch.tensor([one.rating for one in rated])
        self.fingerprint = f"{len(rated)} {crops} {self.quality.double().sum():.9f}"

    def __len__(self) -> int:
        return len(self.rated)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = grid(read_picture(self.rated[index].path, 1)[0], self.crops)
        return {"inputs": inputs, "quality": self.quality[index].expand(len(inputs))}


def data(
    name: str, folder: str, fold: int = 0, folds: int = 5, seed: int = 0, crops: int = 16
) -> tuple[RatedCrops, RatedCrops]:
    """Return a public data set's training part and its held-out part, split by scene.

    Args:
        name: a name in `SETS`. folder: folder of the unpacked data set.
        fold: index of the part that is held out. folds: number of parts. seed: seed of the split.
        crops: number of crops per image, a square number.
    """
    pictures = ratings(name, folder)
    contents = sorted({rated.content for rated in pictures})
    if not 0 <= fold < folds <= len(contents):
        raise ConfigError(
            f"{len(contents)} scenes have no fold {fold} of {folds}", hint="use 2 to 10 folds, counted from 0"
        )
    held_out = {contents[place] for place in np.random.default_rng(seed).permutation(len(contents))[fold::folds]}
    sides = [[rated for rated in pictures if (rated.content in held_out) is held] for held in (False, True)]
    return RatedCrops(sides[0], crops), RatedCrops(sides[1], crops)


def measure(model: nn.Module, held_out: HeldOut) -> dict[str, float]:
    """Measure the agreement of the mean score of an image's crops with people's ratings, for `run.evaluate`."""
    rows = [held_out.forward(model, batch).mean(1) for batch in held_out]
    scores = held_out.gather(torch.cat(rows)).double().cpu().numpy()
    samples = held_out.dataset
    assert isinstance(samples, RatedCrops)
    return agreement(scores, samples.quality[: len(scores)].double().numpy())
