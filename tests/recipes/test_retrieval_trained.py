"""The recipe `retrieval` trained at toy size: its report, negatives mined by a run, a pretrained encoder, and texts of
one's own, broken ones among them."""

import csv
import json

import numpy as np
import pytest
import torch

from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.models.loading import load_model
from shoestring_recipes.retrieval import dictionaries, files, mining, task
from shoestring_recipes.retrieval.model import Encoder
from shoestring_recipes.retrieval.words import TokenReader
from tests.recipes.toys import save_pretrained, train_toy

SIZES = {"headwords": 300, "documents": 40, "queries": 20, "validation": 20, "negatives": 2}
TOY = [
    *("--steps", "2", "--batch", "8", "--evaluate_every", "0", "--optim.schedule.warmup", "1"),
    *(word for name, size in SIZES.items() for word in (f"--data.arguments.{name}", str(size))),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_toy(tmp_path_factory, "retrieval", *TOY, "--model.dimensions", "32")


@pytest.mark.slow
def test_the_report_compares_all_methods(trained):
    last = [row for row in map(json.loads, (trained / "metrics.jsonl").open()) if "fused_1" in row][-1]
    assert all(0 <= last[f"{name}_1"] <= last[f"{name}_10"] <= 1 for name in ("fused", "encoder", "bm25"))
    assert last["bm25_10"] > 0.5  # of 40 documents
    page = (trained / "report.html").read_text()
    assert all(words in page for words in ("BM25, stemmed", "BM25, tuned", "fused", "recall at 10"))


def test_a_run_mines_half_of_the_negatives(trained):
    taught, held_out = task.data(**SIZES, miner=str(trained))
    plain, _ = task.data(**SIZES)
    assert taught.negatives.shape == plain.negatives.shape == (len(plain), 2)
    assert np.array_equal(taught.negatives[:, 0], plain.negatives[:, 0])
    assert not np.array_equal(taught.negatives, plain.negatives) and taught.fingerprint != plain.fingerprint
    assert (taught.negatives != np.arange(len(taught))[:, None]).all()
    headwords = [{pair.headword for pair in part} for part in (taught.pairs, held_out.pairs, held_out.validation)]
    assert sum(map(len, headwords)) == len(set.union(*headwords)) and len(held_out) == 40
    with pytest.raises(ConfigError, match="too few to hold out 10,020"):
        task.data(**{**SIZES, "documents": 10_000})


def test_words_are_found_for_descriptions_and_broken_files_are_named(trained, tmp_path, monkeypatch):
    small = dictionaries.pairs(SIZES["headwords"])
    for module in (files, mining):
        monkeypatch.setattr(module, "pairs", lambda: small)
    files._entries.cache_clear()
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "known.txt").write_text(small[7].document)
    (texts / "page.html").write_text(f"<main><p>{small[9].document}</p></main>")
    (texts / "русский.txt").write_text("слово")
    (texts / "large.txt").write_text(f"{small[3].document} " * 3000)
    (texts / "empty.txt").write_text(" \n")
    (texts / "<b>binary").write_bytes(b"\0\1")
    assert main(["predict", str(trained), str(texts), "--out", str(tmp_path / "words.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "words.csv").open(newline="")))
    files._entries.cache_clear()
    errors = {row["file"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {"empty.txt", "<b>binary"} and "no words" in errors["empty.txt"]
    first = {row["file"]: row["word"] for row in rows if row["place"] == "1"}
    assert first["known.txt"] == small[7].headword and first["page.html"] == small[9].headword
    assert first["large.txt"] == small[3].headword and "русский.txt" in first
    assert len([row for row in rows if row["file"] == "known.txt"]) == files.SHOWN
    assert "<b>binary" not in (tmp_path / "words.html").read_text()


@pytest.mark.parametrize("kind", ["Roberta", "Bert"])
def test_a_pretrained_encoder_takes_the_place_of_the_bag(kind, tmp_path):
    save_pretrained(tmp_path, kind)
    model, reader = Encoder(folder=str(tmp_path)), TokenReader(str(tmp_path), 128)
    rows = [reader.tokens(text) for text in ("small ant", "large cow dog " * 100, "")]
    assert [len(row) for row in rows] == [2, 128, 0]
    vectors = model.eval().embed(reader.rows(["small ant", "large cow", ""]))
    assert vectors.shape == (3, 16) and torch.allclose(vectors.norm(dim=1), torch.tensor([1.0, 1.0, 0.0]), atol=1e-5)
    alone = model.embed(reader.rows(["small ant"]))
    assert torch.allclose(alone, model.embed(reader.rows(["small ant", "large cow dog bee"]))[:1], atol=1e-5)
    assert {name.partition(".")[0] for name in model.state_dict()} == {"temperature", "weights", "pretrained"}
    bag = Encoder(folder=str(tmp_path), whole=False)
    assert torch.allclose(bag.embeddings.weight.norm(dim=1)[2:], torch.ones(len(bag.embeddings.weight) - 2))
    assert bag.embed(reader.rows(["small ant"])).shape == (1, 16) and not hasattr(bag, "pretrained")
    with pytest.raises(ConfigError, match="tokens of another model"):
        model.embed(TokenReader().rows(["small ant"]))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="of the kind `gpt2`"):
        Encoder(folder=str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        Encoder(folder=str(tmp_path))


@pytest.mark.slow
def test_a_run_of_a_pretrained_encoder_opens_again(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roberta")
    save_pretrained(folder, "Roberta")
    named = ("--model.folder", str(folder), "--data.arguments.tokenizer", str(folder))
    run = train_toy(tmp_path_factory, "retrieval", *TOY, *named)
    model, _ = load_model(run)
    start = Encoder(folder=str(folder)).pretrained.state_dict()
    assert any(not torch.equal(start[name], rows) for name, rows in model.pretrained.state_dict().items())
    assert np.isfinite(mining.vectors(model, ["small ant", ""])).all()
