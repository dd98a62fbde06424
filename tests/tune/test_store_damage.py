"""A store that is lost, foreign, or damaged under a study: one clear line, no silent wait and no traceback."""

import os
import shutil
import sqlite3
import threading
import time
from functools import partial

import pytest

from benchmarks.tune import toy_worker
from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.tune.store import Store, connect
from shoestring.verbs.tune import compare_studies, write_best
from tests.tune.test_space import plan_of
from tests.tune.test_workers import url_of
from tests.waiting import until


def test_another_programs_database_is_left_alone_unless_told(tmp_path):
    file = tmp_path / "theirs.db"
    with sqlite3.connect(file) as theirs:
        theirs.execute("CREATE TABLE theirs (a INTEGER)")
    before = file.read_bytes()
    for shared in (False, True):
        plan = plan_of(tmp_path, store=f"sqlite:///{file}", shared_store=shared)
        if shared:
            plan.open_store(create=True)
            assert plan.open_store().names() == [plan.study.name]
            assert "shared_store" not in plan.document["study"]["tune"], "a study goes on however its store was made"
        else:
            with pytest.raises(ConfigError, match=r"tables of another program: theirs.*`tune\.shared_store = true`"):
                plan.open_store(create=True)
            with pytest.raises(ConfigError, match="holds no study"):
                plan.open_store()
            assert file.read_bytes() == before
    with sqlite3.connect(file) as theirs:
        assert theirs.execute("SELECT count(*) FROM theirs").fetchone() == (0,)


def test_looking_for_a_study_makes_no_file(tmp_path):
    plan = plan_of(tmp_path, store=f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(ConfigError, match="the store holds no study"):
        plan.open_store()
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize(
    "how", ["deleted", *(pytest.param(how, marks=pytest.mark.slow) for how in ("replaced", "removed"))]
)
def test_a_store_that_is_lost_ends_its_worker_with_one_line(tmp_path, how):
    """The trial is not trained on to an end that nobody can record."""
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 1, 1.0, 10**6, 0.005)
    file, raised = tmp_path / "store.db", []

    def runs():
        try:
            worker.run()
        except ShoestringError as error:
            raised.append(error)

    thread = threading.Thread(target=runs)
    thread.start()
    try:
        until((tmp_path / "trial-0" / "metrics.jsonl").exists)
        if how == "removed":
            with sqlite3.connect(file, timeout=20) as store:
                store.execute("DELETE FROM shoestring_studies")
                store.execute("DELETE FROM shoestring_leases")
        else:
            if how == "replaced":
                shutil.copy(file, tmp_path / "copy")
            file.unlink()
            if how == "replaced":
                (tmp_path / "copy").rename(file)
        thread.join(60)
        assert not thread.is_alive()
    finally:
        worker.stop.set()
        thread.join(60)
    said = {
        "deleted": "was deleted",
        "replaced": "was replaced by another file",
        "removed": "the study `toy` was removed",
    }
    assert len(raised) == 1 and said[how] in str(raised[0]) and "\n" not in str(raised[0])
    assert how != "deleted" or not file.exists()


@pytest.mark.parametrize("table", ["shoestring_leases", "trials"])
def test_a_missing_column_is_no_outage(tmp_path, table):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 1, 20.0, 10, 0.0)
    column = {"shoestring_leases": "attempts", "trials": "datetime_start"}[table]
    with sqlite3.connect(tmp_path / "store.db", timeout=20) as store:
        store.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
    worker.patience = 30.0
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"cannot use the store .*{column}"):
        worker.run()
    assert time.monotonic() - began < 20.0


def test_an_outage_is_waited_for_and_said(tmp_path, caplog):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 1, 20.0, 10, 0.0)
    worker.store.engine.dispose()
    folder, aside = tmp_path / "at", tmp_path / "aside"
    folder.mkdir()
    store = Store(connect(f"sqlite:///{folder / 'store.db'}"), "s")
    worker.store, worker.patience = store, 3.0
    folder.rename(aside)
    with caplog.at_level("WARNING"), pytest.raises(ConfigError, match="unable to open database file"):
        worker._reach(lambda: store.add(1, 0, {}, 1))
    assert any("trying again for 3 s" in record.getMessage() for record in caplog.records)


LEASE_COLUMNS = (
    "number",
    "state",
    "epoch",
    "rung",
    "forked",
    "parent",
    "step",
    "value",
    "seconds",
    "parameters",
    "note",
)
WRONG = (None, -5, 2**62, 1e300, "text", "\udcff", b"\xff\x00", "[" * 100_000, '{"optim.adamw.lr": "fast"}', '{"a": 1}')
SPACE = {"optim.adamw.lr": {"log": [1e-4, 1e-2]}, "run.batch": {"choice": [1, 2]}}


QUICK = ("parent", "parameters")


