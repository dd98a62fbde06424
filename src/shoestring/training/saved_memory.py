"""Compute how far each memory feature lowered the peak memory of a run, by predicting a step with and without it.

The prediction runs in a separate process, because it replaces the process group by fake ranks. That process runs while
the run trains.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from subprocess import PIPE
from typing import Any, Protocol

import torch
from torch import nn

from shoestring import figures
from shoestring.core.feature import Feature, Table, arrange_mesh, resolve_all, splits_replicas
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.lifetime import end_after
from shoestring.memory import Budget
from shoestring.memory.fact_names import KIND_FACT
from shoestring.memory.predicted import is_predicted, predict
from shoestring.run import Run, parse
from shoestring.training.data_loading import model_arguments, outlined_data
from shoestring.training.user_code import NamedModel, import_user_code, model_of

log = logging.getLogger("shoestring")

_SECONDS = 300.0
"""Maximum number of seconds that the report waits for the predictions."""
_PRIORITY = 19
"""Nice value of the predicting process while the run trains."""
_FAILED = "the memory that features saved could not be predicted: %s"


@dataclass(frozen=True)
class SavedMemory:
    """Predicted peak memory of a rank, in bytes: with all memory features, and without one of them at a time."""

    peak: int
    """Peak in bytes with all features of the run."""
    without: Mapping[str, int] = field(default_factory=dict)
    """Name of a memory feature -> peak in bytes of the same run without that feature."""

    def table(self, traced: int = 0) -> Table:
        """The table for the report: saved memory by feature.

        Args:
            traced: peak in bytes that memory tracing measured in the run; 0 if memory was not traced.
        """
        rows: list[tuple[str | float, ...]] = [("this run", self.peak, "", "")]
        for name, peak in self.without.items():
            rows.append((f"without {name}", peak, peak - self.peak, figures.percent(1 - self.peak / peak)))
        measured = f" Tracing measured {traced:,} bytes in this run." if traced else ""
        return Table(
            title="Memory that each feature saved",
            head=("Run", "Peak of a rank, bytes", "Saved, bytes", "Saved"),
            rows=tuple(rows),
            note="Peaks are predicted from the operators of a step, in the same way for each row: this run, and the"
            f" same run without one feature.{measured}",
        )


class SavingsTables(Protocol):
    """A function that waits for the prediction, and returns a list with one table: how much memory each feature saved.
    The list is empty if the prediction failed."""

    def __call__(self, trace: Trace) -> list[Table]:
        """`trace` is the run's trace, which holds the measured peak if memory was traced."""
        ...


@contextmanager
def predicted_savings(run: Run, world: World) -> Iterator[SavingsTables]:
    """Context in which the first rank predicts the savings while the run trains, at the lowest priority. Unless the run
    is very short, it does not wait for the prediction at its end.

    Args:
        run: the run, with the choice of [memory.budget] applied.
    """
    if not world.first or not saving(run.features):
        yield lambda trace: []
        return
    alone = replace(run, features=tuple(feature for feature in run.features if not isinstance(feature, Budget)))
    command = [sys.executable, "-P", "-m", __spec__.name, "--ranks", str(world.size), "--parent", str(os.getpid())]
    try:
        # The process gets its own process group, so that the processes that it forks can be killed with it.
        process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, process_group=0)
    except OSError as error:
        log.info(_FAILED, error)
        yield lambda trace: []
        return
    assert process.stdin is not None
    with process:
        try:
            with suppress(OSError):  # the process may already have ended
                os.setpriority(os.PRIO_PGRP, process.pid, _PRIORITY)
                process.stdin.write(alone.toml)
                process.stdin.close()
            process.stdin = None
            yield partial(_tables, process)
        finally:
            if process.poll() != 0:  # the process still runs, or has failed and may have left forked processes
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _tables(process: subprocess.Popen[str], trace: Trace) -> list[Table]:
    errors = ""
    try:
        with suppress(OSError):
            os.setpriority(os.PRIO_PGRP, process.pid, 0)  # training is over, so nothing needs the CPU more
        output, errors = process.communicate(timeout=_SECONDS)
        saved = SavedMemory(**json.loads(output.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, TypeError) as error:
        lines = (errors or str(error)).splitlines()
        log.info(_FAILED, lines[-1] if lines else error)
        return []
    peak = sum(nbytes for name, nbytes in trace.facts.items() if name.startswith(KIND_FACT))
    return [saved.table(int(peak))]


def saving(features: Sequence[Feature]) -> list[str]:
    """Names of the memory features whose effect on the peak can be predicted."""
    if any(map(splits_replicas, features)):  # ranks hold different parts of the model, so one peak is not enough
        return []
    return [feature.name for feature in features if feature.name.startswith("memory.") and is_predicted(feature)]


def predict_savings(run: Run, ranks: int, apply: Callable[..., Iterable[int]] = map) -> SavedMemory:
    """Predict the peak of one rank, with all features of the run and without each of its memory features.

    Args:
        ranks: number of ranks; the prediction assumes that all are on one host.
        apply: function like `map`, which calls the predicting function on its arguments.

    Raises:
        Exception: any error that a feature or operator raises because it does not work on fake tensors.
    """
    names = saving(run.features)
    without = (
        replace(run, features=tuple(feature for feature in run.features if feature.name != name)) for name in names
    )
    peak, *others = apply(partial(_peak, ranks=ranks), [run, *without])
    return SavedMemory(peak, dict(zip(names, others, strict=True)))


def _peak(run: Run, ranks: int) -> int:
    world = arrange_mesh(World(size=ranks, local_size=ranks), run.features)
    settings, features = run.settings, resolve_all(run.completed(world).features, world)
    code = import_user_code(run, skip=("run.evaluate", "run.sinks"))
    arguments, data = outlined_data(run, code)
    model = _outline(code.model, arguments)
    shape = settings.batch // ranks // settings.accumulate, run.data.sequence
    return predict(
        model,
        features,
        code.loss,
        shape,
        ranks=ranks,
        accumulate=settings.accumulate,
        forward=code.forward,
        batch=data.first_batch(shape[0]) if data else None,
    ).peak


def _outline(model: NamedModel, from_data: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return model.build(from_data, weights=False)


def main(arguments: Sequence[str]) -> None:
    """Read a run file from standard input, and print the prediction for it as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks of the run")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process with which this one ends")
    chosen = parser.parse_args(arguments)
    # A killed run cannot end this process, so this process ends itself and its forks when the run's process is gone.
    end_after(chosen.parent, lambda: os.killpg(0, signal.SIGKILL))
    run = parse(tomllib.loads(sys.stdin.read()))
    _outline(model_of(run), model_arguments(run))  # before forking, imports what all forked processes need
    with ProcessPoolExecutor(len(saving(run.features)) + 1, multiprocessing.get_context("fork")) as pool:
        saved = predict_savings(run, chosen.ranks, pool.map)
    document: dict[str, Any] = {"peak": saved.peak, "without": dict(saved.without)}
    print(json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1:])
