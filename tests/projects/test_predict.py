"""`shoestring predict`: files of one's own, broken ones among them, as a table and as a page."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoestring as ss
from shoestring.cli import main
from shoestring.core.errors import ConfigError, DataError
from shoestring.core.world import World
from shoestring.naming import TrustError
from shoestring.run import parse
from shoestring.training.loop import train
from shoestring.verbs.predict import predict, save_page, save_table
from shoestring.verbs.settings import FilePrediction

HERE = __name__


class Lengths(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"inputs": torch.full((2,), float(index)), "targets": torch.tensor(index % 3)}


def data():
    return Lengths(), Lengths()


def model():
    return nn.Linear(2, 3)


def read(path: Path):
    """As many numbers as the text has; two samples of other lengths make no batch."""
    numbers = [float(word) for word in path.read_text().split()]
    if not numbers:
        raise DataError(f"`{path.name}` is empty")
    return {"inputs": torch.tensor(numbers)}


def forward(model, batch):
    return model(batch["inputs"][:, :2])


def rows(output, batch):
    """One row for a sample of two numbers, two for a sample of three."""
    assert not torch.is_grad_enabled()
    longest = batch["inputs"].shape[1]
    made = [{"sum": row.sum(), "note": "=1+1 <b>", "map": ss.Picture(pixels=row[None])} for row in batch["inputs"]]
    return [[row] * (longest - 1) for row in made]


def too_few(output, batch):
    return []


RUN = {"model": f"{HERE}:model", "data": f"{HERE}:data", "forward": f"{HERE}:forward", "steps": 1, "batch": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of three runs: with the default of `predict`, with one of its own, and without `read_file`."""
    root = tmp_path_factory.mktemp("trained")
    for name, more in (
        ("default", {"read_file": f"{HERE}:read"}),
        ("own", {"read_file": f"{HERE}:read", "predict": f"{HERE}:rows"}),
        ("few", {"read_file": f"{HERE}:read", "predict": f"{HERE}:too_few"}),
        ("none", {}),
    ):
        train(parse({"run": RUN | more | {"folder": str(root / name)}, "optim": {"sgd": {}}}), World())
    return root


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    (folder / "below").mkdir(parents=True)
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"{number} 1.5")
    (folder / "below" / "long.txt").write_text("1 2 3")
    (folder / "empty.txt").write_text("")
    (folder / "words.txt").write_text("no numbers")
    (folder / ".hidden").write_text("1 2")
    return folder


def test_each_file_has_a_row_and_broken_ones_say_why(trained, files):
    found = predict(str(trained / "default"), files)
    names = ["0.txt", "1.txt", "2.txt", "3.txt", "4.txt", "below/long.txt", "empty.txt", "words.txt"]
    assert [row["file"] for row in found] == names
    assert found[6]["error"] == "`empty.txt` is empty" and found[7]["error"].startswith("ValueError: could not convert")
    opened, _ = ss.load_model(trained / "default")
    logits = opened(torch.tensor([[2.0, 1.5]])).detach().softmax(-1)[0]
    assert found[2]["class"] == int(logits.argmax()) and found[2]["probability"] == pytest.approx(float(logits.max()))
    for batch in (1, 3):
        again = predict(str(trained / "default"), files, FilePrediction(batch=batch))
        assert [row.get("class") for row in again] == [row.get("class") for row in found]


def test_the_verb_writes_a_table_and_a_page(trained, files, tmp_path, capsys):
    out = tmp_path / "table.csv"
    assert main(["predict", str(trained / "own"), str(files), "--out", str(out), "--batch", "2"]) == 0
    printed = capsys.readouterr()
    assert "left out: empty.txt" in printed.err and "7 rows, 2 left out" in printed.out
    lines = list(csv.DictReader(out.open(newline="")))
    assert list(lines[0]) == ["file", "sum", "note", "error"]
    assert [line["file"] for line in lines].count("below/long.txt") == 2 and lines[1]["sum"] == "2.5"
    page = out.with_suffix(".html").read_text()
    assert "&lt;b&gt;" in page and "<b>" not in page and page.count("<img ") == 7
    assert main(["predict", str(trained / "own"), str(files), "--out", str(tmp_path / "rows.jsonl")]) == 0
    read_back = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(read_back) == 9 and read_back[1] == {"file": "1.txt", "sum": 2.5, "note": "=1+1 <b>"}