def study(folder):
    plan = plan_of(folder, SPACE, trials=9, tables={"halving": {"first": 2}})
    store = plan.open_store(create=True)
    for number in range(4):
        store.add(number + 1, number, {"optim.adamw.lr": 1e-3 * (number + 1), "run.batch": 1 + number % 2}, 9)
        lease = store.take("w", 60.0)
        store.renew(lease, 60.0, step=4, reports={2: 3.0 - number, 4: 2.0}, worked=1.0)
        if number < 3:
            store.finish(lease, "done", float(number))
    store.engine.dispose()
    return plan


@pytest.mark.parametrize(
    "column", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in LEASE_COLUMNS]
)
def test_damaged_rows_are_said_and_not_shown(tmp_path, column):
    plan = study(tmp_path)
    file, page = plan.folder / "store.db", plan.folder / "study.html"
    store = sqlite3.connect(file, timeout=20, isolation_level=None)
    (whole,) = store.execute(f"SELECT {column} FROM shoestring_leases WHERE trial = 2").fetchone()
    for value in (*WRONG, whole):
        text = value.encode(errors="surrogateescape") if isinstance(value, str) else value
        spelled = "CAST(? AS TEXT)" if isinstance(value, str) else "?"
        try:
            store.execute(f"UPDATE shoestring_leases SET {column} = {spelled} WHERE trial = 2", [text])
        except sqlite3.IntegrityError:  # NULL where there can be none
            continue
        for verb in (
            partial(compare_studies, [tmp_path / "tune.toml"]),
            partial(write_best, tmp_path / "tune.toml", tmp_path / "b.toml"),
        ):
            try:
                verb()
            except ShoestringError as error:
                assert value is not whole and "\n" not in str(error) and len(str(error)) < 500
    store.close()
    assert "\x1b" not in page.read_text()


def test_study_files_of_any_shape_are_refused_with_one_line(tmp_path):
    (tmp_path / "run.toml").write_text("[run]\nsteps = 3\n")
    base = f'[tune]\nrun = "{tmp_path / "run.toml"}"\n'
    deep = "[" * 5000 + "]" * 5000
    for text in (
        "tune = 5",
        f"[tune]\nrun = {deep}",
        f"{base}[space]\nx = {deep}",
        f"{base}[space]\n'a.b' = {{choice = {deep}}}",
        f"{base}[space]\n'a.b' = {{choice = [1979-05-27]}}",
        f"{base}halving = 3\n[space]\n'optim.adamw.lr' = {{log = [1e-4, 1e-2]}}",
        f"halving = 3\n{base}[space]\n'optim.adamw.lr' = {{log = [1e-4, 1e-2]}}",
        f"{base}[space]\n'optim.adamw.lr' = {{log = [1e-4, 1e-2], when = 3}}",
        f"space = 3\n{base}",
        "\x00",
        f"{base}[space]\n'run.steps' = {{int = [1, {'9' * 5000}]}}",
    ):
        (tmp_path / "tune.toml").write_text(text)
        with pytest.raises(ShoestringError) as refused:
            compare_studies([tmp_path / "tune.toml"])
        assert "\n" not in refused.value.parts()[1]
    (tmp_path / "tune.toml").unlink()
    os.mkfifo(tmp_path / "tune.toml")
    with pytest.raises(ConfigError, match="cannot read the study file"):
        compare_studies([tmp_path / "tune.toml"])


@pytest.mark.parametrize("document", ["5", "[]", "{}", '{"study": 3, "run": {}}', '{"study": {"tune": 3}, "run": {}}'])
def test_a_damaged_study_document_is_refused(tmp_path, document):
    from shoestring.verbs.study import join_plan

    plan = study(tmp_path)
    with sqlite3.connect(plan.folder / "store.db", timeout=20) as store:
        store.execute("UPDATE shoestring_studies SET document = ?", [document])
    store.close()
    with pytest.raises(ConfigError, match="is damaged"):
        join_plan(plan.url, plan.study.name)


def test_rows_of_metrics_of_any_shape_are_skipped(tmp_path):
    from tests.tune.test_workers import process

    trial = process("", tmp_path)
    rows = ["[" * 100_000, "5", "[]", '{"step": "a"}', '{"step": 1e999, "loss": 1}', '{"step": -1, "loss": 1}']
    rows += ['{"step": 1, "loss": true}', '{"step": 2, "loss": 1' + "0" * 400 + "}", '{"step": 3, "loss": [1]}']
    rows += [
        '{"step": 4, "loss": 1, "tokens_per_second": "x", "time": 1e30, "step_seconds": 1}',
        '{"step": 5, "loss": 2}',
    ]
    rows.insert(3, "x" * (3 << 20))
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    try:
        assert trial.read() == {5: 2.0}
    finally:
        trial.close()
