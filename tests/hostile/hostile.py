"""Values, files and links that a stranger may put where others are expected."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from random import Random
from typing import Any

ESCAPE = "\x1b[31mred\x1b]0;title\x07"
"""A text that changes the colour and the title of a terminal."""
_HUGE = (2**31, 2**31 - 1, 2**40, 2**63, 2**64, 10**30, 10**400, -1, -(2**31), 0)


def value(draw: Random) -> Any:
    """A value of a wrong type, out of range, or as large or as deep as can be."""
    return draw.choice(
        (
            lambda: draw.choice(_HUGE),
            lambda: draw.choice((None, True, False)),
            lambda: draw.choice((float("nan"), float("inf"), -float("inf"), 1e-320, 1e308, 0.5)),
            lambda: draw.choice(("", "7", ESCAPE, "\ud800", "x" * 100_000, "../../home/.ssh/id", "\0", "{% for %}")),
            lambda: draw.choice(([], {}, [[]], [None], {"": {}}, [0] * 10_000)),
            lambda: _nested(draw.choice((50, 3_000, 100_000)), draw.random() < 0.5),
        )
    )()


class _Raw(str):
    """JSON that is written as it stands, because the encoder cannot write it."""


def _nested(depth: int, of_lists: bool) -> _Raw:
    return _Raw("[" * depth + "]" * depth if of_lists else '{"a":' * depth + "1" + "}" * depth)


def dumps(content: Any) -> bytes:
    """JSON, with values as `value` draws them."""
    raw: list[str] = []

    def plain(each: Any) -> Any:
        if isinstance(each, _Raw):
            raw.append(each)
            return f"<<raw {len(raw) - 1}>>"
        if isinstance(each, dict):
            return {key: plain(inner) for key, inner in each.items()}
        return [plain(inner) for inner in each] if isinstance(each, list) else each

    text = json.dumps(plain(content))
    for number, inner in enumerate(raw):
        text = text.replace(f'"<<raw {number}>>"', inner)
    return text.encode("utf-8", "surrogatepass")


def tampered(draw: Random, content: Any, changes: int = 0) -> Any:
    """JSON content with one to three values replaced, removed, or added."""
    content = json.loads(json.dumps(content))
    for _ in range(changes or draw.choice((1, 1, 2, 3))):
        holders = list(_holders(content))
        if not holders:
            return value(draw)
        holder = draw.choice(holders)
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        act = draw.random()
        if act < 0.75:
            holder[key] = value(draw)
        elif act < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw.choice((ESCAPE, "", "x" * 5000, "auto_map", "quantization_config"))] = value(draw)
        else:
            holder.append(value(draw))
    return content


def _holders(content: Any) -> Any:
    if isinstance(content, dict | list) and content:
        yield content
        for inner in content.values() if isinstance(content, dict) else content[:50]:
            yield from _holders(inner)


def tamper_json(draw: Random, path: Path) -> object:
    """Change values in a JSON file."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # tampered with already
        return tamper_bytes(draw, path)
    return path.write_bytes(dumps(tampered(draw, content)))


def tamper_bytes(draw: Random, path: Path) -> None:
    """Cut a file, change some of its bytes, or write others in its place."""
    data = bytearray(path.read_bytes())
    act = draw.random()
    if act < 0.3:
        del data[draw.randrange(len(data) + 1) :]
    elif act < 0.8 and data:
        head = min(len(data), draw.choice((16, 200, len(data))))
        for _ in range(draw.choice((1, 4, 30))):
            data[draw.randrange(head)] = draw.choice((0, 255, 0x7F, draw.randrange(256)))
    elif act < 0.9:
        data = bytearray(draw.randbytes(draw.choice((0, 1, 8, 1000))))
    else:
        data[:8] = draw.choice((2**63, 2**64 - 1, 2**31, len(data))).to_bytes(8, "little")
    path.write_bytes(data)


def put_odd(draw: Random, path: Path) -> None:
    """Put something else than a regular file at `path`, or a link that leads out of the case's folder."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}-before"))
    path.unlink(missing_ok=True)
    kind = draw.choice(("pipe", "folder", "socket", "device", "endless", "secret", "loop", "gone", "absolute"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        server, here = socket.socket(socket.AF_UNIX), Path.cwd()
        os.chdir(path.parent)  # the path of a socket may have 107 bytes
        server.bind(path.name)
        os.chdir(here)
        server.close()
    else:
        case = next(above for above in path.parents if above.name == "case")
        secret = case.parent / "home/.ssh/id"
        target = {"device": "/dev/tty", "endless": "/dev/zero", "loop": path.name, "gone": "nothing"}.get(kind)
        path.symlink_to(target or (secret if kind == "absolute" else os.path.relpath(secret, path.parent)))


def tamper_file(draw: Random, path: Path) -> None:
    """Any of these changes to a file."""
    act = draw.random()
    if act < 0.25:
        put_odd(draw, path)
    elif act < 0.8 and path.suffix == ".json":
        tamper_json(draw, path)
    else:
        tamper_bytes(draw, path)
