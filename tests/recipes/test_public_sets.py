"""The six public sets of rated pictures, as small folders that are laid out as they are published."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.quality import public_sets
from shoestring_recipes.quality.public_sets import SETS, data, ratings


def picture(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (100, 120, 3), np.uint8)).save(path)


def table(path, *rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def cell(*texts):
    """A cell array of strings, as MATLAB has them."""
    made = np.empty((len(texts), 1), object)
    made[:, 0] = texts
    return made


def live(root):
    counts = {"jp2k": 227, "jpeg": 233, "wn": 174, "gblur": 174, "fastfading": 174}
    for kind, count in counts.items():
        for number in range(count):
            (root / kind).mkdir(exist_ok=True)
            (root / kind / f"img{number + 1}.bmp").touch()
    originals = np.ones((1, 982))
    originals[0, [0, 227, 981]] = 0
    rating = np.zeros((1, 982))
    rating[0, [0, 227, 981]] = 20, 50, 80
    savemat(root / "dmos.mat", {"dmos": rating, "orgs": originals})
    savemat(root / "refnames_all.mat", {"refnames_all": cell(*(f"scene{number % 5}.bmp" for number in range(982)))})
    return {"jp2k/img1.bmp": 0.8, "jpeg/img1.bmp": 0.5, "fastfading/img174.bmp": 0.2}


def csiq(root):
    head = ("image", "dst_idx", "dst_type", "dst_lev", "dmos_std", "dmos")
    kinds = ("noise", "jpeg", "jpeg 2000", "fnoise", "blur", "contrast")
    table(root / "csiq.DMOS.csv", head, *((1600, 1, kind, 2, 0.1, number / 10) for number, kind in enumerate(kinds)))
    names = ("awgn/1600.AWGN", "jpeg/1600.JPEG", "jpeg2000/1600.jpeg2000", "fnoise/1600.fnoise", "blur/1600.BLUR")
    wanted = {f"dst_imgs/{name}.2.png": 1 - n / 10 for n, name in enumerate((*names, "contrast/1600.contrast"))}
    for name in wanted:
        picture(root / name)
    return wanted


def tid2013(root):
    picture(root / "distorted_images/I01_01_1.bmp")
    picture(root / "distorted_images/i02_24_5.bmp")
    (root / "mos_with_names.txt").write_text("4.5 I01_01_1.bmp\n9.0 i02_24_5.bmp\n")
    return {"distorted_images/I01_01_1.bmp": 0.5, "distorted_images/i02_24_5.bmp": 1.0}


def kadid10k(root):
    table(root / "dmos.csv", ("dist_img", "ref_img", "dmos", "var"), ("I01_01_01.png", "I01.png", 3.0, 0.5))
    picture(root / "images/I01_01_01.png")
    return {"images/I01_01_01.png": 0.5}


def live_challenge(root):
    (root / "Data").mkdir()
    names = [*(f"t{number}.jpg" for number in range(1, 8)), "10.bmp", "11.bmp"]
    savemat(root / "Data/AllImages_release.mat", {"AllImages_release": cell(*names)})
    savemat(root / "Data/AllMOS_release.mat", {"AllMOS_release": np.arange(9.0)[None] * 10})
    picture(root / "Images/10.bmp")
    picture(root / "Images/11.bmp")
    return {"Images/10.bmp": 0.7, "Images/11.bmp": 0.8}


def koniq10k(root):
    table(root / "koniq10k_scores_and_distributions.csv", ("image_name", "c1", "MOS"), ("7.jpg", 0, 2.0))
    picture(root / "1024x768/7.jpg")
    return {"1024x768/7.jpg": 0.25}


LAYOUTS = dict(zip(SETS, (live, csiq, tid2013, kadid10k, live_challenge, koniq10k), strict=True))


@pytest.mark.parametrize("name", SETS)
def test_ratings_are_read_as_quality(name, tmp_path):
    wanted = LAYOUTS[name](tmp_path)
    found = {str(one.path.relative_to(tmp_path)): one.rating for one in ratings(name, tmp_path)}
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("name", SETS)
def test_an_incomplete_set_is_refused_in_one_line(name, tmp_path):
    with pytest.raises(DataError) as caught:
        ratings(name, tmp_path)
    assert "\n" not in str(caught.value)
    wanted = LAYOUTS[name](tmp_path)
    (tmp_path / next(iter(wanted))).unlink()
    with pytest.raises(DataError, match="No such file"):
        ratings(name, tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("dist_img", "dmos")], "has no ratings"),
        ([("dist_img", "ref_img"), ("a.png", "b.png")], "not laid out"),
        ([("dist_img", "ref_img", "dmos"), ("I01_01_01.png", "I01.png", "nan")], "not a finite number"),
        ([("dist_img", "ref_img", "dmos"), ("I01_01_01.png", "I01.png", "good")], "not laid out"),
        ([("dist_img", "ref_img", "dmos"), ("../../x.png", "I01.png", "1")], "leads out|No such file"),
    ],
)
def test_hostile_tables_are_refused(tmp_path, rows, said):
    folder = tmp_path / "set"
    folder.mkdir()
    kadid10k(folder)
    table(folder / "dmos.csv", *rows)
    with pytest.raises(DataError, match=said):
        ratings("kadid10k", folder)


def test_what_is_no_matlab_file_is_refused(tmp_path):
    live_challenge(tmp_path)
    (tmp_path / "Data/AllMOS_release.mat").write_bytes(b"no matlab file" * 40)
    with pytest.raises(DataError, match="not laid out as live-challenge"):
        ratings("live-challenge", tmp_path)
    with pytest.raises(ConfigError, match="no public set `kadid`"):
        ratings("kadid", tmp_path)


@pytest.fixture
def several(tmp_path):
    """Six contents with two pictures each."""
    rows = [(f"I{c}_{n}.png", f"I{c}.png", 1 + c / 2) for c in range(6) for n in range(2)]
    for name, *_ in rows:
        picture(tmp_path / "images" / name, 1)
    table(tmp_path / "dmos.csv", ("dist_img", "ref_img", "dmos"), *rows)
    return tmp_path


def test_a_set_is_split_by_content(several):
    taught, held_out = data("kadid10k", str(several), fold=1, folds=3, crops=4)
    assert len(taught) == 8 and len(held_out) == 4
    assert not {one.content for one in taught.rated} & {one.content for one in held_out.rated}
    assert taught[0]["inputs"].shape == (4, 96, 96) and taught[0]["quality"].shape == (4,)
    everything = [one.path for fold in range(3) for one in data("kadid10k", str(several), fold, 3)[1].rated]
    assert len(everything) == len(set(everything)) == 12
    for fold, folds in ((3, 3), (0, 7), (-1, 2)):
        with pytest.raises(ConfigError, match="6 scenes have no fold"):
            data("kadid10k", str(several), fold, folds)
    with pytest.raises(DataError, match="at least 96"):
        public_sets.grid(torch.zeros(96, 95, dtype=torch.uint8), 4)


def test_the_recipe_trains_on_a_public_set(several, tmp_path):
    from shoestring.core.world import World
    from shoestring.run import parse
    from shoestring.training.loop import train

    recipe = "shoestring_recipes.quality"
    document = {
        "run": {
            "model": f"{recipe}.model:Quality",
            "data": f"{recipe}.public_sets:data",
            "forward": f"{recipe}.task:forward",
            "loss": f"{recipe}.task:rated",
            "evaluate": f"{recipe}.public_sets:measure",
            "steps": 2,
            "batch": 2,
            "folder": str(tmp_path / "run"),
        },
        "data": {"arguments": {"name": "kadid10k", "folder": str(several), "folds": 2, "crops": 1}},
        "optim": {"adamw": {}},
    }
    train(parse(document), World())
    assert '"srcc"' in (tmp_path / "run" / "metrics.jsonl").read_text()
