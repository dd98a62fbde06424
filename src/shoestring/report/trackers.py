"""Sinks that pass metrics on to experiment trackers: TensorBoard, Weights & Biases, trackio and MLflow.

Each is a callable `(folder, name, settings) -> Sink`, and so is a sink of one's own. A tracker's package is imported
when its sink opens, so nothing here imports torch or a tracker at import time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoestring.core.errors import ConfigError, ShoestringError, nearest
from shoestring.report.reading import flat
from shoestring.report.sinks import Sink
from shoestring.storage.whole import write_atomic

log = logging.getLogger("shoestring")

Opener = Callable[[Path, str, Mapping[str, Any]], Sink]


class TensorBoard:
    """Writes every value as a scalar into TensorBoard event files in `folder/tensorboard`."""

    def __init__(self, folder: Path, name: str = "", settings: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder) / "tensorboard"
        self._writer = self._open(None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar for each of the values."""
        for key, value in values.items():
            self._writer.add_scalar(key, float(value), step)

    def truncate_after(self, step: int) -> None:
        """Begin a new event file that makes TensorBoard hide what earlier ones hold of later steps."""
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._writer.close()

    def _open(self, purge_step: int | None) -> Any:
        with _import_or_hint("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        return SummaryWriter(str(self.folder), purge_step=purge_step)


class Wandb:
    """Logs to Weights & Biases as wandb's own settings say: WANDB_MODE=offline keeps everything in `folder/wandb`.

    A resumed run continues the same run there. Values are drawn over the logged `step`, because wandb's internal step
    cannot go back to the checkpoint that the run resumed from.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        with _import_or_hint("wandb"):
            import wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shoestring"),
            name=name,
            id=_remember(folder, "wandb", lambda: secrets.token_hex(4)),
            dir=str(folder),
            config=dict(settings),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log({"step": step} | dict(values))

    def close(self) -> None:
        """Finish the run; wandb uploads what is left unless it is offline."""
        self._run.finish()


class Trackio:
    """Logs to trackio's local database (TRACKIO_DIR, or the cache of Hugging Face), or to its server if one is set."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        with _import_or_hint("trackio"):
            import trackio
        own = _remember(folder, "trackio", lambda: f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        self._run = trackio.init("shoestring", name=own, config=flat(dict(settings)), resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is buffered and finish the run."""
        self._run.finish()


class MLflow:
    """Logs to the MLflow server in MLFLOW_TRACKING_URI, or else to an SQLite file of its own, `folder/mlflow.db`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        with _import_or_hint("mlflow"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self._client, self._metric = MlflowClient(uri), Metric
        self._id = _remember(folder, "mlflow", lambda: self._begin(name))
        known = self._client.get_run(self._id).data.params
        new = [Param(key, value[:500]) for key, value in flat(dict(settings)).items() if key not in known]
        for start in range(0, len(new), 100):  # the most that one request may carry
            self._client.log_batch(self._id, params=new[start : start + 100])
        self._client.update_run(self._id, status="RUNNING")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(key, float(value), now, step) for key, value in values.items()])

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)

    def _begin(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name("shoestring")
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("shoestring")
        return self._client.create_run(experiment_id, run_name=name).info.run_id


TRACKERS: dict[str, Opener] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}


def check(names: tuple[str, ...]) -> None:
    """Make sure that each of `run.sinks` is a known tracker, or looks like `package.module:callable`.

    Raises:
        ConfigError: one is neither, or stands there twice.
    """
    for name in names:
        if name not in TRACKERS and ":" not in name:
            hint = f"{nearest(name, TRACKERS)} A sink of your own is written `package.module:callable`."
            raise ConfigError(f"`run.sinks`: there is no sink `{name}`", hint=hint)
        if names.count(name) > 1:
            raise ConfigError(f"`run.sinks` names `{name}` twice")


class Tracker:
    """A sink whose failures do not end the run: the first one is a warning, and the sink gets nothing more.

    Args:
        name: as in `run.sinks`, for messages.
        open_sink: makes the sink from the run's folder, its name and its settings.
        step: the step that the run resumed from; a sink that has `truncate_after` drops what it holds of later ones.

    Raises:
        ShoestringError: the sink cannot be opened.
    """

    def __init__(
        self, name: str, open_sink: Opener, folder: Path, title: str, settings: Mapping[str, Any], step: int
    ) -> None:
        self.name = name
        try:
            self._sink: Sink | None = open_sink(folder, title, settings)
            if truncate := getattr(self._sink, "truncate_after", None):
                truncate(step)
        except ShoestringError:
            raise
        except Exception as error:
            raise ShoestringError(f"`run.sinks`: cannot open `{name}`: {_reason(error)}") from error
        if missing := [method for method in ("write", "close") if not callable(getattr(self._sink, method, None))]:
            kind = type(self._sink).__name__
            raise ConfigError(f"`run.sinks`: `{name}` returned a {kind} without a method `{missing[0]}`")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on the values of one step."""
        if self._sink is None:
            return
        try:
            self._sink.write(step, values)
        except Exception as error:
            log.warning("sink `%s` failed at step %d and gets no more metrics: %s", self.name, step, _reason(error))
            sink, self._sink = self._sink, None
            with suppress(Exception):
                sink.close()

    def close(self) -> None:
        """Close the sink, unless it has failed already."""
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close()
        except Exception as error:
            log.warning("sink `%s` failed while it was closed: %s", self.name, _reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _import_or_hint(extra: str) -> Iterator[None]:
    """Turn a failing import into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        hint = f'pip install "shoestring[{extra}]"'
        raise ShoestringError(f"`run.sinks`: {extra} is not installed ({error})", hint=hint) from error


def _remember(folder: Path, tracker: str, new: Callable[[], str]) -> str:
    """The tracker's identity of the run in `folder`, so that a resumed run continues it; drawn at the first start."""
    path = Path(folder) / "trackers.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    if tracker not in known:
        known[tracker] = new()
        write_atomic(path, json.dumps(known, indent=2).encode())
    return known[tracker]
