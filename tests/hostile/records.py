"""Damaged and forged profiles and recordings of memory, through every verb that reads them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from shoestring.memory.tracing.recording import BlockName, MemoryFacts, MemoryProfile, MemoryWindow, StepPeak
from shoestring.profile.comparison import merged
from tests.hostile import hostile
from tests.hostile.frame import Act, command
from tests.profile.small_profiles import small

_TEXTS = ("head", "names", "sources")
_NUMBERS = (-1, 0, 1, 3, 127, -128, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**63), 2**63 - 1)
_TYPES = ("i1", "i2", "i4", "i8", "u1", "u8", "f4", "f8", "b1", "c16", "U8", "S8", "M8[ns]", "f2")


def generate(draw: Random, folder: Path) -> Act:
    """Write two profiles or two recordings, the second damaged, and read them."""
    of_memory = draw.random() < 0.4
    good, bad = folder / "good.npz", folder / "bad.npz"
    for path in (good, bad):
        path.write_bytes((_recording() if of_memory else _profile(draw)).content())
    for _ in range(draw.choice((1, 1, 2))):
        if bad.is_file() and not bad.is_symlink():  # what a link leads to is not the case's
            _damage(draw, bad)
    pair = draw.choice(((good, bad), (bad, good), (bad, bad)))
    if of_memory:
        run = folder / "run"
        if draw.random() < 0.2:
            run.mkdir()
            bad.rename(run / "memory.npz")
            return command("memory", "view", "run")
        verbs = (("view", bad), ("diff", *pair), ("export", bad))
        return command("memory", *draw.choice(verbs))
    formats = ("speedscope", "pprof", "collapsed", "hatchet", "perfetto")
    verbs = (
        ("view", bad),
        ("view", *pair),
        ("diff", *pair),
        ("merge", *pair),
        ("export", bad, "--format", draw.choice(formats)),
    )
    return command("profile", *draw.choice(verbs))


def _profile(draw: Random) -> Any:
    profile = small()
    return merged([profile, small(scale=2)], ["a", "b"]) if draw.random() < 0.3 else profile


def _recording() -> MemoryProfile:
    names = [
        BlockName("parameter", "head.weight"),
        BlockName("activation", "layer", "aten::mm"),
        BlockName("temporary", "x"),
    ]
    columns = {
        "born": [0, 1, 2, 4],
        "died": [-1, 5, 3, -1],
        "born_at": [0, 10, 20, 40],
        "died_at": [-1, 50, 30, -1],
        "address": [4096, 8192, 16384, 8192],
        "bytes": [1000, 2000, 3000, 500],
        "name": [0, 1, 2, 1],
    }
    window = MemoryWindow({name: np.array(column) for name, column in columns.items()}, names, 2)
    facts = MemoryFacts({"cpu": [StepPeak(0, 1, 6000, 1500)]}, 10**8, host={"pinned memory": 5}, ranks={"0": 6000})
    return MemoryProfile({"cpu": window}, facts)


# -- damage -----------------------------------------------------------------------------------------------------------


def _damage(draw: Random, path: Path) -> None:
    act = draw.random()
    if act < 0.35:
        hostile.tamper_bytes(draw, path)
    elif act < 0.95:
        _forge(draw, path)
    else:
        hostile.put_odd(draw, path)
        if path.is_symlink():  # the user names this very file, and may name a link
            path.unlink()


def _forge(draw: Random, path: Path) -> None:
    """Write the file anew with some of its arrays or of its table changed."""
    try:
        with np.load(path) as file:
            arrays = dict(file)
    except Exception:  # it is damaged already
        return
    for _ in range(draw.choice((1, 1, 2, 4))):
        name = draw.choice(sorted(arrays))
        if name in _TEXTS:
            content = json.loads(arrays[name].tobytes())
            arrays[name] = np.frombuffer(hostile.dumps(hostile.tampered(draw, content)), np.uint8)
        else:
            arrays[name] = _changed(draw, arrays[name], arrays)
    room = io.BytesIO()
    with zipfile.ZipFile(
        room, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    ) as archive:
        for name, array in arrays.items():
            entry = io.BytesIO()
            np.save(entry, array, allow_pickle=False)
            data = entry.getvalue()
            if draw.random() < 0.03:  # a shape that is larger than what follows
                data = data.replace(b"'shape': (", b"'shape': (99999999")
            if draw.random() < 0.03:
                data = data[: draw.randrange(len(data))]
            for _ in range(1 + (draw.random() < 0.03)):
                archive.writestr(f"{name}.npy", data)
    path.write_bytes(room.getvalue())


def _changed(draw: Random, array: np.ndarray, arrays: dict[str, np.ndarray]) -> np.ndarray:
    act, flat = draw.random(), array.copy().reshape(-1)
    array = np.atleast_1d(array)
    if act < 0.6 and len(flat):
        wide = flat.astype(np.float64 if flat.dtype.kind == "f" else np.int64)
        for _ in range(draw.choice((1, 2, len(wide)))):
            value = draw.choice((np.nan, np.inf, -1.0, 1e300)) if wide.dtype.kind == "f" else draw.choice(_NUMBERS)
            wide[draw.randrange(len(wide))] = value
        return wide.reshape(array.shape)
    if act < 0.7:
        return np.zeros(array.shape, draw.choice(_TYPES))
    if act < 0.8:
        return draw.choice(
            (array[:0], array[:-1], array[None], np.int64(3) + np.zeros((), np.int64), array.reshape(-1, 1))
        )
    if act < 0.85:  # a few bytes that become many
        return np.zeros(draw.choice((10**6, 3 * 10**7)), np.int8)
    if act < 0.9:  # a long chain, where it is the parents
        size = draw.choice((3000, 50_000))
        for name, other in arrays.items():
            if name not in _TEXTS and other.ndim == 1:
                arrays[name] = np.resize(other, size)
        return np.arange(-1, size - 1)
    return arrays[draw.choice(sorted(arrays))]
