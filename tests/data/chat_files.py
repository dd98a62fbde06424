"""The same chats in each format, and in each type of file."""

import bz2
import csv
import gzip
import io
import json
import lzma
from random import Random

import pyarrow
import pyarrow.parquet

PIECES = (
    "what",
    " is",
    "\n",
    "\t",
    ",",
    '"',
    "'",
    ";",
    "é",
    "🙂",
    "漢",
    " ",
    "{",
    "[",
    "<|im_end|>",
    "2+3",
    "\\",
    "\r\n",
    "null",
)


def text(draw, least=1):
    return "".join(draw.choice(PIECES) for _ in range(draw.randint(least, 8))) or "x"


def plain_chats(count, seed=0):
    """Chats that every format can hold: turns of user and assistant, perhaps after a system's message."""
    draw = Random(seed)
    for number in range(count):
        messages = [{"role": "system", "content": text(draw)}] if draw.random() < 0.3 else []
        for turn in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": f"{number}.{turn} {text(draw)}"})
            messages.append({"role": "assistant", "content": text(draw)})
        yield {"messages": messages}


def rich_chats(count, seed=0):
    """Chats with tools, calls, weights and arguments of the template, on some and absent on others."""
    draw = Random(seed)
    for record in plain_chats(count, seed):
        if draw.random() < 0.4:
            arguments = {"city": text(draw)} if draw.random() < 0.5 else {"hour": draw.randrange(24)}
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            record["messages"][-1:-1] = [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": text(draw)},
            ]
        for message in record["messages"][:-1]:
            if message["role"] == "assistant" and draw.random() < 0.4:
                message["weight"] = draw.choice((0, 1))
        if draw.random() < 0.5:
            schema = {"type": "object", "properties": {"city": {"type": "string"}}}
            record["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        if draw.random() < 0.2:
            record["chat_template_kwargs"] = {"enable_thinking": False}
        yield record


# -- formats -----------------------------------------------------------------------------------------------------------


def as_sharegpt(record, key="conversations"):
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    talk = []
    for message in record["messages"]:
        name = names.get(message["role"], message["role"])
        value = message["content"]
        if "tool_calls" in message:
            name, value = "function_call", json.dumps([call["function"] for call in message["tool_calls"]])
        switch = {} if "weight" not in message else {"train": bool(message["weight"])}
        talk.append({"from": name, "value": value, **switch})
    rest = {name: value for name, value in record.items() if name != "messages"}
    return {**rest, key: talk}


def as_conversation(record):
    """With the system's text beside the messages, and tools as text."""
    made = as_sharegpt(record, "conversation")
    if made["conversation"][0]["from"] == "system":
        made["system"] = made["conversation"].pop(0)["value"]
    if "tools" in made:
        made["tools"] = json.dumps(made["tools"])
    return made


def as_alpaca(record):
    messages = list(record["messages"])
    made = {"system": messages.pop(0)["content"]} if messages[0]["role"] == "system" else {}
    pairs = [[messages[at]["content"], messages[at + 1]["content"]] for at in range(0, len(messages), 2)]
    question, made["output"] = pairs.pop()
    before, _, after = question.partition("\n")
    made |= {"instruction": before, "input": after} if before and after else {"instruction": question}
    return made | ({"history": pairs} if pairs else {})


def as_messages(record):
    return record


def as_openai(record):
    """With arguments of calls in JSON text, contents in parts, and an absent content of calls."""
    messages = []
    for message in record["messages"]:
        changed = dict(message)
        if "tool_calls" in message:
            calls = [call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
                     for call in message["tool_calls"]]  # fmt: skip
            changed |= {"content": None, "tool_calls": calls}
        messages.append(changed)
    return record | {"messages": messages}


PLAIN = {"messages": as_messages, "sharegpt": as_sharegpt, "conversation": as_conversation, "alpaca": as_alpaca}
RICH = {"messages": as_messages, "openai": as_openai, "sharegpt": as_sharegpt, "conversation": as_conversation}


# -- files -------------------------------------------------------------------------------------------------------------


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(records, delimiter):
    names = sorted({name for record in records for name in record})
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(names)
    for record in records:
        cells = [record.get(name) for name in names]
        writer.writerow([json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in cells])
    return file.getvalue().encode()


def columns(records):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(all_keys(records)), file)
    return file.getvalue()


def all_keys(records):
    """Records with every key of any of them, since pyarrow reads the names of columns from the first."""
    names = sorted({name for record in records for name in record})
    return [{name: record.get(name) for name in names} for record in records]


FILES = {
    "a.jsonl": lines,
    "a.ndjson": lambda records: b"\xef\xbb\xbf" + lines(records),
    "A.JSONL": lambda records: lines(records).replace(b"\n", b"\r\n\n"),
    "a.json": lambda records: json.dumps(records, indent=2, ensure_ascii=False).encode(),
    "wrapped.json": lambda records: json.dumps({"version": 1, "data": records}).encode(),
    "lines.json": lines,
    "a.csv": lambda records: table(records, ","),
    "bom.csv": lambda records: b"\xef\xbb\xbf" + table(records, ","),
    "a.tsv": lambda records: table(records, "\t"),
    "a.parquet": columns,
    "a.jsonl.gz": lambda records: gzip.compress(lines(records)),
    "a.json.bz2": lambda records: bz2.compress(json.dumps(records).encode()),
    "a.csv.xz": lambda records: lzma.compress(table(records, ",")),
}


def write(folder, name, records):
    path = folder / name
    path.write_bytes(FILES[name](list(records)))
    return path
