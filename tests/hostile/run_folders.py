"""Run folders and run files of others: what is reported, compared, checked and continued."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import tomli_w

from tests.hostile import hostile
from tests.hostile.frame import Act, command

RUN = {
    "run": {"model": "shoestring.models.gpt:tiny", "data": "texts.txt", "steps": 2, "batch": 2, "evaluate_every": 1},
    "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32},
    "data": {"tokenizer": "bytes", "sequence": 16, "held_out": 0.3},
    "optim": {"adamw": {"lr": 0.001}},
}


def write_run(folder: Path) -> None:
    """A run folder as training leaves it, of two steps."""
    folder.mkdir()
    (folder / "run.toml").write_text(tomli_w.dumps(RUN))
    rows = [{"step": step, "time": 1.0 + step, "loss": 2.0, "evaluation/loss": 2.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"name": "run", "total_steps": 2, "parameters": 100, "loss": 2.0}))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "torch": "2.11", "packages": {"a": "1"}}))
    events = [{"event": kind, "time": 1.0, "host": "a", "rank": 0, "step": 0} for kind in ("started", "finished")]
    (folder / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    head = {"trace": 1, "rank": 0, "host": "a", "facts": {}, "totals": [], "ranks": 1, "steps": 2}
    span = {"name": "forward", "kind": "compute", "start": 0.0, "stop": 1.0, "nbytes": 0, "step": 1, "thread": 1}
    (folder / "trace-0.jsonl").write_text(json.dumps(head) + "\n" + json.dumps(span) + "\n")
    (folder / "plan.toml").write_text(tomli_w.dumps(RUN))


def tamper_lines(draw: Random, path: Path) -> None:
    """Change one line of a file of JSON lines."""
    lines = path.read_bytes().splitlines()
    number = draw.randrange(len(lines))
    lines[number] = hostile.dumps(hostile.tampered(draw, json.loads(lines[number])))
    path.write_bytes(b"\n".join(lines) + b"\n")


def tamper_toml(draw: Random, path: Path) -> None:
    """Write a run file with values of other types, or one that is no TOML."""
    act = draw.random()
    if act < 0.2:
        path.write_text("a = " + "[" * 5000 + "]" * 5000)
    elif act < 0.3:
        path.write_bytes(b"\xff\xfe[run]\n")
    else:
        content = json.loads(json.dumps(RUN))
        table = content[draw.choice(list(content))]
        key = draw.choice(list(table))
        table[key] = draw.choice((2**31, 2**62, -1, 0, True, [], {}, "x" * 1000, "\x1b[31m", 1e308, [[]], "../home/x"))
        path.write_text(tomli_w.dumps(content))


def generate(draw: Random, folder: Path) -> Act:
    (folder / "texts.txt").write_text("a text to train on\n" * 400)
    write_run(folder / "theirs")
    path = draw.choice(sorted((folder / "theirs").iterdir()))
    act = draw.random()
    if act < 0.3:
        hostile.put_odd(draw, path)
    elif path.suffix == ".toml":
        tamper_toml(draw, path)
    elif path.suffix == ".jsonl" and act < 0.8:
        tamper_lines(draw, path)
    else:
        hostile.tamper_file(draw, path)
    verb = draw.choice(("report", "report", "compare", "check", "train", "trace", "ls"))
    if verb == "trace":
        return command("report", "theirs", "--trace", "trace.json")
    if verb == "compare":
        write_run(folder / "mine")
        return command("compare", "theirs", "mine")
    if verb == "train":
        return command("train", "theirs", "--workers", "1", "--run.folder", "theirs", "--run.steps", "1")
    if verb == "ls":
        return command("checkpoint", "ls", "theirs")
    return command(verb, "theirs" if verb == "report" else draw.choice(("theirs", "theirs/plan.toml")))
