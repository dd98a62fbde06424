"""`shoestring tune` as a user has it: files, workers as processes, and what they leave behind."""

import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import tomli_w

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.tiers.slots import slots_folder
from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.tune.search import open_optuna
from shoestring.tune.store import Store, connect, masked
from shoestring.verbs.study import join_plan, read_plan
from shoestring.verbs.trials import Leftovers, folder_of
from tests.small_runs import write_run_file, write_texts
from tests.tune.test_space import LR, plan_of


def test_workers_that_begin_at_once_all_find_the_tables(tmp_path):
    plan = plan_of(tmp_path)
    store = plan.open_store(create=True)
    together, found = threading.Barrier(4), []

    def begin():
        together.wait()
        found.append(open_optuna(store, plan.study)[1].study_name)

    workers = [threading.Thread(target=begin) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [plan.study.name] * 4


def test_a_password_is_neither_shown_nor_kept(tmp_path):
    url = "postgresql+psycopg://me:secret@db/tune"
    assert masked(url) == "postgresql+psycopg://me:***@db/tune"
    with pytest.raises(ConfigError) as refused:
        connect("nonsense://me:secret@db/tune")
    assert "secret" not in str(refused.value)
    assert "secret" not in str(plan_of(tmp_path, store=url).document)


def test_a_store_may_be_named_by_an_environment_variable(tmp_path, monkeypatch):
    plan = plan_of(tmp_path)
    plan.open_store(create=True)
    monkeypatch.setenv("STORE", plan.url)
    assert join_plan("env:STORE", "").study.name == plan.study.name
    assert "STORE" not in os.environ, "trials would inherit it"
    with pytest.raises(ConfigError, match="`STORE` is not set"):
        join_plan("env:STORE", "")


def test_what_killed_trials_left_in_memory_is_removed_when_they_have_ended(tmp_path):
    base = {"run": {"steps": 10}, "checkpoint": {"tiered": {"memory_folder": str(tmp_path / "memory")}}}
    plan = plan_of(tmp_path, base=base)
    store = plan.open_store(create=True)
    slots = []
    for number in range(2):
        settings = Tiered(memory_folder=str(tmp_path / "memory")).placed(folder_of(plan, number))
        slots.append(slots_folder(settings, World()).parent)
        store.add(number + 1, number, {"optim.adamw.lr": 1e-3}, 2)
        store.take("killed", -1.0)
    (tmp_path / "memory").chmod(0o755)
    ended = store.take("next", 60.0)
    store.finish(ended, "done", 1.0)
    Leftovers(plan, store).remove()
    assert [folder.exists() for folder in slots] == [False, True]


@pytest.mark.slow
def test_two_workers_search_and_the_best_run_file_trains(tmp_path):
    base = {"run": {"steps": 6, "data": write_texts(tmp_path / "texts")}}
    write_run_file(tmp_path / "base.toml", base)
    tables = {"tune": {"run": str(tmp_path / "base.toml"), "trials": 3, "sampler": "random", "lease": 6.0}, "space": LR}
    (tmp_path / "tune.toml").write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "shoestring"]
    begin = {"cwd": tmp_path, "text": True, "capture_output": True, "timeout": 300}
    search = subprocess.Popen(
        [*command, "tune", "tune.toml", "--workers", "2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    shown, killed = set(), 0
    while search.poll() is None:
        shown |= set(arguments_of_workers())
        below = Path(f"/proc/{search.pid}/task/{search.pid}/children")
        workers = below.read_text().split() if below.exists() else []
        if len(workers) == 2 and not killed and any(tmp_path.glob("tune/*/trial-*/metrics.jsonl")):
            os.kill(killed := int(workers[0]), signal.SIGKILL)
    assert killed and "a worker ended by signal 9" in search.stderr.read()
    assert search.returncode == 0, "the exit code is the study's"
    assert shown and not any("sqlite" in arguments for arguments in shown), "the URL may hold a password"
    best = subprocess.run([*command, "tune", "best", "--out", "best.toml"], **begin)
    assert "3 done" in best.stdout, best.stderr
    chosen = tomllib.loads((tmp_path / "best.toml").read_text())
    store = read_plan_store(tmp_path)
    rates = {trial.parameters["optim.adamw.lr"] for trial in store.trials()}
    assert chosen["optim"]["adamw"]["lr"] in rates and len(rates) == 3
    prepared = {path.stat().st_ino for path in tmp_path.glob("tune/*/trial-*/train.tokens")}
    assert len(prepared) < 3, "each trial has prepared the data again"
    trained = subprocess.run([*command, "train", "best.toml"], **begin)
    assert trained.returncode == 0, trained.stderr[-500:]


def read_plan_store(folder):
    study = read_plan(str(folder / "tune.toml")).study
    return Store(connect(f"sqlite:///{folder / 'tune' / study.name / 'store.db'}"), study.name)


def arguments_of_workers():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if " tune join " in arguments:
            yield arguments


IMPORTS = """
import torch
asked = []
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init"):
    setattr(torch.cuda, name, lambda *_, name=name, **__: asked.append(name))
import importlib
from shoestring.verbs.trials import PRELOADED
for module in PRELOADED:
    importlib.import_module(module)
assert not asked, asked
"""


@pytest.mark.slow
def test_what_trials_are_forked_from_asks_nothing_of_a_gpu():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=True)
