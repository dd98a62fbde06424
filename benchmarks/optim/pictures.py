"""Steps to the target over the batch, as a table and a picture, from the runs that the contest has stored.

python -m benchmarks.optim.pictures [--runs FOLDER]

Makes no runs: a method is left out at a batch where some of its runs are missing. The critical batch is where twice the
least number of steps is needed, by the fit steps = least (1 + critical / batch) (McCandlish et al., 2018) to the best
method at each batch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import OutOfBudget, resumable
from benchmarks.machine import ROOT
from benchmarks.optim.images import BATCH, BATCHES, SEEDS, Contest, listed, methods

PICTURE = ROOT / "docs" / "pictures" / "optim-images.svg"
PAGE = ROOT / "docs" / "guides" / "large-batches.md"
BEGIN, END = "<!-- begin: python -m benchmarks.optim.pictures -->", "<!-- end -->"
# Told apart without colour as well; the colours are Okabe and Ito's, for all kinds of sight.
STYLES = {
    "nesterov": ("#000000", "-", "o"),
    "lars": ("#E69F00", "--", "s"),
    "lars-dynamic": ("#D55E00", "-.", "P"),
    "lamb": ("#009E73", "-.", "^"),
    "adamw": ("#0072B2", ":", "D"),
    "adascale": ("#CC79A7", "--", "v"),
}


@dataclass(frozen=True)
class Figures:
    """What is stored: steps of each seed by method and batch, and the noise scale that AdaScale saw at a batch."""

    target: float
    steps: Mapping[str, Mapping[int, Sequence[int | None]]]
    noise: Mapping[int, float]

    @property
    def best(self) -> dict[int, float]:
        """Median steps of the best method at each batch that one gets to the target with."""
        medians = {
            batch: min(median(of[batch]) for of in self.steps.values() if batch in of)
            for batch in sorted({batch for of in self.steps.values() for batch in of})
        }
        return {batch: steps for batch, steps in medians.items() if steps < float("inf")}


def median(steps: Sequence[int | None]) -> float:
    """Infinite where most seeds never get there."""
    return statistics.median(float("inf") if each is None else each for each in steps)


def figures(folder: Path) -> Figures | None:
    """From the runs in a folder; None where even those that the target is of are missing."""

    def refuse() -> None:
        raise OutOfBudget

    contest = Contest(folder, refuse)
    steps: dict[str, dict[int, Sequence[int | None]]] = {method: {} for method in methods(BATCHES[-1])}
    noise: dict[int, float] = {}
    try:
        target = contest.target
    except OutOfBudget:
        return None
    for batch in BATCHES:
        for method in methods(batch):
            try:
                steps[method][batch] = contest.fresh(method, batch)
                if method == "adascale":
                    runs = [contest.run(*contest.setting(method, batch), seed) for seed in SEEDS]
                    noise[batch] = statistics.median(run["noise_scale"] for run in runs)
            except OutOfBudget:
                continue
    return Figures(target, steps, noise)


def critical_batch(best: Mapping[int, float]) -> tuple[float, float] | None:
    """(least steps, critical batch) of the fit with the least relative errors; None where the points give none."""
    import numpy as np
    from scipy.optimize import nnls

    if len(best) < 3:
        return None
    rows = np.array([[1 / steps, 1 / (batch * steps)] for batch, steps in best.items()])
    scale = rows.max(axis=0)
    least, slope = nnls(rows / scale, np.ones(len(rows)))[0] / scale
    return (float(least), float(slope / least)) if least > 0 else None


def table(found: Figures) -> str:
    """Markdown: the steps of every seed, by method and batch."""
    lines = [
        "| method | " + " | ".join(f"batch {batch:,}" for batch in BATCHES) + " |",
        "|---" * (len(BATCHES) + 1) + "|",
    ]
    for method, of_method in found.steps.items():
        cells = [listed(of_method[batch]) if batch in of_method else "" for batch in BATCHES]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    said = [
        f"Target: {found.target:.2%} of the test images. Every seed's steps to it, at the setting that tuning chose."
    ]
    if fit := critical_batch(found.best):
        said.append(f"Critical batch, by the fit of the best method's steps: {fit[1]:,.0f} images.")
    if found.noise:
        seen = ", ".join(f"{noise:,.0f} at {batch:,}" for batch, noise in found.noise.items())
        said.append(f"Noise scale that AdaScale saw, in images: {seen}.")
    return "\n".join([*lines, "", " ".join(said)])


def draw(found: Figures, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    matplotlib.rcParams |= {"svg.hashsalt": "optim", "svg.fonttype": "none"}  # the same file from the same runs
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for method, of_method in found.steps.items():
        colour, style, marker = STYLES[method]
        points = [(batch, median(steps)) for batch, steps in sorted(of_method.items())]
        points = [(batch, steps) for batch, steps in points if steps < float("inf")]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker=marker, label=method)
        for batch, steps in of_method.items():
            reached = [each for each in steps if each is not None]
            axes.plot([batch] * len(reached), reached, color=colour, linestyle="none", marker=marker, markersize=3)
    if fit := critical_batch(found.best):
        batches = [BATCH * 2 ** (index / 4) for index in range(25)]
        axes.plot(batches, [fit[0] * (1 + fit[1] / batch) for batch in batches], color="0.6", linewidth=4, zorder=0)
        axes.axvline(fit[1], color="0.4", linestyle=":")
        axes.annotate(
            f"critical batch {fit[1]:,.0f} ", (fit[1], 0.97), xycoords=("data", "axes fraction"), va="top", ha="right"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(
        xlabel="batch, images", ylabel="steps to the target", title=f"Steps to {found.target:.2%} on Fashion-MNIST"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(argv: Sequence[str]) -> int:
    runs = resumable("optim").parse_args(argv).runs
    found = figures(runs / "images")
    if found is None:
        print(f"{runs}: no target yet; make the runs with `python -m benchmarks.optim --only optim.images`")
        return 1
    draw(found, PICTURE)
    block = f"![Steps to the target over the batch](../pictures/{PICTURE.name})\n\n{table(found)}"
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{block}\n{END}{rest.partition(END)[2]}")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
