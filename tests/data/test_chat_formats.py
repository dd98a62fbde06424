"""The same chats in each format and type of file give the same tokens and masks; what is no chat is named."""

import gzip
import json
import os
import sys
import threading

import numpy as np
import pytest

from shoestring.core.errors import DataError
from shoestring.data import Data
from shoestring.data.chat_formats import ChatRecord, PreferencePair, RatedAnswer, TextRecord, parse_chat, parse_record
from shoestring.data.chat_template import chat_template
from shoestring.data.chats import parsed_chats, samples_of
from shoestring.data.corpus import prepare_source
from shoestring.data.sources import open_source
from tests.data.chat_files import FILES, PLAIN, RICH, lines, plain_chats, rich_chats, table, write
from tests.data.chat_templates import QWEN3, compared, tokenizer
from tests.shares import share

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ enable_thinking }}" + compared(QWEN3)
SAMPLES = chat_template(tokenizer(TEMPLATE))


def read(source, field=""):
    """Every sample of a source."""
    records = parsed_chats(open_source(str(source), field), field)
    return [
        (chat.key, chat.tokens, chat.trained)
        for where, record in records
        for chat in samples_of(record, SAMPLES, where)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "formats"), [(plain_chats, PLAIN), (rich_chats, RICH)], ids=["plain", "rich"])
def test_the_same_chats_in_each_format_and_file(tmp_path, make, formats):
    chats = list(make(8))
    wanted = read(write(tmp_path, "a.jsonl", chats))
    assert len(wanted) >= 8
    for convert in formats.values():
        for name in FILES:
            assert read(write(tmp_path, name, map(convert, chats))) == wanted, (convert, name)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "formats"), [(plain_chats, PLAIN), (rich_chats, RICH)], ids=["plain", "rich"])