def test_pictures_are_written_to_files_that_the_rows_name(trained, files, tmp_path, capsys):
    out, folder = tmp_path / "rows.jsonl", tmp_path / "some" / "pictures"
    command = ["predict", str(trained / "own"), str(files), "--out", str(out), "--pictures"]
    assert main([*command, str(folder)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    named = [row["map"] for row in rows if "map" in row]
    assert len(named) == 7 and sorted(named) == sorted(path.name for path in folder.iterdir())
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in named)
    assert "data:image/png" in out.with_suffix(".html").read_text()
    (tmp_path / "file").write_text("")
    assert main([*command, str(tmp_path / "file")]) == 2 and "cannot write to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "arguments", "said"),
    [
        ("none", {}, "`run.read_file` is not set"),
        ("few", {}, r"too_few returned 0 entries for 5 samples|too_few returned 0 entries for 1 samples"),
        ("gone", {}, "no run folder at"),
        ("default", {"pattern": "*.png"}, "holds no files that match"),
        ("default", {"best": True}, "holds no model"),
    ],
)
def test_what_cannot_be_predicted_is_refused(trained, files, run, arguments, said):
    from shoestring.core.errors import ShoestringError

    with pytest.raises(ShoestringError, match=said):
        predict(str(trained / run), files, FilePrediction(**arguments))


def test_a_folder_of_nothing_but_broken_files_is_an_error(trained, files):
    with pytest.raises(DataError, match=r"none of 1 files can be read; empty\.txt: `empty\.txt` is empty"):
        predict(str(trained / "default"), files, FilePrediction(pattern="empty*"))
    with pytest.raises(ConfigError, match="is no folder"):
        predict(str(trained / "default"), files / "0.txt")
    with pytest.raises(ConfigError, match="--batch is 0"):
        FilePrediction(batch=0)


def test_somebody_elses_run_folder_is_asked_about_first(tmp_path, files):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "environment.json").write_text("{}")
    (folder / "run.toml").write_text(tomli_w.dumps({"run": {"read_file": "no_such_module:read"}}))
    with pytest.raises(TrustError):
        predict(str(folder), files)
    assert "no_such_module" not in sys.modules


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
values = st.one_of(st.none(), st.text(max_size=10), st.floats(), st.integers(), st.booleans())


