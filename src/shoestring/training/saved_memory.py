"""What each memory feature of a run saved at the peak: the same step, predicted with the feature and without it.

Nothing is trained twice. A process of its own predicts, because it puts imagined ranks in the place of those that run.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shoestring import run as runs
from shoestring.core.feature import Feature, Table, arrange_mesh
from shoestring.core.task import cross_entropy
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.memory.fact_names import KIND_FACT
from shoestring.memory.predicted import is_predicted, predict
from shoestring.models.loading import build_model
from shoestring.naming import resolve
from shoestring.run import Run
from shoestring.training.data_loading import model_arguments

log = logging.getLogger("shoestring")

_SECONDS = 300.0
"""The longest that a report waits for its predictions."""


@dataclass(frozen=True)
class SavedMemory:
    """Predicted peaks of a rank, in bytes."""

    peak: int
    """Of the run as it was."""
    without: Mapping[str, int] = field(default_factory=dict)
    """By memory feature, of the same run without it."""

    def table(self, traced: int = 0) -> Table:
        """The table of the report.

        Args:
            traced: bytes at the peak as they were traced in the run; 0 if they were not.
        """
        rows: list[tuple[str | float, ...]] = [("this run", self.peak, "", "")]
        for name, peak in self.without.items():
            rows.append((f"without {name}", peak, peak - self.peak, f"{1 - self.peak / peak:.1%}"))
        measured = f" Tracing measured {traced:,} bytes in this run." if traced else ""
        return Table(
            title="Memory that each feature saved",
            head=("Run", "Peak of a rank, bytes", "Saved, bytes", "Saved"),
            rows=tuple(rows),
            note="Peaks are predicted from the operators of a step, in the same way for each row: this run, and the"
            f" same run without one feature.{measured}",
        )


def savings_tables(features: Sequence[Feature], folder: Path, world: World, trace: Trace) -> list[Table]:
    """The table of what the memory features of a run saved; none if there are none, or if it cannot be predicted.

    Args:
        features: of the run, as they were attached.
        folder: the run's, with its `run.toml`.
        trace: the run's, which has the peak if it was traced.
    """
    if not saving(features):
        return []
    command = [sys.executable, "-m", __spec__.name, str(folder / "run.toml"), "--ranks", str(world.size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        saved = SavedMemory(**json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, TypeError) as error:
        lines = str(getattr(error, "stderr", None) or error).splitlines()
        log.info("what memory features saved could not be predicted: %s", lines[-1] if lines else error)
        return []
    peak = sum(nbytes for name, nbytes in trace.facts.items() if name.startswith(KIND_FACT))
    return [saved.table(int(peak))]


def saving(features: Sequence[Feature]) -> list[str]:
    """Names of the features that lower the peak, as far as a prediction sees it."""
    return [each.name for each in features if each.name.startswith("memory.") and is_predicted(each)]


def predict_savings(run: Run, ranks: int) -> SavedMemory:
    """Predict the peak of a rank of a run, and without each of its memory features.

    Args:
        ranks: as if all were on one host.

    Raises:
        Exception: whatever a feature or an operator raises that cannot work without numbers.
    """
    without = {
        name: _peak(replace(run, features=tuple(each for each in run.features if each.name != name)), ranks)
        for name in saving(run.features)
    }
    return SavedMemory(_peak(run, ranks), without)


def _peak(run: Run, ranks: int) -> int:
    world = arrange_mesh(World(size=ranks, local_size=ranks), run.features)
    settings, features = run.settings, [each.resolve(world) for each in run.completed(world).features]
    with torch.device("meta"):
        model = build_model(settings.model, run.model, model_arguments(run), settings.seed)
    loss = resolve(settings.loss, "run.loss") if settings.loss else cross_entropy
    shape = settings.batch // ranks // settings.accumulate, run.data.sequence
    return predict(model, features, loss, shape, ranks=ranks, accumulate=settings.accumulate).peak


def main(arguments: Sequence[str]) -> None:
    """Print the prediction of a run file as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="the run file")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks of the run")
    chosen = parser.parse_args(arguments)
    saved = predict_savings(runs.load(chosen.file), chosen.ranks)
    found: dict[str, Any] = {"peak": saved.peak, "without": dict(saved.without)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
