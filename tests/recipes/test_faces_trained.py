"""The recipe `faces` trained at toy size: its report, and photos of one's own, broken ones among them."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.data import astronaut

from shoestring.cli import main
from shoestring_recipes.faces import crops, detection, files, occluders
from shoestring_recipes.faces.files import embedded, read
from tests.recipes.toys import save_photos, train_toy

TOY = [
    *("--steps", "2", "--batch", "8", "--evaluate_every", "0", "--optim.schedule.warmup", "1"),
    *("--data.arguments.views", "2", "--data.arguments.held_views", "8"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_toy(tmp_path_factory, "faces", *TOY)


@pytest.mark.slow
def test_the_report_has_figures_tables_and_a_picture_of_each_kind(trained):
    from shoestring_recipes.faces.occluders import KINDS

    last = [row for row in map(json.loads, (trained / "metrics.jsonl").open()) if "untaught" in row][-1]
    assert all(0 <= last[name] <= 1 for name in ("taught", "untaught", "rank_1"))
    names = {path.name.partition("-")[2] for path in (trained / "pictures").iterdir()}
    assert names == {f"{kind}.png" for kind in KINDS}
    page = (trained / "report.html").read_text()
    assert all(words in page for words in ("LBP + bagging", "Recall by what covers", "Fisherfaces"))


@pytest.mark.slow
def test_photos_of_all_forms_are_read_and_others_are_named(trained, tmp_path):
    photos = tmp_path / "photos"
    coloured = astronaut()[:260, 100:360]
    save_photos(photos, coloured)
    grey = np.asarray(Image.fromarray(coloured).convert("L"))
    Image.fromarray(np.hstack([grey, grey[:, ::-1]])).save(photos / "two.png")
    Image.fromarray(grey[:9, :7]).save(photos / "tiny.png")
    Image.fromarray(np.zeros_like(grey)).save(photos / "<b>nobody.png")
    for name in ("grey.png", "deep.png", "print.jpg", "turned.jpg"):
        inputs, boxes = read(photos / name).values()
        assert inputs.shape == (1, 48, 48) and boxes.shape == (1, 5)
        top, left, height, width = boxes[0, :4].tolist()
        assert top < 120 < top + height and left < 125 < left + width  # between the eyes
    assert main(["predict", str(trained), str(photos), "--out", str(tmp_path / "faces.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "faces.csv").open(newline="")))
    errors = {row["file"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {"tiny.png", "<b>nobody.png", "broken.jpg"}
    assert "no face is found" in errors["tiny.png"] and "no face is found" in errors["<b>nobody.png"]
    assert [row["face"] for row in rows if row["file"] == "two.png"] == ["1", "2"]
    assert all(
        row["masked"] in ("True", "False") and 0 <= float(row["covered"]) <= 1 for row in rows if not row["error"]
    )
    assert all(row["masked"] == "False" for row in rows if not row["error"])  # whom nothing covers
    page = (tmp_path / "faces.html").read_text()
    assert page.count("data:image/png") >= 6 and "<b>nobody" not in page


@pytest.mark.slow
def test_either_method_says_whether_faces_are_masked():
    faces = np.stack([crops.faces()[3], occluders.cover(crops.faces()[3], "n95", np.random.default_rng(0)).picture])
    batch = {"inputs": torch.from_numpy((255 * faces).astype(np.uint8))[None], "boxes": torch.zeros(1, 2, 5)}
    output = {"masked": torch.tensor([[9.0, -9.0]]), "cover": torch.zeros(1, 2, 12, 12)}
    for how, wanted in ((files.describe, [False, True]), (files.describe_by_network, [True, False])):
        (rows,) = how(output, batch)
        assert [row["masked"] for row in rows] == wanted and [row["face"] for row in rows] == [1, 2]
        assert all((row["probability"] > 0.5) == row["masked"] and row["covered"] == 0.5 for row in rows)


@pytest.mark.slow
def test_embeddings_of_a_photo_are_of_one_length(trained, tmp_path):
    from shoestring.models.loading import load_model

    Image.fromarray(astronaut()).save(tmp_path / "astronaut.png")
    rows = embedded(load_model(trained)[0], tmp_path / "astronaut.png")
    assert rows.shape[1] == 64 and np.allclose(rows.norm(dim=1).numpy(), 1, atol=1e-5)


@pytest.mark.skipif(not detection.installed("dlib"), reason="dlib is not installed")
def test_with_dlib_faces_are_found_by_both():
    grey = np.asarray(Image.fromarray(astronaut()).convert("L"))
    largest = detection.find(grey)[0]
    assert 60 < largest.box[0] < 90 and 80 < largest.box[2] < 110
