"""tune.dashboard: whether optuna-dashboard opens a study that was written here, if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.tune import toy_worker
from shoestring.tune.settings import Halving

TRIALS = 9


def shown(_: Deadline) -> Measured | NotRun:
    """Asks the dashboard's own interface for the trials of a study, without a network."""
    if importlib.util.find_spec("optuna_dashboard") is None:
        return NotRun("optuna-dashboard is not installed")
    with TemporaryDirectory(prefix="tune-") as folder:
        url = f"sqlite:///{folder}/store.db"
        schedule = Halving(first=5, factor=3)
        worker = toy_worker.build(url, Path(folder), TRIALS, 60.0, 15, 0.0, schedule=schedule)
        worker.run()
        dashboard = importlib.import_module("optuna_dashboard._app").create_app(optuna.storages.RDBStorage(url))
        studies = _get(dashboard, "/api/studies")["study_summaries"]
        found = _get(dashboard, f"/api/studies/{studies[0]['study_id']}")["trials"]
        states = {trial.number: trial.state for trial in worker.store.trials()}
    expected = {"done": "Complete", "pruned": "Pruned", "failed": "Fail"}
    wrong = sum(expected[states[each["number"]]] != each["state"] for each in found) + abs(len(found) - TRIALS)
    return Measured(float(wrong), f"{len(found)} trials in {len(studies)} study")


def _get(app: Any, path: str) -> dict[str, Any]:
    status: list[str] = []
    environment = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": "", "wsgi.url_scheme": "http"}
    environment |= {"SERVER_NAME": "localhost", "SERVER_PORT": "80", "wsgi.input": io.BytesIO()}
    body = b"".join(app(environment, lambda said, headers, error=None: status.append(said)))
    assert status[0].startswith("200"), (status, body[:500])
    return json.loads(body)


def rows() -> list[Bar]:
    """The bar."""
    return [
        Bar(
            "tune.dashboard",
            f"trials, of {TRIALS} under successive halving, that optuna-dashboard shows in another state or not at all",
            "<=",
            0.0,
            shown,
            peers=("optuna-dashboard",),
            kind="exact",
        )
    ]