def test_many_chats_in_each_format_and_file_make_the_same_corpus(tmp_path, make, formats, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer(TEMPLATE).save(tmp_path / "tokenizer.json")
    chats = list(make(share(300, 40)))
    data = Data(form="chat", tokenizer=str(tmp_path / "tokenizer.json"), sequence=256, held_out=0.2)
    contents = set()
    for convert in formats.values():
        sources = [str(write(tmp_path, name, map(convert, chats))) for name in FILES]
        (tmp_path / convert.__name__).mkdir()
        write(tmp_path / convert.__name__, "a.parquet", map(convert, chats))
        sources.append(f"hf:{tmp_path / convert.__name__}")
        for source in sources:
            corpus = prepare_source(source, data, tmp_path / "prepared")
            contents.add((corpus.train.content, corpus.held_out.content))
    assert len(contents) == 1


def test_prompts_and_completions_as_text_and_as_messages(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}]} for n in range(4)
    ]
    pairs = [{"prompt": f"{n}?", "completion": str(n)} for n in range(4)]
    as_messages = [{"prompt": chat["messages"][:1], "completion": chat["messages"][1:]} for chat in chats]
    asked = [{"question": f"{n}?", "answer": str(n), "id": n} for n in range(4)]
    wanted = read(write(tmp_path, "a.jsonl", chats))
    for name in FILES:
        assert read(write(tmp_path, name, pairs)) == wanted
        assert read(write(tmp_path, name, as_messages)) == wanted
        assert read(write(tmp_path, name, asked), "prompt=question, completion=answer") == wanted
        assert read(write(tmp_path, name, chats), "messages") == wanted
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (tmp_path / "a.jsonl").write_bytes(lines([{"prompt": before, "completion": "d"}]))
    ((_, tokens, trained),) = read(tmp_path / "a.jsonl")  # answers of the prompt are not learnt
    learnt = [token for token, flag in zip(tokens, trained, strict=True) if flag]
    assert SAMPLES.tokenizer.engine.decode(learnt, skip_special_tokens=False).endswith("d<|im_end|>")
    assert b"b" not in bytes(token for token in learnt if token < 256)


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, PreferencePair),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "b"}]}, PreferencePair),
        ({"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "b"}]}, PreferencePair),
        ({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"},
          "rejected": {"from": "gpt", "value": "b"}}, PreferencePair),
        ({"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}, PreferencePair),
        ({"prompt": "q", "completion": "a", "label": True}, RatedAnswer),
        ({"prompt": [USER], "completion": [ANSWER], "label": False}, RatedAnswer),
        ({"text": "q"}, TextRecord),
        ({"messages": [USER, ANSWER], "text": None, "chosen": None}, ChatRecord),
    ],
)  # fmt: skip
def test_preferences_and_texts_are_told_from_chats(record, kind):
    parsed = parse_record(record, "", "here")
    assert type(parsed) is kind
    if kind is PreferencePair:
        assert (parsed.prompt, parsed.chosen, parsed.rejected[0]["content"]) == ([USER], [ANSWER], "b")
    if kind is RatedAnswer:
        assert (parsed.prompt, parsed.completion, parsed.desirable) == ([USER], [ANSWER], record["label"])
    if kind is not ChatRecord:
        with pytest.raises(DataError, match=r"here: .*not a chat"):
            parse_chat(record, "", "here")


@pytest.mark.parametrize(
    ("switch", "learnt"),
    [
        ({"weight": 0}, False), ({"weight": 1}, True), ({"weight": 1.0}, True), ({"weight": 0.0}, False),
        ({"weight": None}, True), ({"train": False}, False), ({"train": True}, True), ({"training": False}, False),
        ({"loss": False}, False), ({"mask": True}, False), ({"mask": False}, True), ({"weight": "0"}, False),
        ({"train": True, "weight": 0}, False), ({"weight": 0.5}, None), ({"weight": -1}, None),
        ({"weight": 2}, None),
        ({"weight": float("nan")}, None), ({"weight": [1]}, None), ({"train": "no"}, None),
        ({"train_detail": []}, None),
    ],
)  # fmt: skip
def test_what_a_message_says_of_being_learnt(switch, learnt):
    spoken = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **switch}]
    for talk in ({"messages": [USER, ANSWER | switch]}, {"conversations": spoken}):
        if learnt is None:
            with pytest.raises(DataError, match=r"here: message 2 has a "):
                parse_chat(talk, "", "here")
        else:
            message = parse_chat(talk, "", "here").messages[1]
            assert message == (ANSWER if learnt else ANSWER | {"weight": 0})
    if "train" in switch and switch["train"] is True:
        with pytest.raises(DataError, match='message 1 is of the role "user" and has `train`'):
            parse_chat({"messages": [USER | switch, ANSWER]}, "", "here")


def test_weights_and_masks_of_whole_records(tmp_path):
    chats = [{"messages": [USER, ANSWER], "weight": 0}, {"messages": [USER, ANSWER], "weight": None}]
    assert len(read(write(tmp_path, "a.jsonl", chats))) == len(read(write(tmp_path, "a.parquet", chats))) == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1: a `weight` of 0\.5, neither 0 nor 1"):
        read(write(tmp_path, "a.jsonl", [{"messages": [USER, ANSWER], "weight": 0.5}]))
    assert parse_chat({"messages": [USER, ANSWER], "mask": "User"}, "", "here").messages == [USER, ANSWER]
    assert parse_chat({"messages": [ANSWER], "mask": "gpt"}, "", "here").messages == [ANSWER | {"weight": 0}]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "message 1 is from 'narrator'"),
        (
            {"conversations": [{"from": "function_call", "value": "f(x)"}]},
            "message 1 is a function_call that is not a call in JSON",
        ),
        ({"instruction": 1, "output": "x"}, "'instruction' is int, not text"),
        ({"instruction": "q", "output": "x", "history": ["q", "a"]}, '"history" is not a list of pairs'),
        ({"prompt": "q", "completion": 3}, "'completion' is int, not text"),
        ({"messages": [USER, ANSWER], "tools": "x"}, "'tools' is not a list"),
        ({"messages": [USER, ANSWER | {"tool_calls": "f"}]}, "message 2 has tool calls that are not a list"),
        ({"chosen": [USER], "rejected": [USER]}, "without a prompt or an answer"),
        ({}, "not a known chat format; its keys are none"),
        ({"question": "q"}, "not a known chat format; its keys are `question`"),
    ],
)
def test_a_record_of_no_format_is_named(record, message):
    with pytest.raises(DataError, match=f"here: .*{message}"):
        parse_record(record, "", "here")


