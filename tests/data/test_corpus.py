"""Preparing a corpus: the split, reuse, and files that somebody else made."""

import itertools
import json
import os
import random

import numpy as np
import pytest

from shoestring.core.errors import ConfigError, DataError
from shoestring.data import Data
from shoestring.data.corpus import begin_with, prepare_source
from shoestring.data.sources import open_source
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.data.tokens import TokenWriter

SMALL = Data(vocabulary=280, sequence=16, held_out=0.2)
BYTES = Data(tokenizer="bytes", sequence=16, held_out=0.2)


def words(seed, count=80):
    draw = random.Random(seed)
    return " ".join(draw.choice(["loss", "step", "rank", "naïve", "漢字", "wire"]) for _ in range(count)) + "\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(60):
        (tmp_path / "text" / f"{i:02}.txt").write_text(words(i))
    return f"{tmp_path}/text/*.txt"


def documents(part):
    return set(part.decode().split("\0"))


@pytest.mark.parametrize("settings", [SMALL, BYTES])
def test_every_document_is_on_one_side_and_comes_back(files, tmp_path, settings):
    corpus = prepare_source(files, settings, tmp_path / "run")
    train, held_out = documents(corpus.train_texts()), documents(corpus.held_out_texts())
    assert train | held_out == {words(i) for i in range(60)}
    assert not train & held_out
    assert (corpus.train.documents, corpus.held_out.documents) == (len(train), len(held_out))
    assert 3 <= len(held_out) <= 24
    assert corpus.train.bytes == sum(len(text.encode()) for text in train)
    assert corpus.bytes == sum(len(words(i).encode()) for i in range(60))
    assert corpus.vocab_size == (280 if settings is SMALL else 257)
    targets = [t for i in range(len(corpus.held_out)) for t in corpus.held_out[i]["targets"].tolist() if t >= 0]
    assert len(targets) == corpus.held_out.targets == corpus.held_out.tokens - 1
    assert corpus.tokenizer.decode(targets).encode() == corpus.held_out_texts().replace(b"\0", b"")


def test_the_split_does_not_depend_on_the_other_documents(files, tmp_path):
    before = documents(prepare_source(files, BYTES, tmp_path / "run").held_out_texts())
    (tmp_path / "text" / "000.txt").write_text("a new first document\n" * 20)
    after = documents(prepare_source(files, BYTES, tmp_path / "run").held_out_texts())
    assert after - before <= {"a new first document\n" * 20}
    assert before <= after


def test_documents_with_the_same_text_count_once(files, tmp_path):
    for i in range(5):
        (tmp_path / "text" / f"copy{i}.txt").write_text(words(7))
    corpus = prepare_source(files, BYTES, tmp_path / "run")
    assert (corpus.documents, corpus.duplicates) == (60, 5)


def test_a_prepared_corpus_is_used_again_until_something_changes(files, tmp_path):
    folder = tmp_path / "run"

    def stamps():
        return [(folder / name).stat().st_ino for name in ("train.tokens", "held_out.tokens")]

    first = prepare_source(files, SMALL, folder)
    made = stamps()
    again = prepare_source(files, Data(vocabulary=280, sequence=8, held_out=0.2, workers=2), folder)
    assert stamps() == made
    assert again.fingerprint == first.fingerprint
    assert again.train.sequence == 8
    (tmp_path / "text" / "00.txt").write_text(words(1000))
    changed = prepare_source(files, SMALL, folder)
    assert stamps() != made
    assert changed.fingerprint != first.fingerprint
    assert prepare_source(files, Data(vocabulary=281, sequence=16, held_out=0.2), folder).vocab_size == 281
    assert sorted(path.name for path in folder.iterdir()) == ["held_out.tokens", "tokenizer.json", "train.tokens"]


def test_a_folder_that_begins_with_what_another_has_prepared_shares_it_as_far_as_it_fits(files, tmp_path):
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    prepare_source(files, SMALL, one)
    whole = {path.name: path.read_bytes() for path in one.iterdir()}
    for folder in (same, other):
        begin_with(folder, one)
    prepare_source(files, SMALL, same)
    assert all((same / name).samefile(one / name) for name in whole)
    assert prepare_source(files, Data(vocabulary=281, sequence=16, held_out=0.2), other).vocab_size == 281
    assert not any((other / name).samefile(one / name) for name in whole)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == whole


@pytest.mark.parametrize("name", ["tokenizer.json", "train.tokens", "held_out.tokens"])
@pytest.mark.parametrize("kind", ["missing", "damaged"])
def test_a_missing_or_damaged_file_is_made_again(files, tmp_path, name, kind):
    folder = tmp_path / "run"
    first = prepare_source(files, SMALL, folder)
    whole = (folder / name).read_bytes()
    if kind == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(whole[:-3] + b"\1" + whole[-2:])
    assert prepare_source(files, SMALL, folder).fingerprint == first.fingerprint
    assert (folder / name).read_bytes() == whole


def test_another_tokenizer_in_the_folder_is_replaced(files, tmp_path):
    corpus = prepare_source(files, SMALL, tmp_path / "run")
    byte_tokenizer().save(tmp_path / "run" / "tokenizer.json")
    assert prepare_source(files, SMALL, tmp_path / "run").tokenizer.hash == corpus.tokenizer.hash


