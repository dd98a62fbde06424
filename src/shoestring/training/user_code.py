"""Import the user's own code that a run file names, but only if the user has vouched for the code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.core.task import Collate, Forward, Loss, call_model, cross_entropy
from shoestring.decode.harness.tasks import Tasks
from shoestring.models.loading import build_model
from shoestring.naming import Trust, harness_tasks, resolve
from shoestring.report.trackers import TRACKERS, Opener
from shoestring.run import Run


@dataclass(frozen=True)
class NamedModel:
    """The model that a run file names, and who vouches for its code; see `build_model`."""

    target: str
    """The value of `run.model`."""
    arguments: Mapping[str, Any]
    """The table [model]."""
    seed: int
    """Seed of the initial weights."""
    trust: Trust

    def build(self, from_data: Mapping[str, Any], *, weights: bool = True) -> nn.Module:
        """Build the model with its arguments and those that follow from the data."""
        return build_model(self.target, self.arguments, from_data, self.seed, weights=weights, trust=self.trust)


def model_of(run: Run) -> NamedModel:
    """The model that a run names; nothing is imported before it is built."""
    return NamedModel(run.settings.model, run.model, run.settings.seed, run.trusts["run.model"])


@dataclass(frozen=True)
class UserCode:
    """The model and the user's own functions that training calls; the data set is not among them, because `open_data`
    imports it."""

    model: NamedModel
    """The model that `run.model` names; its code is imported when it is built."""
    forward: Forward
    """The function that `run.forward` names; by default the model is called on the inputs of a batch."""
    collate: Collate | None
    """The function that `run.collate` names; by default samples are stacked."""
    loss: Loss
    """The function that `run.loss` names; by default the cross-entropy."""
    evaluate: Callable[..., Any] | Tasks | None
    """The function or the tasks that `run.evaluate` names; None if the setting is empty."""
    read_file: Callable[[Path], Any] | None
    """The function that `run.read_file` names; None if the setting is empty."""
    predict: Callable[..., Any] | None
    """The function that `run.predict` names; None if the setting is empty."""
    sinks: Mapping[str, Opener]
    """Name of a sink in `run.sinks` -> function that opens the sink."""


def import_user_code(run: Run, *, skip: Collection[str] = ()) -> UserCode:
    """Import the functions that keys of [run] name, except `run.model` and `run.data`.

    Args:
        skip: keys to leave out, such as "run.sinks" on ranks that write no metrics and may lack the sinks' packages.

    Raises:
        ConfigError: a name does not exist, or importing it fails.
        TrustError: the user has not vouched for the code.
    """
    settings, trusts = run.settings, run.trusts

    def import_one(key: str, target: str) -> Any:
        if not target or key in skip:
            return None
        tasks = harness_tasks(target) if key == "run.evaluate" else None
        return resolve(target, key, trusts[key]) if tasks is None else Tasks(tasks, key)

    names = settings.sinks if "run.sinks" not in skip else ()
    return UserCode(
        model=model_of(run),
        forward=import_one("run.forward", settings.forward) or call_model,
        collate=import_one("run.collate", settings.collate),
        loss=import_one("run.loss", settings.loss) or cross_entropy,
        evaluate=import_one("run.evaluate", settings.evaluate),
        read_file=import_one("run.read_file", settings.read_file),
        predict=import_one("run.predict", settings.predict),
        sinks={name: TRACKERS.get(name) or import_one("run.sinks", name) for name in names},
    )
