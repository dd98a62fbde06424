"""Corpora of others (text, .jsonl, .parquet, .tokens and image files) and tokenizers, prepared as a user may ask."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import struct
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.hostile import hostile
from tests.hostile.frame import Act, command

TEXT = "a text that is trained on, number {0}, and some more of it, again {0}\n"


def write_texts(draw: Random, folder: Path) -> str:
    folder.mkdir()
    for number in range(draw.choice((2, 40))):
        (folder / f"{number}.txt").write_text(TEXT.format(number))
    act = draw.random()
    if act < 0.4:  # folders within one another
        for name in ("a", "b", "c"):
            (folder / name).symlink_to(folder)
    elif act < 0.6:
        os.link(folder / "0.txt", folder / "again.txt")
        (folder / "linked.txt").symlink_to(folder / "1.txt")
    elif act < 0.8:
        os.mkfifo(folder / "pipe.txt")
    else:
        (folder / os.fsdecode(b"\xff\xfe.txt")).write_text(TEXT)
        (folder / f"{hostile.ESCAPE}.txt").write_bytes(b"\0\xff" * 100)
    return f"{folder.name}/**/*.txt"


def write_lines(draw: Random, path: Path) -> str:
    rows: list[Any] = [{"text": TEXT.format(number)} for number in range(40)]
    for _ in range(draw.choice((1, 3))):
        rows[draw.randrange(len(rows))] = hostile.tampered(draw, rows[0])
    lines = [hostile.dumps(row) for row in rows]
    if draw.random() < 0.2:
        lines.append(b'{"text": "' + b"x" * (70 << 20) + b'"}')
    path.write_bytes(b"\n".join(lines))
    return path.name


def write_parquet(draw: Random, path: Path) -> str:
    act = draw.random()
    if act < 0.4:  # few bytes of equal values, which are many
        rows = draw.choice((1 << 12, 1 << 21, 1 << 24))
        values = pyarrow.array(["x" * draw.choice((1, 1000, 1 << 20))])
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * min(rows, 1 << 16), pyarrow.int32()), values)
        table = pyarrow.table({"text": pyarrow.chunked_array([column] * max(1, rows >> 16))})
        pyarrow.parquet.write_table(table, path, store_schema=False, compression="zstd")
    else:
        content = [draw.choice((TEXT.format(number), None, "")) for number in range(60)]
        table = pyarrow.table({"text": content if draw.random() < 0.7 else list(range(60))})
        pyarrow.parquet.write_table(table, path, compression=draw.choice(("none", "gzip", "snappy")))
        data = bytearray(path.read_bytes())
        for _ in range(draw.choice((0, 1, 5, 30))):
            places = (draw.randrange(4, 60), len(data) - draw.randrange(1, min(300, len(data))))
            data[draw.choice(places)] = draw.randrange(256)
        path.write_bytes(data)
    if draw.random() < 0.1:
        hostile.put_odd(draw, path)
    return path.name


def write_tokens(draw: Random, path: Path) -> str:
    import numpy as np

    from shoestring.data.tokenizer import byte_tokenizer
    from shoestring.data.tokens import TokenWriter

    tokenizer = byte_tokenizer()
    tokenizer.save(path.parent / "tokenizer.json")
    with TokenWriter(path, 257) as writer:
        for number in range(40):
            writer.append(np.array([256, *tokenizer.encode(TEXT.format(number))]), size=100)
        writer.finish(tokenizer=tokenizer.hash, recipe="")
    data = path.read_bytes()
    if draw.random() < 0.5:
        head = hostile.dumps(hostile.tampered(draw, json.loads(data[8:1024])))[:1000]
        path.write_bytes((data[:8] + head).ljust(1024) + data[1024:])
    else:
        hostile.tamper_file(draw, draw.choice((path, path.parent / "tokenizer.json")))
    return path.name


def write_tokenizer(draw: Random, folder: Path) -> None:
    from shoestring.data.tokenizer import byte_tokenizer

    path = folder / "tokenizer.json"
    if path.exists() or path.is_symlink():
        return
    byte_tokenizer().save_pretrained(folder, 64)
    table = json.loads(path.read_bytes())
    if draw.random() < 0.3:
        pattern = draw.choice(("(a|a)*b", "(.*)*x", "(", "", "(?i:(x+x+)+y)"))
        table["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
    path.write_bytes(hostile.dumps(hostile.tampered(draw, table)))
    if draw.random() < 0.3:
        hostile.tamper_file(draw, draw.choice((path, folder / "tokenizer_config.json")))


def write_images(draw: Random, folder: Path) -> str:
    folder.mkdir()
    for part, count in (("train", 40), ("t10k", 20)):
        shape = [count, 8, 8]
        head = b"\0\0\x08" + bytes([draw.choice((3, 3, 255, 0))]) + struct.pack(">3I", *shape)
        body = draw.choice((bytes(count * 64), bytes(draw.choice((1, 200 << 20)))))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + body, 9))
        labels = b"\0\0\x08\x01" + struct.pack(">I", draw.choice((count, 2**31))) + bytes(count)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    if draw.random() < 0.4:
        hostile.tamper_file(draw, draw.choice(sorted(folder.iterdir())))
    return folder.name


def prepare(source: str, tokenizer: str, field: str, form: str) -> object:
    """Prepare a corpus as training does; 2 and a line of error where it is refused."""
    import sys

    from shoestring.core.errors import ShoestringError
    from shoestring.core.world import World
    from shoestring.data import Data, images
    from shoestring.data.sources import is_mnist
    from shoestring.data.together import prepare as prepare_corpus
    from shoestring.storage.foreign import printable

    try:
        if is_mnist(source):
            images.mnist(Path(source))
        else:
            settings = Data(tokenizer=tokenizer, sequence=16, field=field, form=form, held_out=0.3)
            corpus = prepare_corpus(source, "made", settings, world=World())
            corpus.train[0]
    except ShoestringError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def generate(draw: Random, folder: Path) -> Act:
    kind = draw.choice(("texts", "lines", "chats", "parquet", "tokens", "tokenizer", "images"))
    tokenizer, field, form = "bytes", "text", "text"
    if kind == "texts":
        source = write_texts(draw, folder / "texts")
    elif kind == "lines":
        source = write_lines(draw, folder / "texts.jsonl")
    elif kind == "parquet":
        source = write_parquet(draw, folder / "texts.parquet")
    elif kind == "tokens":
        source, tokenizer = write_tokens(draw, folder / "texts.tokens"), "tokenizer.json"
    elif kind == "images":
        source = write_images(draw, folder / "images")
    elif kind == "tokenizer":
        (folder / "texts.txt").write_text("".join(TEXT.format(number) for number in range(200)))
        write_tokenizer(draw, folder)
        source, tokenizer = "texts.txt", "tokenizer.json"
    else:
        source, tokenizer, field, form = write_chats(draw, folder), "tokenizer.json", "", "chat"
        if draw.random() < 0.3:
            (folder / "config.json").write_text("{}")
            return command("data", "show", source, "--model", ".", *(["--json"] if draw.random() < 0.3 else []))
    return lambda: prepare(source, tokenizer, field, form)


def write_chats(draw: Random, folder: Path) -> str:
    from shoestring.data.tokenizer import byte_tokenizer

    byte_tokenizer().save_pretrained(folder, 64)
    template = draw.choice(TEMPLATES)
    config = {"eos_token": "<|endoftext|>", "chat_template": template}
    config = hostile.tampered(draw, config) if draw.random() < 0.3 else config
    (folder / "tokenizer_config.json").write_bytes(hostile.dumps(config))
    chat = {"messages": [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]}
    rows = [json.loads(json.dumps(chat).replace("question", f"question {number}")) for number in range(20)]
    if draw.random() < 0.7:
        rows[draw.randrange(20)] = hostile.tampered(draw, chat)
    return write_rows(draw, folder, rows)


def write_rows(draw: Random, folder: Path, rows: list[Any]) -> str:
    """Write chats in one of the formats and types of files, perhaps damaged, or as much more than they seem."""
    convert = draw.choice((lambda row: row, as_sharegpt, as_alpaca))
    rows = [convert(row) for row in rows]
    lines = b"\n".join(map(hostile.dumps, rows))
    kind = draw.choice(("jsonl", "ndjson", "JSONL", "json", "csv", "tsv", "parquet"))
    if kind == "json":
        lines = b"[" + lines.replace(b"\n", b",\n") + b"]"
        lines = draw.choice((lines, b'{"data": ' + lines + b"}", lines[:-1], b"[" * 100_000, b'{"a":' * 100_000))
    elif kind in ("csv", "tsv"):
        names = sorted({str(name) for row in rows if isinstance(row, dict) for name in row})
        cells = [[row.get(name) if isinstance(row, dict) else row for name in names] for row in rows]
        quoted = [['"' + str(cell).replace('"', '""') + '"' for cell in row] for row in [names, *cells]]
        lines = "\n".join((";" if draw.random() < 0.1 else {"csv": ",", "tsv": "\t"}[kind]).join(row) for row in quoted)
        lines = lines.encode("utf-8", "replace")
    elif kind == "parquet":
        columns = {
            "messages": [hostile.dumps(row).decode("utf-8", "replace") for row in rows],
            "tools": [None] * len(rows),
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "chats.parquet")
        lines = (folder / "chats.parquet").read_bytes()
    if draw.random() < 0.1:
        lines = draw.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"PAR1", b"\0")) + lines
    path = folder / f"chats.{kind}"
    if draw.random() < 0.4:
        suffix, compress = draw.choice(((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)))
        path = folder / f"chats.{kind}{draw.choice((suffix, suffix.upper()))}"
        more = draw.choice((b"", b"", b" " * (300 << 20), b'{"text": "' + b"x" * (70 << 20)))
        lines = compress(lines + more)
        lines = lines[: draw.choice((len(lines), len(lines) // 2, len(lines) - 1))]
    path.write_bytes(lines)
    if draw.random() < 0.2:
        hostile.tamper_file(draw, path)
    return path.name


def as_sharegpt(row: Any) -> Any:
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list):
        return row
    names = ("human", "gpt", "function_call", "observation")
    talk = [{"from": names[at % 4], "value": message} for at, message in enumerate(messages)]
    return {"conversations": [*talk, {"from": "gpt", "value": "an answer", "train": row.get("train", True)}]}


def as_alpaca(row: Any) -> Any:
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return row
    return {"instruction": messages[0].get("content"), "output": "an answer", "history": messages[1:-1], "input": None}


TEMPLATES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}",
    "{{ 9 ** 9 ** 9 if false }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('no') }}",
    "{{ 'x' * 2 ** 20 }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "{% if a %}" * 300 + "{% endif %}" * 300,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
)