@pytest.mark.slow
@given(st.lists(st.dictionaries(names, values, max_size=3), min_size=1, max_size=4))
def test_any_rows_are_written_and_read_back(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("rows")
    found = [{"file": f"<i>{number}\n", **row} for number, row in enumerate(made)]
    save_table(found, folder / "rows.jsonl")
    back = [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").split("\n") if line]
    assert len(back) == len(found) and [set(row) for row in back] == [set(row) for row in found]
    save_table(found, folder / "rows.csv")
    assert len(list(csv.DictReader((folder / "rows.csv").open(newline="", encoding="utf-8")))) == len(found)
    save_page(found, "<title>", folder, folder / "page.html")
    body = (folder / "page.html").read_text("utf-8").partition("<main>")[2].partition("</main>")[0]
    assert not re.search(r"<(i|script|svg|title)\b", body)


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pil():
    return pytest.importorskip("PIL.Image")


def picture(pil, path, array, mode=None, **options):
    pil.fromarray(array, mode).save(path, **options)
    return path


def test_pictures_of_all_kinds_become_bytes(pil, tmp_path):
    from shoestring.data.pictures import read_picture

    grey = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    colour = np.stack([grey, grey[::-1], grey[:, ::-1]], -1)
    cases = {
        "grey.png": (grey, {}),
        "colour.png": (colour, {}),
        "palette.gif": (grey, {}),
        "deep.png": (grey.astype(np.uint16) * 257, {}),
        "colour.webp": (colour, {"lossless": True}),
    }
    for name, (array, options) in cases.items():
        picture(pil, tmp_path / name, array, **options)
        found = read_picture(tmp_path / name)
        wanted = torch.from_numpy(colour if array.ndim == 3 else np.stack([grey] * 3, -1)).permute(2, 0, 1)
        assert found.dtype is torch.uint8 and torch.equal(found, wanted), name
        assert read_picture(tmp_path / name, 1).shape == (1, 3, 4)
    pil.new("CMYK", (4, 3), (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=95)
    red = read_picture(tmp_path / "print.jpg").float().mean((1, 2))
    assert red[0] > 240 and red[1] < 15 and red[2] < 15
    clear = np.zeros((2, 2, 4), np.uint8)
    picture(pil, tmp_path / "clear.png", clear)
    assert (read_picture(tmp_path / "clear.png") == 255).all()


def test_a_picture_is_turned_as_its_camera_was(pil, tmp_path):
    from shoestring.data.pictures import read_picture

    array = np.zeros((8, 16, 3), np.uint8)
    array[:, :8] = 255
    exif = pil.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    pil.fromarray(array).save(tmp_path / "turned.jpg", exif=exif, quality=95)
    found = read_picture(tmp_path / "turned.jpg", 1)
    assert found.shape == (1, 16, 8) and found[0, :6].min() > 200 and found[0, -6:].max() < 50


def test_broken_pictures_are_named(pil, tmp_path, monkeypatch):
    from shoestring.data import pictures

    whole = picture(pil, tmp_path / "whole.png", np.zeros((64, 64, 3), np.uint8) + 7).read_bytes()
    for name, content in {
        "cut.png": whole[: len(whole) // 2],
        "text.png": b"no picture",
        "empty.png": b"",
        "vector.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "real.tiff": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        if name == "real.tiff":
            pil.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / name)
        with pytest.raises(DataError, match=re.escape(name)):
            pictures.read_picture(tmp_path / name)
    monkeypatch.setattr(pictures, "_PIXELS", 100)
    with pytest.raises(DataError, match="64 × 64 pixels"):
        pictures.read_picture(tmp_path / "whole.png")
    with pytest.raises(DataError, match="gone"):
        pictures.read_picture(tmp_path / "gone.png")


def test_the_functions_of_the_guide_name_a_picture(pil, tmp_path):
    guide = (Path(__file__).parents[2] / "docs/guides/your-own-task.md").read_text()
    defined = {}
    exec(re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)[2], defined)
    sample = defined["read"](picture(pil, tmp_path / "a.png", np.zeros((3, 4), np.uint8)))
    assert sample["inputs"].shape == (1, 3, 4)
    (row,) = defined["name"](torch.tensor([[0.0, 9.0, 0.0]]), sample)
    assert row["kind"] == "trousers" and row["share"] > 0.9


def test_the_recipe_names_clothes(pil, tmp_path):
    from shoestring_recipes.images import files as clothes

    light, dark = np.full((60, 60, 3), 255, np.uint8), np.zeros((60, 60, 3), np.uint8)
    light[20:40, 20:40], dark[20:40, 20:40] = 40, 215
    both = [clothes.read(picture(pil, tmp_path / f"{n}.png", array))["inputs"] for n, array in enumerate((light, dark))]
    assert torch.equal(*both) and both[0].shape == (1, 28, 28) and both[0][0, 14, 14] == 215
    (row,) = clothes.name(torch.eye(10)[9:] * 9, {})
    assert row["kind"] == "ankle boot" and row["probability"] > 0.9
