"""Files of others: looked at first, bounded, and refused by an OSError or a ValueError."""

import gzip
import os
import socket
from pathlib import Path

import pytest

from shoestring.core.errors import ConfigError
from shoestring.storage import foreign
from shoestring.storage.fields import Fields


def odd(path, kind):
    """Put something at `path` that is no regular file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's path may have 107 bytes
            server.bind(path.name)
            os.chdir(here)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
@pytest.mark.parametrize(
    "read", [foreign.read_bytes, foreign.read_json, foreign.read_toml, foreign.open_safetensors,
             lambda path: list(foreign.read_lines(path)), lambda path: foreign.read_gzip(path, 9)]
)  # fmt: skip
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind, read):
    odd(tmp_path / "file", kind)
    with pytest.raises(OSError, match="not a regular file"):
        read(tmp_path / "file")


def test_sizes_are_compared_with_limits(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(foreign.LINE_LIMIT + 1)
    with pytest.raises(OSError, match="longer"):
        foreign.read_bytes(path)
    with pytest.raises(ValueError, match=r"longer than 67\.1 MB"):
        next(foreign.read_lines(path))
    assert len(next(foreign.read_lines(path, foreign.LINE_LIMIT + 1))) == foreign.LINE_LIMIT + 1
    part = gzip.compress(bytes(1 << 20))
    path.write_bytes(part * 3)
    assert foreign.read_gzip(path, 3 << 20) == bytes(3 << 20)
    with pytest.raises(OSError, match="holds more than"):
        foreign.read_gzip(path, (3 << 20) - 1)
    for damaged in (part[:-9], b"no gzip"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="it is"):
            foreign.read_gzip(path, 3 << 20)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\ufeff", "{", ""])
def test_malformed_content_is_a_value_error(tmp_path, text):
    (tmp_path / "a").write_text(text)
    with pytest.raises(ValueError):
        foreign.read_json(tmp_path / "a")
    with pytest.raises(ValueError):
        foreign.read_json_object(tmp_path / "a")
    (tmp_path / "a").write_text("a = " + "[" * 10_000)
    with pytest.raises(ValueError):
        foreign.read_toml(tmp_path / "a")


def test_links_are_followed_inside_of_the_folder_and_of_its_cache_only(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    blobs, folder = tmp_path / "repository/blobs", tmp_path / "repository/snapshots/1a2b"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0a1b").write_text("{}")
    (folder / "own.json").write_text("{}")
    for name, target in {"blob": "../../blobs/0a1b", "own": "own.json", "again": "../1a2b/own.json"}.items():
        (folder / name).symlink_to(target)
        assert foreign.read_json(folder / name, within=folder) == {}
    for name, target in {"out": "../../../secret", "absolute": secret, "hidden": "../../blobs/../../secret"}.items():
        (folder / name).symlink_to(target)
        with pytest.raises(OSError, match="leads out of"):
            foreign.read_json(folder / name, within=folder)
        with pytest.raises(OSError, match="leads out of"):
            foreign.copy_file(folder / name, tmp_path / "copy", within=folder)
    assert not (tmp_path / "copy").exists()
    (tmp_path / "by-link").symlink_to(folder)  # the folder itself may be named by a link
    assert foreign.read_json(tmp_path / "by-link/own.json", within=tmp_path / "by-link") == {}


def test_a_file_counts_once(tmp_path):
    (tmp_path / "a").write_text("")
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to("a")
    assert list(foreign.distinct([tmp_path / name for name in "bca"])) == [tmp_path / "b"]


def test_text_for_a_terminal_has_no_control_characters():
    assert foreign.printable("a\x1b[31m\x9b\r\x07\u202e\ud800b\n\tß") == "a\\x1b[31m\\x9b\\r\\x07\\u202e\\ud800b\n\tß"


def test_entries_are_read_with_their_types():
    fields = Fields({"a": 3, "b": True, "c": 1.5, "d": None, "e": [1], "f": {"a": 1}, "g": "x"}, "x.json", ConfigError)
    assert (fields.count("a"), fields.count("d", 7), fields.number("c"), fields.text("g")) == (3, 7, 1.5, "x")
    assert fields.entries("f").count("a") == 1 and not list(fields.entries("none"))
    deep = []
    for _ in range(100_000):
        deep = [deep]
    wrong = {"deep": deep, "large": 10**5000, "nan": float("nan"), "half": "\ud800", "below": -1}
    fields = Fields({**wrong, "flag": True}, "x.json", ConfigError)
    for read in (fields.count, fields.number, fields.text, fields.table, fields.texts, fields.flag):
        for name in wrong:
            if (read, name) != (fields.number, "below"):
                with pytest.raises(ConfigError, match=f"x.json: {name} is not"):
                    read(name)
    with pytest.raises(ConfigError, match="flag is not a whole number"):
        fields.count("flag")
    with pytest.raises(ConfigError, match=r"x\.json lacks none"):
        fields.count("none")
    with pytest.raises(ConfigError, match="not a table"):
        Fields([], "x.json", ConfigError)
