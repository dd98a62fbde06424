"""Curves of the contest as pictures: held-out loss over steps, and over time at each rate.

The runs are those of the bars; each is drawn up to where it had DDP's last loss, or was given no more steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comm.contest import RATES, Contest
from benchmarks.comm.curves import smoothed
from benchmarks.comm.figure import Figure
from benchmarks.comm.methods import Method
from benchmarks.machine import ROOT

PICTURES = ROOT / "docs" / "pictures"
KINDS = ("ddp", "bf16", "torch", "epfml", "ours")
# Told apart without colour as well; the colours are Okabe and Ito's, for all kinds of sight.
STYLES = (
    ("#000000", "-", "o"),
    ("#E69F00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#CC79A7", ":", "D"),
    ("#56B4E9", "--", "v"),
    ("#0072B2", "-", "P"),
    ("#D55E00", "-", "X"),
)


def draw(contest: Contest, folder: Path = PICTURES) -> list[Path]:
    """Draw all pictures; runs that the bars have not made yet are made."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {rate: contenders(contest, rate) for rate in RATES}
    methods = {figure.method.name: figure.method for of_rate in figures.values() for figure in of_rate}
    lines = [(name, *points(contest, method, float)) for name, method in methods.items() if method.kind != "bf16"]
    drawn = [picture(lines, "steps", "Held-out loss over steps", folder / "comm-loss-steps.png")]
    for rate, of_rate in figures.items():
        short = rate.removesuffix("mbit")
        lines = [(each.method.name, *points(contest, each.method, each.pace.elapsed)) for each in of_rate]
        lines = [(name, seconds / 60, losses) for name, seconds, losses in lines]
        title = f"Held-out loss over time, four hosts at {short} Mbit/s"
        drawn.append(picture(lines, "minutes", title, folder / f"comm-loss-time-{short}.png", log=True))
    return drawn


def contenders(contest: Contest, rate: str) -> list[Figure]:
    """All peers and ours, as chosen at a rate; DDP and its bf16 hook first, so that they keep their colours."""
    peers = sorted(contest.peers(rate), key=lambda figure: KINDS.index(figure.method.kind))
    return [*peers, *contest.ours(rate)]


def points(contest: Contest, method: Method, place: Callable[[float], float]) -> tuple[Any, Any]:
    """The smoothed curve, the mean over seeds; `place` gives the place of a step on the axis."""
    curves = [smoothed(contest.curve(contest.learner(method), seed)) for seed in contest.sizes.seeds]
    shared = min(len(steps) for steps, _ in curves)
    return np.array([place(step) for step in curves[0][0][:shared]]), sum(
        losses[:shared] for _, losses in curves
    ) / len(curves)


def picture(lines: Sequence[tuple[str, Any, Any]], axis: str, title: str, path: Path, *, log: bool = False) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, (name, x, y) in enumerate(lines):
        colour, style, marker = STYLES[index % len(STYLES)]
        keep = x > 0
        axes.plot(x[keep], y[keep], color=colour, linestyle=style, marker=marker, markersize=4, markevery=3, label=name)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=axis, ylabel="held-out loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path
