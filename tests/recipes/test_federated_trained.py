"""The recipe `federated` at toy size: its report, digits of one's own, and what `check` says of wrong run files."""

import csv
import json
import tomllib

import numpy as np
import pytest
import tomli_w
from PIL import Image
from safetensors.torch import load_file

from shoestring import recipes
from shoestring.cli import main
from shoestring.data.pictures import read_picture
from tests.recipes.toys import train_toy

TOY = ["--steps", "6", "--batch", "8", "--evaluate_every", "4", "--comm.fedavg.every", "1", "--model.width", "8"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_toy(tmp_path_factory, "federated", *TOY, "--data.arguments.most", "400")


@pytest.mark.slow
def test_the_report_has_accuracies_probes_and_swapped_styles(trained):
    rows = [row for row in map(json.loads, (trained / "metrics.jsonl").open()) if "accuracy_uci" in row]
    assert len(rows) >= 2
    for name in ("accuracy_scans", "accuracy_uci", "accuracy_fonts", "domain_from_features", "domain_from_style"):
        assert 0 <= rows[-1][name] <= 1
    pictures = sorted({path.name.partition("-")[2] for path in (trained / "pictures").iterdir()})
    assert pictures == ["fonts-1.png", "fonts-2.png", "scans-1.png", "scans-2.png"]
    assert read_picture(next((trained / "pictures").glob("*-scans-1.png")), 1).shape == (1, 3 * 54, 10 * 54)
    page = (trained / "report.html").read_text()
    assert "What linear probes read" in page and "comm.fedavg" in page and "class from style, scans-1" in page
    assert "stay with each client" in page and "Clients of this rank in the newest round" in page


def test_the_model_leaves_the_clients_styles_with_them(trained):
    (weights,) = map(load_file, (trained / "model").glob("*.safetensors"))
    states = next(path for path in sorted((trained / "checkpoints").rglob("*.safetensors")) if path.stat().st_size)
    saved = {name: value for name, value in load_file(states).items() if "/style." in name and "private" in name}
    assert len({name.partition("private/")[2].partition("/")[0] for name in saved}) == 4
    own = [value for name, value in saved.items() if name.endswith("style.layers.0.weight")]
    assert len(own) == 4 and all((value != weights["style.layers.0.weight"]).any() for value in own)


def test_digits_of_ones_own_are_named(trained, tmp_path):
    (tmp_path / "mine").mkdir()
    pixels = np.full((40, 40), 255, np.uint8)
    pixels[5:35, 18:22] = 0
    Image.fromarray(pixels).save(tmp_path / "mine" / "one.png")
    Image.fromarray(pixels[:2, :2]).save(tmp_path / "mine" / "white.png")
    (tmp_path / "mine" / "broken.png").write_bytes(b"\x89PNG")
    assert main(["predict", str(trained), str(tmp_path / "mine"), "--out", str(tmp_path / "rows.csv")]) == 0
    rows = {row["file"]: row for row in csv.DictReader((tmp_path / "rows.csv").open(newline=""))}
    assert 0 <= int(rows["one.png"]["digit"]) <= 9 and "shows no digit" in rows["white.png"]["error"]
    assert "no picture" in rows["broken.png"]["error"]


@pytest.mark.parametrize(("flags", "message"), [
    (["--data.clients", "false"], "a dict of clients, and data.clients is not set"),
    (["--comm.fedavg.private", '["taste.*"]'], "no parameter or buffer is called `taste.*`"),
    (["--model.disentangle", "false"], "no parameter or buffer is called `style.*`"),
    (["--comm.powersgd"], "`comm.powersgd`"),
    (["--data.workers", "2"], "data.clients cannot be combined"),
    (["--data", "shoestring.data.images:fashion_mnist", "--data.arguments", "{}"], "returned no dict of clients"),
])  # fmt: skip
def test_check_refuses_what_train_would(flags, message, capsys):
    assert main(["check", "federated", *TOY, *flags]) == 2
    assert message in capsys.readouterr().err


def test_clients_without_a_feature_that_trains_them_are_refused(tmp_path, capsys):
    document = tomllib.loads(recipes.find()["federated"].file.read_text())
    del document["comm"]
    (tmp_path / "run.toml").write_text(tomli_w.dumps(document))
    for verb in ("check", "train"):
        assert main([verb, str(tmp_path / "run.toml"), "--folder", str(tmp_path / "run")]) == 2
        printed = capsys.readouterr().err
        assert "no feature trains clients in turn" in printed and "add [comm.fedavg]" in printed


@pytest.mark.slow
def test_check_understands_clients(capsys):
    assert main(["check", "federated", *TOY]) == 0
    printed = capsys.readouterr().out
    assert "turns of 1 steps, merged by their numbers of samples" in printed and "stay with each client" in printed
