"""Any text comes back; no text can end a document; the thread pool of the engine stays off."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError, DataError
from shoestring.data import Data
from shoestring.data.corpus import prepare_source
from shoestring.data.tokenizer import END, Tokenizer, byte_tokenizer, load_tokenizer, single_threaded, train_bpe

TEXTS = ["def add(a, b):\n    return a + b\n", "the quick brown fox, the quick brown dog\n" * 20, "naïve — 漢字 🙂\n"]
BPE, PLAIN = train_bpe(TEXTS, 300), byte_tokenizer()

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from([END, f"a{END}b", " \r\n\t ", "\0"])


@given(texts)
def test_any_text_comes_back(text):
    for tokenizer in (BPE, PLAIN):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids
    assert PLAIN.encode(text) == list(text.encode())


@given(st.lists(texts.filter(bool), max_size=5))
def test_documents_come_back_from_one_stream(documents):
    for tokenizer in (BPE, PLAIN):
        stream = [np.array([], np.int64)]
        for ids in tokenizer.encode_batch(documents):
            stream += [np.array([tokenizer.end_of_text]), ids]
        assert tokenizer.decode_documents(np.concatenate(stream)) == documents


def test_the_vocabulary_has_the_size_asked_for_and_saves_tokens():
    assert BPE.vocab_size == 300
    assert PLAIN.vocab_size == 257
    assert len(BPE.encode(TEXTS[1])) < len(TEXTS[1]) / 2
    assert train_bpe(TEXTS, 300).hash == BPE.hash != PLAIN.hash


def test_decoding_half_a_character_replaces_it_and_drops_the_end():
    assert PLAIN.decode([65, 0xC3, PLAIN.end_of_text]) == "A\ufffd"


def test_a_prompt_stands_behind_what_the_tokenizer_puts_before_a_text():
    assert BPE.encode_prompt("ab") == BPE.encode("ab")
    assert BPE.encode_prompt("") == [BPE.end_of_text]
    engine = train_bpe(TEXTS, 300).engine
    engine.add_special_tokens(["<s>"])
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"<s> $A {END}", special_tokens=[("<s>", engine.token_to_id("<s>")), (END, BPE.end_of_text)]
    )
    framed = Tokenizer(engine)
    (begin,) = framed.prefix
    for text in ("ab", "", "<s>"):
        assert framed.encode_prompt(text, parse_special=False) == [begin, *framed.encode(text)]
    assert framed.encode_prompt("a<s>b") == [begin, *framed.encode("a"), begin, *framed.encode("b")]
    assert framed.encode_prompt("a", add_special_tokens=False) == framed.encode("a")


@pytest.mark.parametrize("tokenizer", [BPE, PLAIN])
def test_one_file_format_for_both(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.hash, loaded.end_of_text, loaded.vocab_size) == (
        tokenizer.hash,
        tokenizer.end_of_text,
        tokenizer.vocab_size,
    )
    assert loaded.encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert plain.decode(plain.encode(TEXTS[2]).ids) == TEXTS[2]
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_vocabulary_without_room_for_a_merge_is_refused():
    assert train_bpe(TEXTS, 258).vocab_size == 258
    with pytest.raises(ConfigError, match="258"):
        train_bpe(TEXTS, 257)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer at .*x\.json"):
        load_tokenizer(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "x.json")


def test_an_id_that_would_take_all_memory_is_refused(tmp_path):
    table = json.loads(PLAIN.engine.to_str())
    table["model"]["vocab"]["a"] = 2**31
    (tmp_path / "x.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match="has a token of id 2147483648"):
        load_tokenizer(tmp_path / "x.json")


def test_only_a_corpus_needs_an_end_of_text(tmp_path):
    table = json.loads(PLAIN.engine.to_str())
    table["added_tokens"] = []
    del table["model"]["vocab"][END]
    (tmp_path / "x.json").write_text(json.dumps(table))
    loaded = load_tokenizer(tmp_path / "x.json")
    assert loaded.end is None
    assert loaded.encode_prompt("a") == [97]
    with pytest.raises(DataError, match=r"x\.json has no end-of-text token"):
        loaded.check_corpus()
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        loaded.encode_prompt("")


def test_only_a_corpus_needs_a_tokenizer_that_loses_no_text(tmp_path):
    table = json.loads(PLAIN.engine.to_str())
    table["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "x.json").write_text(json.dumps(table))
    loaded = load_tokenizer(tmp_path / "x.json")
    assert loaded.decode(loaded.encode("AB")) == "ab"
    with pytest.raises(DataError, match=r"x\.json loses text"):
        loaded.check_corpus()
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 50)
    with pytest.raises(DataError, match="loses text"):
        prepare_source(str(tmp_path / "*.txt"), Data(tokenizer=str(tmp_path / "x.json"), sequence=4), tmp_path / "run")


def test_text_that_a_tokenizer_has_no_tokens_for_is_one_error():
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "</s>": 1}, unk_token="[UNK]")))
    assert tokenizer.encode_prompt("a") == [0]
    for encode in (tokenizer.encode_prompt, tokenizer.encode):
        with pytest.raises(DataError, match="the tokenizer cannot encode a text: WordPiece error"):
            encode("b")


def test_the_switch_of_the_thread_pool_is_put_back(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with single_threaded():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with pytest.raises(KeyError), single_threaded():
        raise KeyError
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


FORK = """
import os, sys
from pathlib import Path
from shoestring.data import Data
from shoestring.data.corpus import prepare_source
folder = Path(sys.argv[1])
corpus = prepare_source(str(folder / "*.txt"), Data(vocabulary=300, sequence=8), folder)
corpus.train_texts(), corpus.tokenizer.encode("x"), corpus.tokenizer.encode_batch(["a b"] * 50)
child = os.fork()
if child == 0:
    corpus.tokenizer.encode_batch(["a b"] * 50)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_a_fork_after_preparing_warns_of_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(3000)))
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
        | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert (done.returncode, done.stderr) == (0, "")
