"""Curves of the contest as pictures: held-out loss over steps, and over time at each rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.comm.contest import LOCAL, PEERS, PER_STEP, RATES, Contest
from benchmarks.comm.curves import smoothed
from benchmarks.comm.methods import BF16, Method
from benchmarks.comm.peers import has_epfml
from benchmarks.machine import ROOT

PICTURES = ROOT / "docs" / "pictures"
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


def contenders(contest: Contest, rate: str) -> list[Method]:
    """DDP and its bf16 hook, the peers and ours, as chosen at a rate."""
    families = [family for family in (*PEERS, PER_STEP, LOCAL) if family.bases[0].kind != "epfml" or has_epfml()]
    chosen = [contest.chosen(family, rate) for family in families]
    return [contest.dense, BF16.at(contest.dense.lr), *chosen]


def draw(contest: Contest, folder: Path = PICTURES) -> list[Path]:
    """Draw all pictures; the runs must be there."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [over_steps(contest, folder / "comm-loss-steps.png")]
    drawn += [over_time(contest, rate, folder / f"comm-loss-time-{rate.removesuffix('mbit')}.png") for rate in RATES]
    return drawn


def over_steps(contest: Contest, path: Path) -> Path:
    methods = list(dict.fromkeys(method.name for rate in RATES for method in contenders(contest, rate)))
    known = {method.name: method for rate in RATES for method in contenders(contest, rate)}
    lines = [(name, *points(contest, known[name], 1.0)) for name in methods if known[name].kind != "bf16"]
    return picture(lines, "steps", "Held-out loss over steps", path)


def over_time(contest: Contest, rate: str, path: Path) -> Path:
    lines = []
    for method in contenders(contest, rate):
        curve = contest.dense if method.kind == "bf16" else method
        lines.append((method.name, *points(contest, curve, contest.slow(method, rate)[1] / 60)))
    short = rate.removesuffix("mbit")
    return picture(lines, "minutes", f"Held-out loss over time, four hosts at {short} Mbit/s", path, log=True)


def points(contest: Contest, method: Method, scale: float) -> tuple[Any, Any]:
    """The smoothed curve, the mean over seeds, with `scale` of the axis a step."""
    seeds = contest.sizes.seeds[: len(contest.shares(method))]
    curves = [smoothed(contest.curve(method, seed)) for seed in seeds]
    both = min(len(steps) for steps, _ in curves)
    return curves[0][0][:both] * scale, sum(losses[:both] for _, losses in curves) / len(curves)


def picture(lines: Sequence[tuple[str, Any, Any]], axis: str, title: str, path: Path, *, log: bool = False) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, (name, x, y) in enumerate(lines):
        colour, style, marker = STYLES[index % len(STYLES)]
        keep = x > 0
        axes.plot(x[keep], y[keep], color=colour, linestyle=style, marker=marker, markersize=4, markevery=3, label=name)
    if log:
        axes.set_xscale("log")
    axes.set(xlabel=axis, ylabel="held-out loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path