def test_unlike_records_in_a_file_are_named_and_in_two_files_are_read(tmp_path):
    alpaca = {"instruction": "q", "output": "a"}
    for name in ("a.jsonl", "a.json"):
        with pytest.raises(
            DataError, match=rf"{name}:\d+: the record has the format alpaca, but .*{name}:\d+ has messages"
        ):
            read(write(tmp_path, name, [{"messages": [USER, ANSWER]}] * 2 + [alpaca]))
    write(tmp_path, "a.jsonl", [{"messages": [USER, ANSWER]}])
    write(tmp_path, "a.json", [alpaca])
    assert len(read(f"{tmp_path}/a.jsonl,{tmp_path}/a.json")) == 2
    with pytest.raises(DataError, match=r"data\.field maps `question` to `prompt`"):
        read(f"{tmp_path}/a.json", "question=prompt")


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b'{"messages": []}\n', "end its name in .jsonl"),
        (b'[{"messages": []}]', ".json"),
        (b"a text", "records are in"),
    ],
)
def test_chats_in_a_file_of_text_are_told_to_be_named(tmp_path, content, hint):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match="does not have the suffix of a file of records") as caught:
        read(tmp_path / "a.txt")
    assert hint in caught.value.hint


def test_a_field_that_is_mapped_and_missing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:1: no field 'asked'"):
        read(write(tmp_path, "a.jsonl", [{"question": "q"}]), "prompt=asked,completion=answer")
    for name in ("a.parquet", "a.csv"):
        with pytest.raises(DataError, match=r"no column of a known format|not a known chat format"):
            read(write(tmp_path, name, [{"question": "q"}]))


# -- files -------------------------------------------------------------------------------------------------------------


CUT = gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "a.jsonl: it is compressed by gzip; end its name in .gz"),
        ("a.jsonl.gz", b'{"text": "x"}', "a.jsonl.gz: it is not compressed by gzip, or damaged"),
        ("a.jsonl.xz", b"\xfd7zXZ\0\0", "a.jsonl.xz: "),
        ("a.jsonl.bz2", b"BZh9 and no more", "it is not compressed by bzip2, or damaged"),
        ("a.jsonl.gz", CUT, "it is cut short: its last gzip member is incomplete"),
        ("a.jsonl.gz", lambda: gzip.compress(bytes(300 << 20), 1), "expands to more than|is longer than"),
        ("a.json", "[]".encode("utf-16"), "a.json: it is UTF-16 or UTF-32; save it as UTF-8"),
        ("a.txt", "text".encode("utf-16"), "a.txt: it is UTF-16 or UTF-32; save it as UTF-8"),
        ("a.json", b"PAR1", "it is a Parquet file; end its name in .parquet"),
        ("a.json", b"PK\x03\x04", "it is a ZIP archive; unpack it first"),
        ("a.parquet.gz", b"", "a Parquet file cannot be read in compressed form"),
        ("a.json", b'[{"text": "a"}, 3]', "a.json:1: not an object"),
        ("a.json", b'[{"text": "a"}\n{"text": "b"}]', "a.json:2: not JSON: `,` or `]` is missing"),
        ("a.json", b'[{"text": "a"},\n {"text": "b"}', "a.json:2: not JSON"),
        ("a.json", b'[{"text": "a"}]\n[1]', "a.json:2: not JSON: something follows the array"),
        ("a.json", b'[{"text":\n "a}', "a.json:2: not JSON: Unterminated string"),
        ("a.json", b'{"text": ' + b"[" * 100_000, "a.json:1: not JSON: it is nested too deeply"),
        ("a.json", b'{"text": "\xff"}', "invalid UTF-8"),
        ("a.json", b'[{"text": "a", }]', "a.json:1: not JSON"),
        ("a.csv", b"text\na,b\n", "a.csv:2: 2 cells in a table of 1 columns"),
        ("a.csv", b'text\n"a\n', "a.csv:2: "),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: a column has no name, or two columns have the same name"),
        ("a.csv", b"text\n\xff\n", "a.csv:2: not UTF-8"),
        ("a.txt", b'{"text": "a"}\n{"text": "b"}\n', "a.txt:1: it looks like records of JSON in a file of text"),
        ("a.txt", b'[\n {"text": "a"}]', "a.txt:1: it looks like records"),
        ("a", b'{"text": "' + b"a" * 100_000, "a:1: it looks like records"),
    ],
    ids=lambda value: "" if callable(value) else str(value)[:20],
)  # fmt: skip
def test_a_file_that_is_not_what_its_name_says_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises(DataError, match=message.replace("[", r"\[")) as caught:
        for _ in open_source(str(tmp_path / name), "text").documents():
            pass
    assert "\n" not in caught.value.parts()[1]


