"""The main figures of a run, derived once for the page, the comparison and the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from shoestring.report import history_file
from shoestring.report.reading import RunFolder, number, table, tables

STATUSES = {"finished": "✓", "stopped": "■", "failed": "✕"}
UNFINISHED = "unfinished"


def name(run: RunFolder) -> str:
    """The name that the run file gives, or else the folder's name."""
    given = run.summary.get("name") or table(run.settings, "run").get("name") or started(run).get("name")
    return str(given) if given else run.path.resolve().name


def status(run: RunFolder) -> str:
    """finished, stopped or failed, as the run's history says, else its summary; `UNFINISHED` where neither does."""
    if history_file.cause(run.history):
        return "failed"
    if history_file.lost(run.history):
        return UNFINISHED
    return str(run.summary.get("status", UNFINISHED))


def total_steps(run: RunFolder) -> int | None:
    """The steps that the run has or was to have; None where they are not known, as in a run of some minutes."""
    given = _finite(run.summary.get("total_steps"))
    if given is None and not table(run.settings, "run").get("minutes"):
        given = _finite(table(run.settings, "run").get("steps"))
    return int(given) if given and given < 1e15 else None


def started(run: RunFolder) -> dict[str, Any]:
    """What the newest start says of the run: its name, ranks and parameters."""
    return next((event for event in reversed(run.history) if event["event"] == "started"), {})


def last_step(run: RunFolder) -> int:
    """The last step that was logged or summed up."""
    logged = max((max(column) for column in run.columns.values() if column), default=0)
    return max(logged, int(_finite(run.summary.get("steps")) or 0))


def seconds(run: RunFolder) -> float | None:
    """Wall-clock seconds of the run's newest start: the summary's, else between the first and the last metrics."""
    if (summed := _finite(run.summary.get("seconds"))) is not None:
        return summed
    since = _finite(started(run).get("time")) or -math.inf
    times = [value for value in run.columns.get("time", {}).values() if math.isfinite(value) and value >= since]
    return max(times) - min(times) if len(times) > 1 else None


def _whole_time(run: RunFolder) -> float | None:
    """Of all starts."""
    newest = seconds(run)
    return None if newest is None else newest + history_file.spent_before(run.history)


def counted(run: RunFolder) -> str:
    """What the run's loss is a mean over and its speed counts: "token", or "sample" as of images."""
    return "sample" if "samples_per_second" in run.columns else "token"


def results(run: RunFolder) -> dict[str, float]:
    """Final figures by their readable name, in the order a reader wants them; what is unknown is left out."""
    bits, each = table(run.summary, "bits_per_byte"), counted(run)
    figures = {
        "held-out bits per byte": _given(bits, "held out", _last(run, "held_out_bits_per_byte")),
        "training bits per byte": _given(bits, "training", _last(run, "bits_per_byte")),
        f"held-out loss (nats per {each})": _last(run, "held_out_loss"),
        f"training loss (nats per {each})": _last(run, "loss"),
        "tokens per second (median)": _reduce(run, "tokens_per_second", median),
        "samples per second (median)": _reduce(run, "samples_per_second", median),
        "share of time waiting for data (median)": _reduce(run, "data_wait", median),
        "MFU (median)": _reduce(run, "mfu", median),
        "memory at peak (GiB)": _peak_memory(run),
        "steps": float(last_step(run)) or None,
        f"{each}s": _given(run.summary, "tokens", _last(run, "tokens")),
        "time": _whole_time(run),
        "parameters": _given(run.summary, "parameters", _finite(started(run).get("parameters"))),
        "ranks": _finite(started(run).get("ranks")),
    }
    return {label: value for label, value in figures.items() if value is not None}


def baselines(run: RunFolder) -> dict[str, float]:
    """Bits per byte of each baseline on the same held-out text."""
    given = ((str(label), _finite(value)) for label, value in table(run.summary, "baselines").items())
    return {label: value for label, value in given if value is not None}


def verdict(run: RunFolder) -> str:
    """One sentence: which baselines the held-out figure beats and which it does not."""
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


def tokens_at(run: RunFolder, step: int) -> float | None:
    """Tokens seen by `step`: as logged, else in proportion to the summary's total."""
    if "tokens" in run.columns:
        return _finite(run.columns["tokens"].get(step))
    tokens, steps = _finite(run.summary.get("tokens")), _finite(run.summary.get("steps"))
    return step * tokens / steps if tokens and steps else None


def _join(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _finite(value: object) -> float | None:
    figure = number(value)
    return figure if figure is not None and math.isfinite(figure) else None


def _given(document: dict[str, Any], key: str, otherwise: float | None) -> float | None:
    figure = _finite(document.get(key))
    return otherwise if figure is None else figure


def _last(run: RunFolder, key: str) -> float | None:
    """The last value as it is, NaN included: a run that diverged must not look as if it had not."""
    return next(reversed(run.columns.get(key, {}).values()), None)


def _reduce(run: RunFolder, key: str, reduce: Callable[[Iterable[float]], float]) -> float | None:
    values = [value for value in run.columns.get(key, {}).values() if math.isfinite(value)]
    return reduce(values) if values else None


def _peak_memory(run: RunFolder) -> float | None:
    ranks = [_finite(rank.get("memory_gib")) for rank in tables(run.summary, "ranks")]
    known = [figure for figure in ranks if figure is not None]
    return max(known) if known else _reduce(run, "memory_gib", max)


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """What tells the runs apart, as briefly as possible: their names, else the ends of their paths that differ."""
    names = [name(run) for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.path.resolve().parts for run in runs]
    while len({parts[-1] for parts in paths}) == 1 and all(len(parts) > 2 for parts in paths):  # all end in `run`, say
        paths = [parts[:-1] for parts in paths]
    for length in range(1, max(map(len, paths))):
        ends = ["/".join(parts[-length:]) for parts in paths]
        if len(set(ends)) == len(ends):
            return ends
    return ["/".join(parts) for parts in paths]
