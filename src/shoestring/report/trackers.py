"""Sinks that log metrics to experiment trackers: TensorBoard, Weights & Biases, trackio, MLflow and the hub.

A tracker, built-in or provided by the user, is a callable `(folder, name, settings) -> Sink`. A tracker's package is
imported when its sink is opened, so importing this module imports neither torch nor any tracker.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.core.errors import ConfigError, ShoestringError, nearest
from shoestring.core.feature import Table
from shoestring.naming import installed
from shoestring.report.reading import flat
from shoestring.report.sinks import Sink
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

if TYPE_CHECKING:
    from shoestring.report.findings import Finding

log = logging.getLogger("shoestring")

Opener = Callable[[Path, str, Mapping[str, Any]], Sink]


class TensorBoard:
    """Writes every metric as a scalar to TensorBoard event files in `folder/tensorboard`."""

    def __init__(self, folder: Path, name: str = "", settings: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder) / "tensorboard"
        self._writer = self._open(None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar for each value."""
        for key, value in values.items():
            self._writer.add_scalar(key, float(value), step)

    def show(self, step: int, findings: Mapping[str, Finding]) -> None:
        """Write pictures as images and tables as texts in Markdown."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]

        from shoestring.report.findings import png

        for name, item in findings.items():
            if isinstance(item, Table):
                lines = [item.head, ["---"] * len(item.head), *item.rows]
                cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
                self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)
                continue
            pixels = item.bytes_of_pixels()
            height, width = pixels.shape[:2]
            image = Summary.Image(height=height, width=width, encoded_image_string=png(pixels))
            self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def truncate_after(self, step: int) -> None:
        """Begin a new event file with a purge step, which makes TensorBoard hide later steps in earlier files."""
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        """Flush buffered values and close the file."""
        self._writer.close()

    def _open(self, purge_step: int | None) -> Any:
        with _import_or_hint("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        return SummaryWriter(str(self.folder), purge_step=purge_step)


class Wandb:
    """Logs to Weights & Biases with wandb's own settings; WANDB_MODE=offline stores everything in `folder/wandb`.

    A resumed run continues the same run in wandb. Charts use the logged `step` as their axis, because wandb's internal
    step cannot go back to the checkpoint that the run resumed from.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        with _import_or_hint("wandb"):
            import wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shoestring"),
            name=name,
            id=remember(folder, "wandb", lambda: secrets.token_hex(4)),
            dir=str(folder),
            config=dict(settings),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log({"step": step} | dict(values))

    def show(self, step: int, findings: Mapping[str, Finding]) -> None:
        """Log pictures and tables as wandb images and tables."""
        import wandb

        shown = {
            name: wandb.Table(columns=list(item.head), data=[[str(cell) for cell in row] for row in item.rows])
            if isinstance(item, Table)
            else wandb.Image(item.bytes_of_pixels(), caption=item.caption or None)
            for name, item in findings.items()
        }
        self._run.log({"step": step} | shown)

    def close(self) -> None:
        """Finish the run; unless offline, wandb uploads the remaining data."""
        self._run.finish()


class Trackio:
    """Logs to trackio's server if one is set, else to its local database (in TRACKIO_DIR or Hugging Face's cache)."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        with _import_or_hint("trackio"):
            import trackio
        own = remember(folder, "trackio", lambda: f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        self._run = trackio.init("shoestring", name=own, config=flat(dict(settings)), resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log(dict(values), step=step)

    def show(self, step: int, findings: Mapping[str, Finding]) -> None:
        """Log pictures and tables as trackio images and tables."""
        import trackio
        from pandas import DataFrame

        shown = {
            name: trackio.Table(dataframe=DataFrame(item.rows, columns=item.head))
            if isinstance(item, Table)
            else trackio.Image(item.bytes_of_pixels(), caption=item.caption or None)
            for name, item in findings.items()
        }
        self._run.log(shown, step=step)

    def close(self) -> None:
        """Flush buffered values and finish the run."""
        self._run.finish()


class MLflow:
    """Logs to the MLflow server in MLFLOW_TRACKING_URI if it is set, else to the SQLite file `folder/mlflow.db`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        with _import_or_hint("mlflow"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        client, self._metric = MlflowClient(uri), Metric
        self._client = client

        def create_run() -> str:
            experiment = client.get_experiment_by_name("shoestring")
            experiment_id = experiment.experiment_id if experiment else client.create_experiment("shoestring")
            return client.create_run(experiment_id, run_name=name).info.run_id

        self._id = remember(folder, "mlflow", create_run)
        known = self._client.get_run(self._id).data.params
        new = [Param(key, value[:500]) for key, value in flat(dict(settings)).items() if key not in known]
        for start in range(0, len(new), 100):  # at most 100 parameters fit into one request
            self._client.log_batch(self._id, params=new[start : start + 100])
        self._client.update_run(self._id, status="RUNNING")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(key, float(value), now, step) for key, value in values.items()])

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)


