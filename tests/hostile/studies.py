"""Damaged and forged studies of `shoestring tune`: study files, stores, and the metrics of trials."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import tomli_w

from tests.hostile import hostile
from tests.hostile.frame import Act, command

_SPACE = {"optim.adamw.lr": {"log": [1e-4, 1e-2]}, "run.batch": {"choice": [1, 2]}}
_VALUES = (
    None,
    -5,
    2**62,
    1e300,
    float("inf"),
    "text",
    hostile.ESCAPE,
    b"\xff\x00",
    "[" * 100_000,
    '{"a": 1}',
    "[1]",
    0.5,
)
_TABLES = ("shoestring_studies", "shoestring_leases", "shoestring_reports")


def generate(draw: Random, folder: Path) -> Act:
    """Write a study with a store, damage one of them, and look at it."""
    (folder / "run.toml").write_text("[run]\nsteps = 10\n")
    tables: dict[str, Any] = {"tune": {"run": "run.toml", "trials": 9, "folder": "study"}, "space": _SPACE}
    tables |= draw.choice(({}, {"halving": {"first": 2}}, {"population": {"size": 2, "every": 2}}))
    (folder / "tune.toml").write_text(tomli_w.dumps(tables))
    _make_store(folder)
    act = draw.random()
    if act < 0.2:
        _tamper_toml(draw, folder / "tune.toml", tables)
    elif act < 0.4:
        hostile.tamper_file(draw, folder / "study/store.db")
    else:
        for _ in range(draw.choice((1, 1, 2, 3))):
            _tamper_rows(draw, folder / "study/store.db")
    return command(
        "tune", *draw.choice((("page", "tune.toml"), ("page", "tune.toml", "tune.toml"), ("best", "tune.toml")))
    )


def _make_store(folder: Path) -> None:
    from shoestring.verbs.study import read_plan

    store = read_plan("tune.toml").open_store(create=True)
    for number in range(4):
        store.add(number + 1, number, {"optim.adamw.lr": 1e-3 * (number + 1), "run.batch": 1 + number % 2}, 9)
        lease = store.take("w", 60.0)
        assert lease is not None
        store.renew(lease, 60.0, step=4, reports={2: 3.0 - number, 4: 2.0}, worked=1.0)
        if number < 3:
            store.finish(lease, ("done", "failed")[number == 1], float(number))
    store.engine.dispose()


def _tamper_toml(draw: Random, path: Path, tables: dict[str, Any]) -> None:
    if draw.random() < 0.3:
        hostile.tamper_bytes(draw, path)
        return
    content = hostile.tampered(draw, tables)
    try:
        path.write_text(tomli_w.dumps(content))
    except (TypeError, ValueError, AttributeError, RecursionError, UnicodeEncodeError):  # null, or no table at all
        path.write_text("tune = " + "[" * draw.choice((10, 10_000)))


def _tamper_rows(draw: Random, path: Path) -> None:
    store = sqlite3.connect(path, isolation_level=None)
    table = draw.choice(_TABLES)
    try:
        columns = [row[1] for row in store.execute(f"PRAGMA table_info({table})")]
        act = draw.random()
        if not columns:  # it was dropped
            return
        if act < 0.1:
            store.execute(f"DROP TABLE {table}")
        elif act < 0.2:
            store.execute(f"ALTER TABLE {table} RENAME COLUMN {draw.choice(columns)} TO other")
        elif act < 0.3:
            store.execute(f"DELETE FROM {table}")
        else:
            where = draw.choice(("", " WHERE rowid = 2", " WHERE rowid = 3"))
            value = draw.choice(_VALUES)
            spelled = "CAST(? AS TEXT)" if isinstance(value, bytes) else "?"
            store.execute(f"UPDATE {table} SET {draw.choice(columns)} = {spelled}{where}", [value])
    except sqlite3.Error:  # NULL where there can be none, or it is damaged already
        pass
    finally:
        store.close()
