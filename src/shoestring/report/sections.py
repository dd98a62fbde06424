"""The written parts of the report page, each a function from a run folder to markup (empty when there is nothing)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

from shoestring.report import digest, figures, history_file
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid
from shoestring.report.reading import RunFolder, flat, number, table, tables

_SHOWN_RANKS = 8  # more than this and the table of what ran where shows the least and the most instead of each


def heading(run: RunFolder) -> Markup:
    """Name, status with its message, and when and where it ran."""
    state = digest.status(run)
    badge = tag("span", f"{digest.STATUSES.get(state, '…')} {state}", class_="badge", data_status=state)
    message = str(run.summary.get("message") or "")
    if state == digest.UNFINISHED:
        message = f"The run is still training, or it was killed. The last step seen is {digest.last_step(run):,}."
    started, host = (str(run.environment.get(key) or "") for key in ("started", "host"))
    origin = " · ".join(part for part in (started and f"started {started}", host and f"on {host}") if part)
    return tag(
        "div",
        tag("h1", digest.name(run)),
        tag("p", badge, " ", tag("span", message)),
        tag("p", origin, class_="quiet") if origin else "",
        class_="title",
    )


def failure(run: RunFolder) -> Markup:
    """Why the run failed: what went wrong, on which rank, after which step, and what to do."""
    event = history_file.cause(run.history)
    if event is None:
        return Markup()
    if event["event"] == "lost":
        message = (
            "The processes ended without being able to write why: they were killed (by SIGKILL, by the system's "
            "out-of-memory killer or by a scheduler), or the machine went down. The next start found this."
        )
    else:
        message = str(event.get("message", ""))
    others = [other for other in history_file.newest(run.history) if other["event"] == "failed" and other is not event]
    facts_ = {
        "After step": f"{int(number(event.get('step')) or 0):,}",
        "Rank": f"{event.get('rank', '?')} on {event.get('host', 'an unknown host')}",
        "Found" if event["event"] == "lost" else "Time": _moment(event.get("time")),
        "Ranks that failed too": ", ".join(str(other.get("rank", "?")) for other in others[:_SHOWN_RANKS]),
    }
    calls = str(event.get("traceback") or "")
    resumable = (run.path / "checkpoints").is_dir() and any((run.path / "checkpoints").iterdir())
    hints = [
        str(event.get("hint") or ""),
        "Continue from the newest checkpoint with --resume auto." if resumable else "",
    ]
    return tag(
        "section",
        tag("h2", "Why the run failed"),
        tag("p", message, class_="reason"),
        *(tag("p", hint) for hint in hints if hint),
        _strip(facts_),
        tag("details", tag("summary", "Traceback"), tag("pre", calls, tabindex=0)) if calls else "",
        class_="failure",
    )


def starts(run: RunFolder) -> Markup:
    """Every start and end, where the run was started more than once."""
    if sum(event["event"] == "started" for event in run.history) < 2:
        return Markup()
    rows = [
        [
            _moment(event.get("time")),
            event["event"],
            "–" if event["event"] == "started" else f"{int(number(event.get('step')) or 0):,}",
            f"{event.get('rank', '?')} on {event.get('host', '?')}",
            str(event.get("message", "")),
        ]
        for event in run.history
    ]
    head = ["Time", "Event", "Step", "Rank", "Message"]
    return _section("Starts and ends", grid("From history.jsonl, oldest first", head, rows, stacked=True))


def _moment(seconds: object) -> str:
    """A point in time as the reader's clock shows it, without fractions of a second."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(number(seconds)))
    except (OverflowError, ValueError, OSError):
        return "unknown"


def headline(run: RunFolder) -> Markup:
    """The most important figure of the run, next to its baselines."""
    found = digest.results(run)
    title = next((label for label in found if "bits per byte" in label or "loss" in label), "")
    if not title:
        return tag("p", "No loss has been logged yet.", class_="quiet")
    number_ = tag("div", tag("span", figures.plain(found[title]), class_="number"), tag("span", title, class_="of"))
    verdict = digest.verdict(run)
    return tag(
        "section",
        tag("div", number_, tag("p", verdict, class_="verdict") if verdict else "", class_="lead"),
        _bars(run, found) if "bits per byte" in title else "",
        class_="headline",
        aria_label="Result",
    )


def _bars(run: RunFolder, found: dict[str, float]) -> Markup:
    ours = {"ours": ("this run, held out", "held-out"), "training": ("this run, training", "training")}
    own = [(label, found.get(f"{part} bits per byte"), kind) for kind, (label, part) in ours.items()]
    known = [(label, value, kind) for label, value, kind in own if value is not None and math.isfinite(value)]
    known += [(label, value, "baseline") for label, value in digest.baselines(run).items()]
    most = max((value for _, value, _ in known), default=0.0)
    rows = [
        tag(
            "tr",
            tag("th", label, scope="row"),
            tag("td", bar(value / most if most > 0 else 0, kind), class_="bar"),
            tag("td", f"{value:.3f}", class_="figure"),
            class_=kind,
        )
        for label, value, kind in sorted(known, key=lambda row: row[1])
    ]
    return (
        tag("table", tag("caption", "Bits per byte; lower is better"), tag("tbody", *rows), class_="bars")
        if rows
        else Markup()
    )


