"""The recipe `reply` trained at toy size: its report, replies to messages and clips, and the page of moving replies."""

import csv
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from shoestring.cli import main
from shoestring.models.loading import load_model
from shoestring_recipes.reply import __main__ as module
from shoestring_recipes.reply import clips, frozen, inventory, matching, ranking
from tests.browser import Browser, needs_chromium
from tests.recipes.toys import MODULES, save_pretrained, train_toy

TOY = [
    *("--steps", "2", "--batch", "8", "--evaluate_every", "0", "--optim.schedule.warmup", "1"),
    *("--data.arguments.every", "20", "--data.arguments.modules", MODULES, "--model.width", "8"),
]
BAG = ["--model.frozen", "", "--data.arguments.frozen", "", "--model.dimensions", "128"]
SIZES = {"desktop": (1280, 800, False), "phone": (360, 740, True)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_toy(tmp_path_factory, "reply", *TOY, *BAG)


@pytest.fixture
def near_modules(monkeypatch):
    """A current folder at which the packages are found."""
    monkeypatch.chdir(Path(MODULES).parent)


@pytest.mark.slow
def test_the_report_compares_methods_in_groups_of_texts(trained):
    last = [row for row in map(json.loads, (trained / "metrics.jsonl").open()) if "recall_10" in row][-1]
    for name in ("recall_10", "ndcg_30", "recall_10_unshared", "ndcg_30_untaught", "ndcg_30_bm25"):
        assert 0 <= last[name] <= 1
    assert last["recall_10"] > last["recall_10_unshared"]  # words of tags are found before training
    page = (trained / "report.html").read_text()
    assert "Replies to held-out texts that share no word with the tags" in page and "BM25 over tags" in page
    assert "Replies to texts of emoji that were not taught" in page and ranking.FROZEN not in page


@pytest.mark.slow
def test_messages_get_replies_clips_get_texts_and_broken_files_are_named(trained, near_modules, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (files / "pizza.txt").write_text("pizza")
    (files / "large.txt").write_text("birthday cake " * 75_000)
    (files / "other.txt").write_text("слово")
    (files / "empty.txt").write_text("")
    emoji = inventory.emoji()
    number = [one.name for one in emoji].index("slice of pizza")
    (files / "pizza.gif").write_bytes(clips.gif(clips.animated(inventory.pictures("twitter")[number]), 2))
    (files / "broken.webp").write_bytes(b"RIFF\0\0\0\0WEBPVP8X")
    assert main(["predict", str(trained), str(files), "--out", str(tmp_path / "rows.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "rows.csv").open(newline="")))
    errors = {row["file"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {"empty.txt", "broken.webp"} and "damaged" in errors["broken.webp"]
    first = {row["file"]: row for row in rows if row["place"] == "1"}
    assert first["pizza.txt"]["name"] == "slice of pizza" and first["pizza.gif"]["text"] in emoji[number].texts
    assert "cake" in first["large.txt"]["name"] and first["other.txt"]["reply"]
    assert len([row for row in rows if row["file"] == "pizza.txt"]) == 3
    assert "data:image/png" in (tmp_path / "rows.html").read_text()


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_page_of_replies_fits_and_its_clips_move(size, trained, near_modules, tmp_path, capsys):
    lines, out = tmp_path / "lines.txt", tmp_path / "page.html"
    lines.write_text(f"happy birthday\n<b>{'long' * 60}</b> & so on\nслово\n")
    assert module.main([str(trained), str(lines), "--out", str(out)]) == 0
    assert "3 messages, 1," in capsys.readouterr().out
    with Browser(*SIZES[size]) as browser:
        browser.open(out.as_uri())
        browser.until("[...document.images].every((image) => image.complete && image.naturalWidth === 96)")
        assert browser.value("document.images.length") == 15 and browser.cut() == [] and not browser.problems
        assert browser.value("document.documentElement.scrollWidth") <= SIZES[size][0]
        assert "CC BY 4.0" in browser.value("document.querySelector('footer').innerText")
        assert browser.value("document.querySelector('h2').innerText") == "happy birthday"
        browser.picture(tmp_path / f"{size}.png")


@pytest.mark.slow
def test_own_clips_are_an_inventory(trained, tmp_path, capsys):
    folder, lines, out = tmp_path / "gifs", tmp_path / "lines.txt", tmp_path / "page.html"
    folder.mkdir()
    lines.write_text("a dog\n")
    for name, shade in (("happy_dog", 40), ("sad_cat", 200)):
        frames = torch.full((3, 3, 24, 24), shade, dtype=torch.uint8) + torch.arange(3).view(3, 1, 1, 1).byte()
        (folder / f"{name}.gif").write_bytes(clips.gif(frames, 1))
    (folder / "broken.mp4").write_bytes(b"\0\0\0\x18ftypisom")
    assert module.main([str(trained), str(lines), "--clips", str(folder), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "left out: `broken.mp4`" in printed and "1 messages, 2 clips" in printed
    text = out.read_text()
    assert text.index("happy_dog.gif") < text.index("sad_cat.gif") and "CC BY" not in text
    assert module.main([str(trained), str(tmp_path / "nothing.txt")]) == 2 and "error: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_pretrained_encoder_stays_as_it_is_or_is_trained_further(tmp_path_factory, near_modules, tmp_path):
    folder = tmp_path_factory.mktemp("bert")
    save_pretrained(folder, "Bert")
    before = frozen.FrozenReader(str(folder)).rows(["small ant", "", "dog"])
    run = train_toy(
        tmp_path_factory, "reply", *TOY, "--model.frozen", str(folder), "--data.arguments.frozen", str(folder)
    )
    assert ranking.FROZEN in (run / "report.html").read_text()
    model, _ = load_model(run)
    assert model.texts.of_texts.any() and model.texts.of_tags.any()
    assert not any("pretrained" in name for name in model.state_dict())
    vectors = matching.of_texts(model, ["small ant", "", "dog"])
    assert not torch.allclose(vectors, before) and F.cosine_similarity(vectors, before)[::2].min() > 0.9
    lines, out = tmp_path / "lines.txt", tmp_path / "page.html"
    lines.write_text("an ant\n")
    assert module.main([str(run), str(lines), "--out", str(out)]) == 0 and "an ant" in out.read_text()
    further = ("--model.folder", str(folder), "--data.arguments.tokenizer", str(folder))
    run = train_toy(tmp_path_factory, "reply", *TOY, *BAG, *further)
    assert matching.of_texts(load_model(run)[0], ["small ant", ""]).shape == (2, 16)
