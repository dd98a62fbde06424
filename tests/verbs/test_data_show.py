"""`shoestring data show`: what is printed is what training reads, and cannot control a terminal."""

import json

import pytest

from shoestring.cli import main
from shoestring.commands.data import _lines
from shoestring.core.errors import ConfigError, DataError
from shoestring.data import Data
from shoestring.data.corpus import prepare_source
from shoestring.verbs.data import show
from shoestring.verbs.settings import DataView
from tests.data.chat_files import as_sharegpt, plain_chats, write
from tests.data.chat_templates import CHATML, compared, tokenizer
from tests.small_runs import write_run_file


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    tokenizer(compared(CHATML)).save(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.slow
def test_what_is_shown_is_what_is_trained(model, tmp_path):
    source = write(tmp_path, "a.json", map(as_sharegpt, plain_chats(12)))
    (shown,) = show(str(source), DataView(model=model, first=99, sequence=48))
    data = Data(form="chat", tokenizer=f"{model}/tokenizer.json", sequence=48, held_out=0.2)
    corpus = prepare_source(str(source), data, tmp_path / "prepared")
    parts = (corpus.train, corpus.held_out)
    assert (shown.format, shown.records, shown.refusal) == ("sharegpt", 12, "")
    assert shown.samples == corpus.documents and shown.learnt == sum(part.targets for part in parts)
    assert shown.cut == sum(part.cut for part in parts) > 0
    assert sum(shown.left_out.values()) == sum(part.left_out for part in parts)
    assert shown.ends == ["<|im_end|>"]
    text = "".join(piece.text for piece in shown.first[0].samples[0].pieces)
    assert text.startswith("<|im_start|>")


@pytest.mark.slow
def test_control_characters_are_escaped_and_special_tokens_are_told_from_text(model, tmp_path, capsys):
    talk = [{"role": "user", "content": "\x1b[31mred\x07"}, {"role": "assistant", "content": "<|im_end|>\x9b"}]
    (tmp_path / "a\x1b.jsonl").write_text(json.dumps({"messages": talk}))
    assert main(["data", "show", str(tmp_path / "a\x1b.jsonl"), "--model", model]) == 0
    printed = capsys.readouterr().out
    assert "⟨<|im_start|>⟩user\n  \\x1b[31mred\\x07⟨<|im_end|>⟩\n" in printed
    assert "»<|im_end|>\\x9b⟨<|im_end|>⟩«\n" in printed
    assert not {"\x1b", "\x07", "\x9b"} & set(printed)
    (shown,) = show(str(tmp_path / "a\x1b.jsonl"), DataView(model=model))
    coloured = "\n".join(_lines(shown, coloured=True))
    assert "\x1b[32m<|im_end|>\\x9b\x1b[0m\x1b[32m\x1b[1m<|im_end|>\x1b[0m" in coloured
    assert "\x07" not in coloured and "\\x1b[31mred" in coloured
    assert main(["data", "show", str(tmp_path / "a\x1b.jsonl"), "--model", model, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert {"text": "<|im_end|>\x9b", "learnt": True, "special": False} in table["first"][0]["samples"][0]["pieces"]


@pytest.mark.slow
def test_what_is_cut_left_out_or_refused_is_said(model, tmp_path, capsys):
    long = [{"role": "user", "content": "q" * 60}, TALK[1]]
    rows = [{"messages": TALK}, {"messages": long}, {"messages": TALK, "weight": 0}, {"messages": TALK[:1]}]
    source = str(write(tmp_path, "a.jsonl", rows))
    assert main(["data", "show", source, "--model", model, "--sequence", "40"]) == 2
    printed = capsys.readouterr().out
    assert "left out, because the record has a weight of 0: 1" in printed
    assert "left out, because no answer begins within its first 40 tokens: 1" in printed
    assert "which are cut: 1" in printed
    assert f"training refuses this data: {source}:4: a chat without answers" in printed
    pairs = write(tmp_path, "a.ndjson", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    assert "a preference pair" in show(str(pairs), DataView(model=model))[0].refusal
    assert main(["data", "show", source, "--model", model, "--most", "2", "--first", "0"]) == 0
    assert "records: 2" in (printed := capsys.readouterr().out) and "and there are more" in printed


def test_texts_run_files_and_missing_models(model, tmp_path):
    (tmp_path / "a.txt").write_text("a line\n" * 200)
    (text,) = show(str(tmp_path / "a.txt"))
    assert (text.format, text.tokens) == ("text", 0)
    assert "(400 characters more)" in text.first[0].samples[0].pieces[0].text
    lines = write(tmp_path, "a.jsonl", [{"text": "one"}, {"text": "two"}])
    (texts,) = show(str(lines), DataView(model=model))
    assert (texts.format, texts.records, texts.learnt) == ("text", 2, 6)
    chats = str(write(tmp_path, "a.ndjson", [{"messages": TALK}] * 3))
    with pytest.raises(ConfigError, match="chats need the chat template of a model"):
        show(chats)
    with pytest.raises(ConfigError, match="there is no model `nowhere`"):
        show(chats, DataView(model="nowhere"))
    with pytest.raises(DataError, match="no file"):
        show("nothing.jsonl", DataView(model=model))
    run = {"run": {"model": model, "data": [chats]}, "data": {"form": "chat", "tokenizer": "model", "sequence": 8}}
    (shown,) = show(str(write_run_file(tmp_path / "run.toml", run)))
    assert (shown.records, shown.cut) == (3, 3)