def bar(share: float, kind: str = "share") -> Markup:
    """A bar of `share` (0 to 1) of its cell; drawn as SVG so that it prints."""
    width = f"{100 * min(max(share, 0.0), 1.0):.2f}%"
    return tag("svg", tag("rect", width=width, height="100%", rx=2), class_=f"meter {kind}", aria_hidden="true")


def facts(run: RunFolder) -> Markup:
    """Steps, tokens, time, size, speed and memory in one strip."""
    found, each = digest.results(run), digest.counted(run)
    total, ranks = digest.total_steps(run), len(tables(run.summary, "ranks"))
    steps = f"{digest.last_step(run):,}" + (f" of {total:,}" if total else "")
    shown = {
        "Steps": steps,
        f"{each.capitalize()}s": _optional(found.get(f"{each}s"), figures.count),
        "Time": _optional(found.get("time"), figures.duration),
        "Parameters": _optional(found.get("parameters"), figures.count),
        "Tokens per second": _optional(found.get("tokens per second (median)"), figures.count),
        "Samples per second": _optional(found.get("samples per second (median)"), figures.count),
        "MFU": _optional(found.get("MFU (median)"), figures.percent),
        "Memory at peak": _optional(found.get("memory at peak (GiB)"), lambda gib: f"{gib:.3g} GiB"),
        "Waiting for data": _optional(found.get("share of time waiting for data (median)"), figures.percent),
        "Ranks": str(ranks or digest.started(run).get("ranks") or ""),
    }
    return _strip(shown)


def _strip(shown: dict[str, str]) -> Markup:
    pairs = [tag("div", tag("dt", label), tag("dd", value)) for label, value in shown.items() if value]
    return tag("dl", *pairs, class_="facts")


def where(run: RunFolder) -> Markup:
    """The table of spans: each kind of work with its count, time, share and bytes, and the time on each rank."""
    spans: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for position, trace in enumerate(run.traces):
        for total in tables(trace, "totals"):
            spans.setdefault((str(total.get("kind", "")), str(total.get("name", ""))), {})[position] = total
    if not spans:
        return Markup()
    ranks = [_rank(trace) for trace in run.traces]
    each = len(ranks) <= _SHOWN_RANKS
    length = digest.seconds(run) or 0.0
    order = sorted(spans.items(), key=lambda item: -_mean(item[1].values(), "seconds", len(ranks)))
    rows = [_span(name, kind, by_rank, len(ranks), each, length) for (kind, name), by_rank in order]
    columns = [] if len(ranks) == 1 else ranks if each else ["least", "most"]
    head = ["Name", "Kind", "Share of the run", "Count", "Bytes", "Seconds", *columns]
    note = (
        "Counts, bytes and seconds are means over the ranks; the columns after them are the seconds of each. "
        "Spans can lie inside one another, so shares may add up to more than 100%."
    )
    return _section("What ran where", tag("p", note, class_="quiet"), grid("Longest first", head, rows, figures=3))


def _rank(trace: dict[str, Any]) -> str:
    host = f" on {trace['host']}" if trace.get("host") else ""
    return f"rank {trace.get('rank', '?')}{host}"


def _span(name: str, kind: str, by_rank: dict[int, dict[str, Any]], ranks: int, each: bool, length: float) -> list[str]:
    spent = [number(by_rank.get(rank, {}).get("seconds")) or 0.0 for rank in range(ranks)]
    mean = sum(spent) / ranks
    share = mean / length if length > 0 else 0.0
    meter = tag("div", bar(share, kind), figures.percent(share), class_="share") if length > 0 else "unknown"
    nbytes = _mean(by_rank.values(), "bytes", ranks)
    times = figures.count(_mean(by_rank.values(), "count", ranks))
    cells = [name, kind, meter, times, figures.size(nbytes) if nbytes else "–", _seconds(mean)]
    if ranks == 1:
        return cells
    return cells + [_seconds(value) for value in (spent if each else (min(spent), max(spent)))]


def reductions(run: RunFolder) -> Markup:
    """A line for what each feature cut and what that cost."""
    lines = [reduction(row) for row in tables(run.summary, "reductions")]
    return (
        _section(
            "What features cut, and what it cost", tag("ul", *(tag("li", line) for line in lines), class_="reductions")
        )
        if lines
        else Markup()
    )


