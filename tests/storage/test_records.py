"""Profiles and recordings of memory that somebody else made: one line of error, and never more memory than their size
warrants. `tests/hostile/records.py` generates many more."""

import io
import json
import os
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout

import numpy as np
import pytest

from shoestring.cli import main
from shoestring.core.errors import DataError
from shoestring.memory import load as load_memory
from shoestring.profile import load
from shoestring.profile.recording import Facts
from shoestring.storage.records import record
from tests.profile.small_profiles import small


def arrays_of(profile):
    with np.load(io.BytesIO(profile.content())) as file:
        return dict(file)


def write(path, arrays, *, compression=zipfile.ZIP_DEFLATED, twice="", lies=()):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in arrays.items():
            room = io.BytesIO()
            np.save(room, array, allow_pickle=array.dtype.hasobject)
            data = room.getvalue().replace(*lies) if lies else room.getvalue()
            for _ in range(1 + (name == twice)):
                archive.writestr(f"{name}.npy", data)
    return path


def head(arrays, **facts):
    table = json.loads(arrays["head"].tobytes())
    table["facts"] |= facts
    return np.frombuffer(json.dumps(table).encode(), np.uint8)


def text(value):
    return np.frombuffer(value.encode(), np.uint8)


N = len(small().tree)
DAMAGE = {
    "column-of-other-length": lambda a: {"count": a["count"][:-1]},
    "column-of-fractions": lambda a: {"line": a["line"].astype(float)},
    "column-of-texts": lambda a: {"line": a["line"].astype("U8")},
    "objects": lambda a: {"line": np.array([{}] * N)},
    "nan": lambda a: {"squares": np.full(N, np.nan)},
    "infinite": lambda a: {"own_variance": np.full(N, np.inf)},
    "kind": lambda a: {"kind": np.full(N, 77)},
    "cycle": lambda a: {"parent": np.r_[-1, np.arange(2, N), 1]},
    "parent-of-its-own": lambda a: {"parent": np.r_[-1, 1, a["parent"][2:]]},
    "name": lambda a: {"name": np.full(N, 99)},
    "link-to-a-link": lambda a: {"link": np.where(a["kind"] == 5, np.flatnonzero(a["kind"] == 5)[0], a["link"])},
    "negative-count": lambda a: {"count": -a["count"].astype(int)},
    "too-large": lambda a: {"own": np.full(N, 2**62)},
    "columns": lambda a: {name: a[name][:, None] for name in a if name not in ("head", "names", "sources")},
    "shape": lambda a: {"own": a["own"][None]},
    "no-json": lambda a: {"head": text("{")},
    "deep": lambda a: {"head": text("[" * 100_000)},
    "deep-names": lambda a: {"names": text("[" * 100_000)},
    "names": lambda a: {"names": text("[1, 2]")},
    "sources": lambda a: {"sources": text("[]")},
    "latin": lambda a: {"names": np.frombuffer(b'["\xff"]', np.uint8)},
    "seconds": lambda a: {"head": head(a, seconds="long")},
    "seconds-nan": lambda a: {"head": head(a, seconds=float("nan"))},
    "command": lambda a: {"head": head(a, command=[1])},
    "command-text": lambda a: {"head": head(a, command="text")},
    "steps": lambda a: {"head": head(a, steps=True)},
    "steps-huge": lambda a: {"head": head(a, steps=10**30)},
    "waits": lambda a: {"head": head(a, waits={"gc": {"count": "x"}})},
    "clock": lambda a: {"head": head(a, clock={"first": [1], "steps": [1, 2]})},
    "unknown": lambda a: {"head": head(a, more=1)},
    "share": lambda a: {"head": head(a, share=0.0)},
    "version": lambda a: {"head": text('{"format": "shoestring-profile", "version": "3", "facts": {}}')},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_profile_with_values_that_none_has_is_refused(tmp_path, damage):
    arrays = arrays_of(small())
    with pytest.raises(DataError) as refused:
        load(write(tmp_path / "p.npz", arrays | damage(arrays)))
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_numpy_does_not_write_are_refused(tmp_path):
    arrays, path = arrays_of(small()), tmp_path / "p.npz"
    assert len(load(write(path, arrays)).tree) == N
    write(path, arrays, twice="own")
    with pytest.raises(DataError, match="two arrays with the same name"):
        load(path)
    write(path, arrays, lies=(b"'shape': (", b"'shape': (9"))
    with pytest.raises(DataError, match="differs from the size in its header"):
        load(path)
    whole = small().content()
    for damaged in (whole[:-30], whole[:200], b"", whole[:300] + b"\0\0\0\0\0\0\0\0" + whole[308:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError):
            load(path)
    path.unlink()
    with pytest.raises(DataError, match="there is no profile"):
        load(path)


BOMB = """
import resource, sys
from shoestring.core.errors import DataError
from shoestring.profile.recording import FORMAT
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (256 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        FORMAT.load(__import__("pathlib").Path(path))
    except DataError as error:
        assert "its arrays exceed the maximum size" in str(error), error
    else:
        raise SystemExit(f"{path} was read")
"""


@pytest.mark.slow
def test_a_file_that_would_become_gigabytes_is_refused_before_it_is_unpacked(tmp_path):
    """The bound is of all arrays as they will be: 300 million int8 are 2.4 GB of int64."""
    arrays = arrays_of(small())
    many, texts = np.zeros(70 << 20, np.int8), np.zeros(65 << 20, np.uint8)
    paths = [
        write(tmp_path / "many.npz", arrays | {"own": many}),
        write(tmp_path / "texts.npz", arrays | {"names": texts}),
    ]
    few = np.zeros(4 << 20, np.int8)  # none of which is large
    paths.append(
        write(
            tmp_path / "several.npz",
            {name: few for name in arrays if name not in ("head", "names")} | arrays_with(arrays, few),
        )
    )
    assert all(path.stat().st_size < 2 << 20 for path in paths)
    subprocess.run([sys.executable, "-c", BOMB, *map(str, paths)], check=True)


def arrays_with(arrays, few):
    texts = {name: arrays[name] for name in ("head", "names", "sources")}
    return texts | {f"more{number}": few for number in range(8)}


def test_names_cannot_steer_a_terminal_and_halves_of_pairs_cannot_stop_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = "aten::\x1b[31m\x07\ud800\r\n"
    profile = small(operator=evil, extra=evil)
    (tmp_path / "p.npz").write_bytes(profile.content())
    for arguments in (["view", "p.npz"], ["diff", "p.npz", "p.npz"], ["merge", "p.npz", "p.npz"]):
        shown = io.StringIO()
        with redirect_stdout(shown):
            assert main(["profile", *arguments]) == 0
        assert not {"\x1b", "\x07", "\r"} & set(shown.getvalue())
    for kind in ("speedscope", "pprof", "collapsed", "hatchet", "perfetto"):
        assert main(["profile", "export", "p.npz", "--format", kind]) == 0


def test_fields_have_the_types_that_they_say():
    assert record(Facts, {"seconds": 3, "command": ["a"], "versions": {"torch": "2"}}).seconds == 3.0
    for wrong in (5, [], {"seconds": True}, {"steps": 1.5}, {"versions": {"a": 1}}, {"memory": [{"seconds": 1}]}):
        with pytest.raises((ValueError, TypeError)):
            record(Facts, wrong)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "p.npz")
    for read in (load, load_memory):
        with pytest.raises(DataError, match="cannot be read"):
            read(tmp_path / "p.npz")
