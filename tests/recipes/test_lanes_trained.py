"""The recipe `lanes` trained at toy size: its report, and photos of one's own, broken ones among them."""

import csv
import json
import re

import numpy as np
import pytest
from PIL import Image

from shoestring.cli import main
from shoestring_recipes.lanes import roads
from shoestring_recipes.lanes.files import read
from tests.recipes.toys import save_photos, train_toy

TOY = [
    *("--steps", "2", "--batch", "4", "--evaluate_every", "0", "--optim.schedule.warmup", "1"),
    *("--data.arguments.pictures", "8", "--data.arguments.held_out", "8"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_toy(tmp_path_factory, "lanes", *TOY)


def test_the_report_has_figures_a_table_and_a_picture_of_each_kind(trained):
    last = [row for row in map(json.loads, (trained / "metrics.jsonl").open()) if "f1" in row][-1]
    assert 0 <= last["f1"] <= 1 and last["f1_hough"] > 0.5
    pictures = sorted(path.name.partition("-")[2] for path in (trained / "pictures").iterdir())
    assert pictures == sorted(f"{kind}.png" for kind in roads.KINDS)
    page = (trained / "report.html").read_text()
    assert "F1 by kind of picture" in page and page.count("data:image/png") == len(roads.KINDS)


def test_photos_of_all_forms_are_read_and_broken_ones_are_named(trained, tmp_path):
    photos = tmp_path / "photos"
    grey = roads.render(np.random.default_rng(0), 0.0, "clean").image
    save_photos(photos, np.stack([grey] * 3, -1))
    Image.fromarray(grey).resize((640, 480)).save(photos / "large.bmp")
    Image.fromarray(grey[:20, :20]).save(photos / "tiny.png")
    inputs = {path.name: read(path)["inputs"] for path in photos.iterdir() if path.stem not in ("tiny", "broken")}
    assert all(picture.shape == (1, roads.HEIGHT, roads.WIDTH) for picture in inputs.values())
    for name in ("grey.png", "deep.png", "print.jpg", "turned.jpg"):
        assert np.abs(inputs[name][0].numpy().astype(int) - grey).mean() < 3, name
    assert main(["predict", str(trained), str(photos), "--out", str(tmp_path / "lanes.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "lanes.csv").open(newline="")))
    assert {row["file"] for row in rows} == {path.name for path in photos.iterdir()}
    errors = {row["file"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {"tiny.png", "broken.jpg"} and "20 × 20 pixels" in errors["tiny.png"]
    page = (tmp_path / "lanes.html").read_text()
    assert len(re.findall("data:image/png", page)) >= 5