def reduction(row: dict[str, Any]) -> str:
    """What one feature cut, as a sentence; `unit` starting with "bytes" gets readable sizes."""
    unit, feature = str(row.get("unit", "")), str(row.get("feature", "a feature"))
    used, without = number(row.get("used")), number(row.get("without"))
    cost = f"; costs: {row['cost']}" if row.get("cost") else ""
    how = "measured" if row.get("measured") else "computed, not measured"
    if used is None or without is None:
        return f"{feature}: {unit} unknown{cost}"
    show = figures.size if unit.startswith("bytes") else figures.plain
    change = f"{show(used)} instead of {show(without)}, {how}{cost}"
    if not without > 0 or used != used:
        return f"{feature}: {unit} {change}"
    share = 1 - used / without
    verb = "cut" if share >= 0 else "raised"
    return f"{feature} {verb} {unit} by {figures.percent(abs(share))}: {change}"


def feature_tables(run: RunFolder) -> Markup:
    """The tables that features add."""
    parts = []
    for row in tables(run.summary, "report_items"):
        if row.get("as") == "table":
            title, note = str(row.get("title", "")), str(row.get("note", ""))
            head = [str(cell) for cell in _list(row.get("head"))]
            lines = [zip_longest(_list(line), head[: len(_list(line))]) for line in _list(row.get("rows"))]
            rows = [[_cell(cell, of) for cell, of in line] for line in lines]
            caption = f"By {row.get('feature', 'a feature')}"
            parts.append(
                _section(title, tag("p", note, class_="quiet") if note else "", grid(caption, head, rows, figures=1))
            )
    return join(parts)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def features(run: RunFolder) -> Markup:
    """The table of features: seams, reason and settings of each."""
    rows = [
        [str(row.get("name", "")), ", ".join(map(str, row.get("seams") or [])), str(row.get("why", "")), _settings(row)]
        for row in tables(run.summary, "features")
    ]
    return (
        _section(
            "Features",
            grid("In the order in which they were applied", ["Name", "Seam", "Why", "Settings"], rows, stacked=True),
        )
        if rows
        else Markup()
    )


def ranks(run: RunFolder) -> Markup:
    """The table of ranks: host, device, data type, threads, speed and memory of each."""
    keys = ("rank", "host", "device", "dtype", "threads", "tokens_per_second", "memory_gib")
    rows = [[_cell(row.get(key)) for key in keys] for row in tables(run.summary, "ranks")]
    speed = f"{digest.counted(run).capitalize()}s per second"
    head = ["Rank", "Host", "Device", "Data type", "Threads", speed, "Memory, GiB"]
    return _section("Ranks", grid("One row per process", head, rows, figures=4)) if rows else Markup()


def samples(run: RunFolder) -> Markup:
    """Generated text: the prompt marked, the rest as it came."""
    shown = [
        tag("figure", tag("pre", tag("mark", str(row.get("prompt", ""))), str(row.get("text", "")), tabindex=0))
        for row in tables(run.summary, "samples")
    ]
    note = tag("p", "The prompt is marked; the model wrote the rest.", class_="quiet")
    return _section("Samples", note, tag("div", *shown, class_="samples")) if shown else Markup()


def notes(run: RunFolder) -> Markup:
    """The run's notes, and the files of the folder that could not be read."""
    given = run.summary.get("notes")
    lines = [str(note) for note in given] if isinstance(given, list) else []
    lines += run.problems
    return _section("Notes", tag("ul", *(tag("li", line) for line in lines))) if lines else Markup()


def pages(run: RunFolder) -> Markup:
    """Links to the other pages that features wrote to the run's folder."""
    names = sorted(path.name for path in run.path.glob("*.html") if path.name != "report.html")
    links = [tag("li", tag("a", name, href=quote(name))) for name in names]
    return _section("Other pages of this run", tag("ul", *links)) if links else Markup()


def documents(run: RunFolder) -> Markup:
    """The resolved run file and the environment, key by key."""
    parts = [
        tag(
            "details",
            tag("summary", title),
            grid(caption, ["Key", "Value"], list(flat(document).items())),
        )
        for title, caption, document in (
            ("Settings", "The resolved run file, run.toml", run.settings),
            ("Environment", "Versions, source, command and host, environment.json", run.environment),
        )
        if document
    ]
    return _section("Settings and environment", *parts) if parts else Markup()


def _section(title: str, *children: str) -> Markup:
    return tag("section", tag("h2", title), *children)


def _optional(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _mean(totals: Iterable[dict[str, Any]], key: str, ranks: int) -> float:
    return sum(number(total.get(key)) or 0.0 for total in totals) / max(ranks, 1)


def _seconds(value: float) -> str:
    return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"


def _settings(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in flat(table(row, "settings")).items()) or "defaults"


def _cell(value: object, head: str | None = "") -> str:
    figure = number(value)
    if value is None or figure is None:
        return "–" if value is None else str(value)
    return figures.size(figure) if str(head).lower().endswith("bytes") else figures.plain(figure)