def test_the_same_text_gives_the_same_fingerprint_anywhere(files, tmp_path):
    first = prepare_source(files, SMALL, tmp_path / "one")
    os.utime(tmp_path / "text" / "00.txt", (1, 1))
    assert prepare_source(files, SMALL, tmp_path / "two").fingerprint == first.fingerprint


def test_one_small_file_is_split_too(tmp_path):
    (tmp_path / "a.txt").write_text("".join(words(i, 12) for i in range(400)))
    corpus = prepare_source(str(tmp_path / "a.txt"), Data(vocabulary=300, sequence=16), tmp_path / "run")
    assert corpus.train.bytes > 3 * corpus.held_out.bytes > 0


def test_a_tokenizer_from_a_file(files, tmp_path):
    first = prepare_source(files, SMALL, tmp_path / "one")
    path = str(tmp_path / "one" / "tokenizer.json")
    second = prepare_source(files, Data(tokenizer=path, sequence=16, held_out=0.2), tmp_path / "two")
    assert second.fingerprint == first.fingerprint


# ---- token files as the source ---------------------------------------------------------------------------------------


def test_a_token_file_with_its_neighbours(files, tmp_path):
    first = prepare_source(files, SMALL, tmp_path / "one")
    second = prepare_source(str(tmp_path / "one" / "train.tokens"), SMALL, tmp_path / "two")
    assert second.fingerprint == first.fingerprint
    assert second.held_out_texts() == first.held_out_texts()
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["tokenizer.json"]


def test_a_token_file_alone_has_its_last_documents_held_out(files, tmp_path):
    first = prepare_source(files, SMALL, tmp_path / "one")
    (tmp_path / "one" / "held_out.tokens").unlink()
    second = prepare_source(str(tmp_path / "one" / "train.tokens"), SMALL, tmp_path / "two")
    assert second.train_texts() + b"\0" + second.held_out_texts() == first.train_texts()
    assert second.bytes == first.train.bytes
    assert second.held_out.bytes == len(second.held_out_texts().replace(b"\0", b""))
    assert second.documents == first.train.documents
    assert second.held_out.documents == second.held_out_texts().count(b"\0") + 1
    assert 0.1 < second.held_out.tokens / first.train.tokens < 0.3


def test_a_token_file_of_another_tokenizer_is_refused(files, tmp_path):
    prepare_source(files, SMALL, tmp_path / "one")
    byte_tokenizer().save(tmp_path / "bytes.json")
    other = Data(tokenizer=str(tmp_path / "bytes.json"), sequence=16)
    with pytest.raises(DataError, match="another tokenizer: it knew 280 tokens, and the one in use knows 257"):
        prepare_source(str(tmp_path / "one" / "train.tokens"), other, tmp_path / "two")


def test_a_damaged_token_file_is_refused_as_a_source(files, tmp_path):
    prepare_source(files, SMALL, tmp_path / "one")
    path = tmp_path / "one" / "train.tokens"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match="is damaged"):
        prepare_source(str(path), SMALL, tmp_path / "two")


def test_a_token_file_of_one_document_cannot_be_split(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path / "tokenizer.json")
    with TokenWriter(tmp_path / "a.tokens", 257) as writer:
        writer.append(np.array([256, *b"x" * 100]), size=100)
        writer.finish(tokenizer=tokenizer.hash, recipe="")
    with pytest.raises(DataError, match=r"training part .* 0 tokens"):
        prepare_source(str(tmp_path / "a.tokens"), BYTES, tmp_path / "two")


# ---- what cannot be prepared -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "sequence", "message"),
    [
        ([], 16, "the corpus is empty"),
        (["alone"], 16, "one document"),
        (["short", "texts"], 16, "the training part of the corpus is 6 tokens, fewer than one sample of 16"),
        ([words(i) for i in range(60)], 8000, "the held-out part of the corpus is .* tokens, fewer than"),
    ],
)
def test_too_little_text_is_refused_and_leaves_no_token_files(tmp_path, texts, sequence, message):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = Data(tokenizer="bytes", sequence=sequence, held_out=0.2)
    with pytest.raises(DataError, match=message):
        prepare_source(str(tmp_path / "a.jsonl"), settings, tmp_path / "run")
    assert not [path.name for path in (tmp_path / "run").iterdir() if "tokens" in path.name]


@pytest.mark.parametrize(
    "wrong", [{"vocabulary": 257}, {"sequence": -1}, {"held_out": 0}, {"held_out": 1}, {"workers": -1}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"data.{next(iter(wrong))}"):
        Data(**wrong)


def test_a_share_of_few_documents_leaves_both_sides_some(tmp_path):
    for held_out, count in itertools.product((0.001, 0.999), (2, 3, 5)):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": words(i)}) + "\n" for i in range(count)))
        corpus = prepare_source(
            str(tmp_path / "a.jsonl"), Data(tokenizer="bytes", sequence=16, held_out=held_out), tmp_path
        )
        smaller = corpus.held_out if held_out < 0.5 else corpus.train
        assert smaller.documents == 1
        assert corpus.documents == count


def test_the_key_alone_decides_the_side(files, tmp_path):
    corpus = prepare_source(files, BYTES, tmp_path / "run")
    keys = {document.text: document.key for document in open_source(files, "text").documents()}
    assert documents(corpus.held_out_texts()) == {text for text, key in keys.items() if key < 0.2 * 2**64}
