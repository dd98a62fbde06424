"""The recipe `generation` at toy size: its report, pictures for drawings of one's own, and photos with masks."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from shoestring.cli import main
from shoestring.data.pictures import read_picture
from shoestring_recipes.generation.styles import STYLES
from tests.recipes.toys import train_toy

TOY = ["--steps", "2", "--batch", "4", "--evaluate_every", "0", "--optim.schedule.warmup", "1", "--model.width", "16"]
FOLDERS = "shoestring_recipes.generation.folders"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_toy(tmp_path_factory, "generation", *TOY, "--data.arguments.held_out", "16")


def last(folder):
    return [row for row in map(json.loads, (folder / "metrics.jsonl").open()) if "distance" in row][-1]


@pytest.mark.slow
def test_the_report_has_distances_and_a_page_of_each_style(trained):
    row = last(trained)
    assert row["distance"] > row["distance_real"] >= 0 and 0 <= row["diversity"] < 1 and 0 < row["diversity_real"] < 1
    pictures = sorted(path.name.partition("-")[2] for path in (trained / "pictures").iterdir())
    assert pictures == sorted(f"{style}.png" for style in STYLES)
    shown = read_picture(next((trained / "pictures").glob("*-stripes.png")))
    assert shown.shape == (3, 2 * 64, 5 * 64)  # two samples: map, swatch, real, made, made again
    page = (trained / "report.html").read_text()
    assert "Made and real pictures by style" in page and page.count("data:image/png") == len(STYLES)


@pytest.mark.slow
def test_both_networks_have_rates_of_their_own(trained):
    text = (trained / "run.toml").read_text()
    assert "discriminator.*" in text and "lr_scale" in text


@pytest.mark.slow
def test_drawings_become_pictures_in_files(trained, tmp_path):
    drawings = tmp_path / "drawings"
    drawings.mkdir()
    grey = np.zeros((60, 60), np.uint8)
    grey[20:40, 10:50] = 200
    Image.fromarray(grey).save(drawings / "bag.png")
    Image.fromarray(grey).convert("CMYK").save(drawings / "print.jpg")
    (drawings / "broken.png").write_bytes((drawings / "bag.png").read_bytes()[:50])
    made = ["--pictures", str(tmp_path / "made"), "--out", str(tmp_path / "rows.csv")]
    assert main(["predict", str(trained), str(drawings), *made]) == 0
    rows = list(csv.DictReader((tmp_path / "rows.csv").open(newline="")))
    assert [row["file"] for row in rows] == ["bag.png"] * 8 + ["broken.png"] + ["print.jpg"] * 8
    assert [row["style"] for row in rows[:8]] == list("12345678") and "no picture that can be read" in rows[8]["error"]
    assert read_picture(tmp_path / "made" / rows[0]["made"], 1).shape == (1, 32, 32)
    assert read_picture(tmp_path / "made" / rows[0]["swatch"], 1).shape == (1, 64, 64)
    assert len(list((tmp_path / "made").iterdir())) == 2 * 16


@pytest.mark.slow
def test_photos_with_masks_train_and_masks_become_pictures(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in ("photos", "masks", "styles"):
        (tmp_path / name).mkdir()
    for number in range(6):
        pixels = rng.integers(0, 256, (40, 50, 3)).astype(np.uint8)
        mask = np.zeros((40, 50, 3), np.uint8)
        mask[10 + number :] = (128, 0, 0)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.jpg")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    Image.fromarray(pixels).save(tmp_path / "styles" / "noise.png")
    named = ["--data", f"{FOLDERS}:data", "--read_file", f"{FOLDERS}:read_mask", "--model.channels", "3"]
    named += ["--data.arguments.folder", str(tmp_path), "--data.arguments.size", "16", "--model.size", "16"]
    colors = ["--model.colors", '["000000", "800000"]']
    run = tmp_path / "run"
    assert main(["train", "generation", *TOY, *named, *colors, "--folder", str(run)]) == 0
    assert last(run)["distance"] > 0 and [path.name[9:] for path in (run / "pictures").iterdir()] == ["photos.png"]
    made = ["--pictures", str(tmp_path / "made"), "--out", str(tmp_path / "rows.jsonl")]
    assert main(["predict", str(run), str(tmp_path / "masks"), *made]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    assert len(rows) == 6 and read_picture(tmp_path / "made" / rows[0]["made"]).shape == (3, 16, 16)
    capsys.readouterr()
    wrong = ["--model.colors", '["000000", "ffffff"]', "--folder", str(tmp_path / "wrong")]
    assert main(["train", "generation", *TOY, *named, *wrong]) != 0
    assert "has a colour of no label" in capsys.readouterr().err
