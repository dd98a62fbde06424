"""Finds tasks of lm-evaluation-harness by name or file, loads and runs them, and returns their metrics."""

from __future__ import annotations

import difflib
import io
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring.naming import is_task_file

if TYPE_CHECKING:
    from shoestring.decode.harness.model import HarnessModel

FEWSHOT_SEED = 1234
"""Seed for choosing the examples in prompts; the harness's own default."""


class Tasks:
    """Tasks named by the user, which can be loaded and run.

    Args:
        names: names of tasks, groups or tags of the harness, or YAML files of tasks.
        key: key of the run file or flag that contains the names, for error messages.

    Raises:
        ConfigError: the harness is not installed, or there is no such task.
    """

    def __init__(self, names: Sequence[str], key: str) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ConfigError(
                f"`{key}` needs lm-evaluation-harness ({error.name} is missing)",
                hint="pip install shoestring[evaluate]",
            ) from error
        if not names or not all(names):
            raise ConfigError(f"`{key}` names no task", hint="name a task, such as arc_easy, or a task's YAML file")
        self.names, self.key = tuple(names), key
        for name in filter(is_task_file, names):
            if not Path(name).is_file():
                raise ConfigError(f"`{key}`: there is no file `{name}`")
        # Indexing the harness's own tasks takes seconds, and tasks from files do not need the index.
        self.manager = TaskManager(include_defaults=not all(map(is_task_file, names)))
        known = self.manager.all_tasks
        for name in names:
            if not is_task_file(name) and name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean `{close[0]}`?" if close else "lm-eval ls tasks"
                raise ConfigError(f"`{key}`: lm-evaluation-harness has no task `{name}`", hint=hint)
        self._loaded: Any = None

    def load(self) -> Any:
        """Load the tasks with their data, which may be downloaded; returns the tasks as `lm_eval.evaluate` takes them.

        Raises:
            DataError: a task or its data cannot be read.
        """
        if self._loaded is None:
            with _failures(f"`{self.key}`: cannot load {', '.join(self.names)}"), _seeded():
                self._loaded = self.manager.load(list(self.names))
                for task in self._loaded["tasks"].values():
                    if task.get_config("num_fewshot") is None:
                        task.set_config(key="num_fewshot", value=0)
                    task.set_fewshot_seed(seed=FEWSHOT_SEED)
        return self._loaded

    def results(self, model: HarnessModel, **options: Any) -> dict[str, Any]:
        """Run the tasks with options of `lm_eval.simple_evaluate`, and return its results.

        Raises:
            DataError: a task or its data cannot be read, or the code of a task raises an error.
        """
        from lm_eval import simple_evaluate

        with _failures(f"`{self.key}`: {', '.join(self.names)}"), _quiet():
            return dict(
                simple_evaluate(model=model, tasks=list(self.names), task_manager=self.manager, **options) or {}
            )

    def metrics(self, model: HarnessModel, limit: int | None = None) -> dict[str, float]:
        """Run the tasks, and return their metrics by name: `TASK/METRIC`, or `TASK/METRIC/FILTER` for a task that
        filters the model's answers.

        Standard errors are not computed, because the harness starts processes to draw bootstrap samples for them.

        Args:
            limit: number of documents of each task; defaults to all documents.
        """
        from lm_eval import evaluator

        loaded = self.load()
        # The output is discarded, because the harness shows a progress bar for the prompts of each task.
        with _failures(f"`{self.key}`: {', '.join(self.names)}"), _quiet(), redirect_stderr(io.StringIO()):
            results = evaluator.evaluate(lm=model, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False)
        return dict(metrics_of(results["results"]))


def metrics_of(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """The numbers in the harness's results as pairs of name and value; see `Tasks.metrics`."""
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if comma and isinstance(value, int | float) and not isinstance(value, bool):
                yield "/".join([task, metric, *([filtered] if filtered != "none" else [])]), float(value)


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn errors of the harness and of its tasks into a DataError; the code of a task may raise any exception."""
    try:
        yield
    except ShoestringError:
        raise
    except Exception as error:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        raise DataError(f"{what}: {type(error).__name__}: {line[:300]}", hint="--debug shows where") from error


@contextmanager
def _seeded() -> Iterator[None]:
    """Context in which the global random generators have the harness's default seeds. Tasks may draw from these
    generators, for example the order of their documents, and all ranks must load the same tasks."""
    python, arrays = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without the harness's log messages about each evaluation, except warnings."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