def _open_hub(folder: Path, name: str, settings: Mapping[str, Any]) -> Sink:
    """Open the hub's sink, which is in a separate package that only this function imports."""
    with _import_or_hint("hub", "shoestring_hub"):
        module = import_module("shoestring_hub.client.sink")
    return module.HubSink(folder, name, settings)


TRACKERS: dict[str, Opener] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
    "hub": _open_hub,
}


def check(names: tuple[str, ...]) -> None:
    """Check that every name in `run.sinks` is a known tracker or has the form `package.module:callable`.

    Raises:
        ConfigError: a name is neither known nor of this form, or appears twice.
    """
    for name in names:
        if name not in TRACKERS and ":" not in name:
            hint = f"{nearest(name, TRACKERS)} A sink of your own is written `package.module:callable`."
            raise ConfigError(f"`run.sinks`: there is no sink `{name}`", hint=hint)
        if names.count(name) > 1:
            raise ConfigError(f"`run.sinks` names `{name}` twice")


class Tracker:
    """Wraps a sink so that its failures do not end the run: the first failure is logged and stops the sink.

    Args:
        name: the sink's name in `run.sinks`, for messages.
        open_sink: creates the sink from the run's folder, name and settings.
        step: the step that the run resumed from; a sink with `truncate_after` removes the data of later steps.

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
        """Log the values of one step."""
        if (sink := self._sink) is not None:
            self._guarded(step, lambda: sink.write(step, values))

    def _guarded(self, step: int, work: Callable[[], object]) -> None:
        """Call `work`, which uses the sink; if it fails, log a warning and stop using the sink."""
        try:
            work()
        except Exception as error:
            log.warning("sink `%s` failed at step %d and gets no more metrics: %s", self.name, step, _reason(error))
            sink, self._sink = self._sink, None
            with suppress(Exception):
                if sink is not None:
                    sink.close()

    def show(self, step: int, findings: Mapping[str, Finding]) -> None:
        """Log the tables and pictures of an evaluation, if the sink takes any."""
        if (show := getattr(self._sink, "show", None)) is not None:
            self._guarded(step, lambda: show(step, findings))

    def close(self) -> None:
        """Close the sink, unless it has failed."""
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close()
        except Exception as error:
            log.warning("sink `%s` failed while it was closed: %s", self.name, _reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _import_or_hint(extra: str, package: str = "") -> Iterator[None]:
    """Context that turns a failed import of `package` (by default, the package with the extra's name) into an error
    that names the extra to install."""
    try:
        if not installed(package or extra):
            raise ImportError(f"No module named '{package or extra}'")
        yield
    except ImportError as error:
        hint = f'pip install "shoestring[{extra}]"'
        raise ShoestringError(f"`run.sinks`: {extra} is not installed ({error})", hint=hint) from error


def remember(folder: Path, tracker: str, new: Callable[[], str]) -> str:
    """The run's id in a tracker; created at the first start and stored in `folder`, so that a resumed run reuses it."""
    path = Path(folder) / "trackers.json"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):  # the file does not exist or is damaged
        known = foreign.read_json_object(path, within=path.parent)
    if tracker not in known:
        known[tracker] = new()
        write_atomic(path, json.dumps(known, indent=2).encode())
    return known[tracker]