def test_texts_of_records_and_of_compressed_files(tmp_path):
    texts = ["a\nb", 'c,"d"', "é"]
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "wrapped.json"):
        path = write(tmp_path, name, [{"text": text} for text in texts])
        assert [document.text for document in open_source(str(path), "text").documents()] == texts
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"some text\n" * 5000)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    for name in ("a.txt", "a.txt.gz"):
        assert "".join(d.text for d in open_source(str(tmp_path / name), "text").documents()) == "some text\n" * 5000
    for row in ({"text": "one"}, {"body": "one", "parts": [{"id": 1}]}):  # a single record, though it holds a list
        (tmp_path / "a.json").write_text(json.dumps(row))
        documents = open_source(str(tmp_path / "a.json"), next(iter(row))).documents()
        assert [document.text for document in documents] == ["one"]
    for name in ("a.json", "a.jsonl", "a.csv", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
        assert list(open_source(str(tmp_path / name), "text").documents()) == []
    with pytest.raises(DataError, match=r'no field \'text\' \(hint: these are chats: set data.form = "chat"'):
        list(open_source(str(write(tmp_path, "a.jsonl", plain_chats(1))), "text").documents())


def test_zstd_is_read_and_bounded_and_its_package_is_named(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    chats = list(plain_chats(4))
    wanted = read(write(tmp_path, "a.jsonl", chats))
    packed = zstandard.compress(lines(chats))
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert read(tmp_path / "a.jsonl.zst") == wanted
    for content, message in (
        (packed[:-3], "cut short"),
        (b"x" * 30, "damaged"),
        (zstandard.compress(bytes(300 << 20)), "expands to more than|longer than"),
    ):
        (tmp_path / "a.jsonl.zst").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(tmp_path / "a.jsonl.zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r"needs the `zstandard` package: pip install shoestring\[zstd\]"):
        read(tmp_path / "a.jsonl.zst")


def test_records_that_lie_across_what_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("shoestring.data.record_files._BLOCK", 7)
    records = [{"text": "a€\n\\" * n, "n": -(10.0**n), "m": [True, None]} for n in range(9)]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1, ensure_ascii=False))
    documents = open_source(str(tmp_path / "a.json"), "text").documents()
    assert [document.text for document in documents] == [record["text"] for record in records[1:]]


@pytest.mark.slow
def test_a_pipe_is_copied_into_the_folder_and_read_again(tmp_path):
    tokenizer(TEMPLATE).save(tmp_path / "tokenizer.json")
    data = Data(form="chat", tokenizer=str(tmp_path / "tokenizer.json"), sequence=128, held_out=0.2)
    chats = list(plain_chats(10))
    write(tmp_path, "a.jsonl", chats)
    wanted = prepare_source(str(tmp_path / "a.jsonl"), data, tmp_path / "file")
    for name, content in (("pipe", lines(chats)), ("pipe.csv", table(chats, ",")), ("z", gzip.compress(lines(chats)))):
        os.mkfifo(tmp_path / name)
        writer = threading.Thread(target=(tmp_path / name).write_bytes, args=(content,))
        writer.start()
        corpus = prepare_source(str(tmp_path / name), data, tmp_path / f"run-{name}")
        writer.join()
        again = prepare_source(str(tmp_path / name), data, tmp_path / f"run-{name}")  # nobody writes to it now
        assert corpus.fingerprint == again.fingerprint == wanted.fingerprint
        assert np.array_equal(corpus.train.ids, wanted.train.ids)
