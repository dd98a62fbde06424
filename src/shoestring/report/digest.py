"""The main figures of a run, computed in one place for the page, the comparison and the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from shoestring.report import history_file
from shoestring.report.reading import RunFolder, number, table, tables, values_at

STATUSES = {"finished": "✓", "stopped": "■", "failed": "✕"}
UNFINISHED = "unfinished"


def name(run: RunFolder) -> str:
    """The run's name in the run file, or else the name of its folder."""
    title = run.summary.get("name") or table(run.settings, "run").get("name") or started(run).get("name")
    return str(title) if title else run.path.resolve().name


def status(run: RunFolder) -> str:
    """How the run ended, by its history or else its summary: finished, stopped or failed; `UNFINISHED` if unknown."""
    if history_file.cause(run.history):
        return "failed"
    if history_file.lost(run.history):
        return UNFINISHED
    return str(run.summary.get("status", UNFINISHED))


def total_steps(run: RunFolder) -> int | None:
    """The planned number of steps; None if unknown, as in a run limited by `run.minutes`."""
    steps = _finite(run.summary.get("total_steps"))
    if steps is None and not table(run.settings, "run").get("minutes"):
        steps = _finite(table(run.settings, "run").get("steps"))
    return int(steps) if steps and steps < 1e15 else None


def started(run: RunFolder) -> dict[str, Any]:
    """The newest `started` event of the history, with the run's name, ranks and parameters; {} if there is none."""
    return next((event for event in reversed(run.history) if event["event"] == "started"), {})


def last_step(run: RunFolder) -> int:
    """The number of the last step in the metrics or the summary; 0 if there is none."""
    logged = max((int(next(reversed(column))) for column in run.columns.values() if column), default=0)
    return max(logged, int(_finite(run.summary.get("steps")) or 0))


def seconds(run: RunFolder) -> float | None:
    """Wall-clock seconds since the newest start, by the summary or else by the times of this start's metrics."""
    if (total := _finite(run.summary.get("seconds"))) is not None:
        return total
    since = _finite(started(run).get("time")) or -math.inf
    times = [value for value in run.columns.get("time", {}).values() if math.isfinite(value) and value >= since]
    return max(times) - min(times) if len(times) > 1 else None


def counted(run: RunFolder) -> str:
    """The unit of the run's loss and speed: "token", or "sample" (of images, for instance)."""
    return "sample" if "samples_per_second" in run.columns else "token"


def results(run: RunFolder) -> dict[str, float]:
    """Final metrics by readable name, the most important first; unknown metrics are left out."""
    bits, unit = table(run.summary, "bits_per_byte"), counted(run)
    newest = seconds(run)
    memory = [_finite(rank.get("memory_gib")) for rank in tables(run.summary, "ranks")]
    peak = max((figure for figure in memory if figure is not None), default=None)
    figures = {
        "held-out bits per byte": _get(bits, "held out", _last(run, "held_out_bits_per_byte")),
        "training bits per byte": _get(bits, "training", _last(run, "bits_per_byte")),
        f"held-out loss (nats per {unit})": _last(run, "held_out_loss"),
        f"training loss (nats per {unit})": _last(run, "loss"),
        "tokens per second (median)": _reduce(run, "tokens_per_second", median),
        "samples per second (median)": _reduce(run, "samples_per_second", median),
        "share of time waiting for data (median)": _reduce(run, "data_wait", median),
        "MFU (median)": _reduce(run, "mfu", median),
        "memory at peak (GiB)": _reduce(run, "memory_gib", max) if peak is None else peak,
        "steps": float(last_step(run)) or None,
        f"{unit}s": _get(run.summary, "tokens", _last(run, "tokens")),
        "time": None if newest is None else newest + history_file.spent_before(run.history),
        "parameters": _get(run.summary, "parameters", _finite(started(run).get("parameters"))),
        "ranks": _finite(started(run).get("ranks")),
    }
    return {label: value for label, value in figures.items() if value is not None}


def baselines(run: RunFolder) -> dict[str, float]:
    """Bits per byte of each baseline on the same held-out text."""
    values = {str(label): _finite(value) for label, value in table(run.summary, "baselines").items()}
    return {label: value for label, value in values.items() if value is not None}


def verdict(run: RunFolder) -> str:
    """A sentence that says which baselines the held-out figure beats and which it does not."""
    ours = results(run).get("held-out bits per byte")
    known = baselines(run)
    if ours is None or not known:
        return ""
    better = [label for label, value in known.items() if ours < value]
    worse = [label for label, value in known.items() if ours >= value]
    parts = [f"better than {_join(better)}"] if better else []
    parts += [f"not better than {_join(worse)}"] if worse else []
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def tokens_at(run: RunFolder, steps: Sequence[int]) -> list[float | None]:
    """Number of training tokens up to each step: as logged, or else estimated from the total in the summary."""
    if "tokens" in run.columns:
        return [value if math.isfinite(value) else None for value in values_at(run.columns["tokens"], steps).tolist()]
    tokens, total = _finite(run.summary.get("tokens")), _finite(run.summary.get("steps"))
    return [step * tokens / total if tokens and total else None for step in steps]


def _join(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _finite(value: object) -> float | None:
    figure = number(value)
    return figure if figure is not None and math.isfinite(figure) else None


def _get(document: dict[str, Any], key: str, default: float | None) -> float | None:
    figure = _finite(document.get(key))
    return default if figure is None else figure


def _last(run: RunFolder, key: str) -> float | None:
    """The last value of a metric, which may be NaN, so that a diverged run is recognized."""
    return next(reversed(run.columns.get(key, {}).values()), None)


def _reduce(run: RunFolder, key: str, reduce: Callable[[Iterable[float]], float]) -> float | None:
    values = [value for value in run.columns.get(key, {}).values() if math.isfinite(value)]
    return reduce(values) if values else None


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """The shortest labels that distinguish the runs: their names, or else the ends of their paths."""
    names = [name(run) for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.path.resolve().parts for run in runs]
    while len({parts[-1] for parts in paths}) == 1 and all(len(parts) > 2 for parts in paths):  # such as `run`
        paths = [parts[:-1] for parts in paths]
    for length in range(1, max(map(len, paths))):
        ends = ["/".join(parts[-length:]) for parts in paths]
        if len(set(ends)) == len(ends):
            return ends
    return ["/".join(parts) for parts in paths]
