"""Curves of the contest as pictures: held-out loss over steps, and over time at each rate.

The runs are those of the bars; each is drawn up to where it had DDP's last loss, or was given no more steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comm.contest import RATES, Contest, there
from benchmarks.comm.curves import smoothed
from benchmarks.comm.families import PEERS
from benchmarks.comm.figure import Figure
from benchmarks.comm.methods import Method
from benchmarks.machine import ROOT
from benchmarks.styles import STYLES

PICTURES = ROOT / "docs" / "pictures"
STEPS_OF = "10mbit"
"""The rate whose choice of peers is drawn over steps."""
PEERS_STYLES, OUR_STYLES = (*STYLES[:5], STYLES[8]), STYLES[5:8]  # ours are drawn thick


def draw(contest: Contest, folder: Path = PICTURES) -> list[Path]:
    """Draw all pictures; runs that the bars have not made yet are made."""
    folder.mkdir(parents=True, exist_ok=True)
    peers, ours = {rate: best_peers(contest, rate) for rate in RATES}, {rate: contest.ours(rate) for rate in RATES}
    theirs = [figure.method for figure in peers[STEPS_OF] if figure.method.kind != "bf16"]
    best = list({figures[0].method.name: figures[0].method for figures in ours.values()}.values())
    others, own = ([(each.name, *points(contest, each, float)) for each in side] for side in (theirs, best))
    drawn = [picture(others, own, "steps", "Held-out loss over steps", folder / "comm-loss-steps.png")]
    for rate in RATES:
        short = rate.removesuffix("mbit")
        others, own = ([minutes(contest, figure) for figure in side[rate]] for side in (peers, ours))
        title = f"Held-out loss over time, four hosts at {short} Mbit/s"
        drawn.append(picture(others, own, "minutes", title, folder / f"comm-loss-time-{short}.png", log=True))
    return drawn


def best_peers(contest: Contest, rate: str) -> list[Figure]:
    """DDP, the best of each family of peers that is installed, and DDP's bf16 hook; DDP with the better buckets."""
    dense = contest.dense_figures(rate)
    ddp, bf16 = (max((f for f in dense if f.method.kind == kind), key=lambda f: f.value) for kind in ("ddp", "bf16"))
    return [ddp, *(contest.best(family, rate) for family in there(PEERS)), bf16]


def minutes(contest: Contest, figure: Figure) -> tuple[str, Any, Any]:
    """A line over time at its rate."""
    seconds, losses = points(contest, figure.method, figure.pace.elapsed)
    return figure.method.name, seconds / 60, losses


def points(contest: Contest, method: Method, place: Callable[[float], float]) -> tuple[Any, Any]:
    """The smoothed curve, the mean over seeds; `place` gives the place of a step on the axis."""
    curves = [smoothed(contest.curve(contest.learner(method), seed)) for seed in contest.sizes.seeds]
    shared = min(len(steps) for steps, _ in curves)
    return np.array([place(step) for step in curves[0][0][:shared]]), sum(
        losses[:shared] for _, losses in curves
    ) / len(curves)


def picture(
    peers: Sequence[tuple[str, Any, Any]],
    ours: Sequence[tuple[str, Any, Any]],
    axis: str,
    title: str,
    path: Path,
    *,
    log: bool = False,
) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for lines, styles, width in ((peers, PEERS_STYLES, 1.2), (ours, OUR_STYLES, 2.5)):
        for (name, x, y), (colour, style, marker) in zip(lines, styles, strict=False):
            axes.plot(
                x[x > 0], y[x > 0], color=colour, linestyle=style, linewidth=width, marker=marker, markersize=width + 4,
                markevery=4, label=name,
            )  # fmt: skip
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=axis, ylabel="held-out loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=9, loc="outside right upper")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path
