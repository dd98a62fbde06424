"""Compute how far each memory feature lowered the peak of a run, by predicting a step with and without the feature.

The prediction runs in a separate process, because it replaces the process group by fake ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shoestring import figures
from shoestring.core.feature import Feature, Table, arrange_mesh, resolve_all
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.memory import Budget
from shoestring.memory.fact_names import KIND_FACT
from shoestring.memory.predicted import is_predicted, predict
from shoestring.models.loading import build_model
from shoestring.run import Run, parse
from shoestring.training.data_loading import model_arguments
from shoestring.training.user_code import import_user_code

log = logging.getLogger("shoestring")

_SECONDS = 300.0
"""Maximum number of seconds that a report waits for the predictions."""


@dataclass(frozen=True)
class SavedMemory:
    """Predicted peaks of memory of a rank in bytes, with all memory features and without each of them."""

    peak: int
    """Peak in bytes with all features of the run."""
    without: Mapping[str, int] = field(default_factory=dict)
    """Name of a memory feature -> peak in bytes of the same run without that feature."""

    def table(self, traced: int = 0) -> Table:
        """The table for the report.

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


def savings_tables(run: Run, world: World, trace: Trace) -> list[Table]:
    """A list with one table: how much memory each feature saved. The list is empty if nothing can be predicted.

    Args:
        run: the run, with the choice of [memory.budget] applied.
        trace: trace of the run, which holds the measured peak if memory was traced.
    """
    if not saving(run.features):
        return []
    alone = replace(run, features=tuple(feature for feature in run.features if not isinstance(feature, Budget)))
    command = [sys.executable, "-P", "-m", __spec__.name, "--ranks", str(world.size)]
    try:
        done = subprocess.run(command, input=alone.dump(), capture_output=True, text=True, timeout=_SECONDS, check=True)
        saved = SavedMemory(**json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, TypeError) as error:
        lines = str(getattr(error, "stderr", None) or error).splitlines()
        log.info("the memory that features saved could not be predicted: %s", lines[-1] if lines else error)
        return []
    peak = sum(nbytes for name, nbytes in trace.facts.items() if name.startswith(KIND_FACT))
    return [saved.table(int(peak))]


def saving(features: Sequence[Feature]) -> list[str]:
    """Names of the memory features whose effect on the peak can be predicted."""
    return [feature.name for feature in features if feature.name.startswith("memory.") and is_predicted(feature)]


def predict_savings(run: Run, ranks: int) -> SavedMemory:
    """Predict the peak of one rank, with all features of the run and without each of its memory features.

    Args:
        ranks: number of ranks; the prediction assumes that they are on one host.

    Raises:
        Exception: any error of a feature or operator that does not work on fake tensors.
    """
    without = {
        name: _peak(replace(run, features=tuple(feature for feature in run.features if feature.name != name)), ranks)
        for name in saving(run.features)
    }
    return SavedMemory(_peak(run, ranks), without)


def _peak(run: Run, ranks: int) -> int:
    world = arrange_mesh(World(size=ranks, local_size=ranks), run.features)
    settings, features = run.settings, resolve_all(run.completed(world).features, world)
    loss = import_user_code(run, skip=("run.evaluate", "run.sinks")).loss
    with torch.device("meta"):
        arguments, trust = model_arguments(run), run.trust("run.model")
        model = build_model(settings.model, run.model, arguments, settings.seed, weights=False, trust=trust)
    shape = settings.batch // ranks // settings.accumulate, run.data.sequence
    return predict(model, features, loss, shape, ranks=ranks, accumulate=settings.accumulate).peak


def main(arguments: Sequence[str]) -> None:
    """Read a run file from standard input, and print the prediction for it as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks of the run")
    chosen = parser.parse_args(arguments)
    saved = predict_savings(parse(tomllib.loads(sys.stdin.read())), chosen.ranks)
    document: dict[str, Any] = {"peak": saved.peak, "without": dict(saved.without)}
    print(json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1:])
