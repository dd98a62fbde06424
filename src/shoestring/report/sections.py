"""The sections of the report page: each function turns a run folder into markup, or returns empty markup."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

from shoestring import figures
from shoestring.report import digest, history_file
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid
from shoestring.report.reading import RunFolder, flat, number, table, tables

_SHOWN_RANKS = 8  # with more ranks, the table of spans shows only the shortest and longest time


def heading(run: RunFolder) -> Markup:
    """The run's name, its status and message, and when and where it ran."""
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
    """Why the run failed: the error, the rank and step at which it occurred, and what to do."""
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
    """Every start and end of the run; empty if it was started only once."""
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
    return section("Starts and ends", grid("From history.jsonl, oldest first", head, rows, stacked=True))


def _moment(seconds: object) -> str:
    """Format a time in the local time zone, without fractions of a second."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(number(seconds)))
    except (OverflowError, ValueError, OSError):
        return "unknown"


def headline(run: RunFolder) -> Markup:
    """The most important figure of the run, compared with its baselines."""
    results = digest.results(run)
    title = next((label for label in results if "bits per byte" in label or "loss" in label), "")
    if not title:
        return tag("p", "No loss has been logged yet.", class_="quiet")
    number_ = tag("div", tag("span", figures.plain(results[title]), class_="number"), tag("span", title, class_="of"))
    verdict = digest.verdict(run)
    return tag(
        "section",
        tag("div", number_, tag("p", verdict, class_="verdict") if verdict else "", class_="lead"),
        _bars(run, results) if "bits per byte" in title else "",
        class_="headline",
        aria_label="Result",
    )


def _bars(run: RunFolder, results: dict[str, float]) -> Markup:
    """A bar chart of bits per byte: the run's own figures and its baselines, in ascending order."""
    ours = {"ours": ("this run, held out", "held-out"), "training": ("this run, training", "training")}
    own = [(label, results.get(f"{part} bits per byte"), kind) for kind, (label, part) in ours.items()]
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
    """A bar that fills `share` (0 to 1) of its cell; SVG, because browsers do not print backgrounds."""
    width = f"{100 * min(max(share, 0.0), 1.0):.2f}%"
    return tag("svg", tag("rect", width=width, height="100%", rx=2), class_=f"meter {kind}", aria_hidden="true")


def share_bar(share: float, longest: float) -> Markup:
    """A table cell with a share in percent and a bar; the share `longest` would fill the whole cell."""
    return tag("div", bar(share / (longest or 1)), tag("span", figures.percent(share), class_="figure"), class_="share")


def section(title: str, *children: str) -> Markup:
    """A section of a page with a title."""
    return tag("section", tag("h2", title), *children)


def facts(run: RunFolder) -> Markup:
    """The run's steps, tokens, time, parameters, speed and memory in one row."""
    results, unit = digest.results(run), digest.counted(run)
    total, ranks = digest.total_steps(run), len(tables(run.summary, "ranks"))
    steps = f"{digest.last_step(run):,}" + (f" of {total:,}" if total else "")
    shown = {
        "Steps": steps,
        f"{unit.capitalize()}s": _optional(results.get(f"{unit}s"), figures.count),
        "Time": _optional(results.get("time"), figures.duration),
        "Parameters": _optional(results.get("parameters"), figures.count),
        "Tokens per second": _optional(results.get("tokens per second (median)"), figures.count),
        "Samples per second": _optional(results.get("samples per second (median)"), figures.count),
        "MFU": _optional(results.get("MFU (median)"), figures.percent),
        "Memory at peak": _optional(results.get("memory at peak (GiB)"), lambda gib: figures.memory(gib * 2**30)),
        "Waiting for data": _optional(results.get("share of time waiting for data (median)"), figures.percent),
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
    all_ranks = len(ranks) <= _SHOWN_RANKS
    length = digest.seconds(run) or 0.0
    order = sorted(spans.items(), key=lambda item: -_mean(item[1].values(), "seconds", len(ranks)))
    rows = [_span(name, kind, by_rank, len(ranks), all_ranks, length) for (kind, name), by_rank in order]
    columns = [] if len(ranks) == 1 else ranks if all_ranks else ["least", "most"]
    head = ["Name", "Kind", "Share of the run", "Count", "Bytes", "Time", *columns]
    note = (
        "Counts, bytes and times are means over the ranks; the columns after them are the times of each. "
        "Spans can lie inside one another, so shares may add up to more than 100%."
    )
    return section("What ran where", tag("p", note, class_="quiet"), grid("Longest first", head, rows, figures=3))


def _rank(trace: dict[str, Any]) -> str:
    host = f" on {trace['host']}" if trace.get("host") else ""
    return f"rank {trace.get('rank', '?')}{host}"


def _span(
    name: str, kind: str, by_rank: dict[int, dict[str, Any]], ranks: int, all_ranks: bool, length: float
) -> list[str]:
    """The cells of one span: means over the ranks, then the time on each rank, or the minimum and maximum time."""
    spent = [number(by_rank.get(rank, {}).get("seconds")) or 0.0 for rank in range(ranks)]
    mean = sum(spent) / ranks
    share = mean / length if length > 0 else 0.0
    meter = tag("div", bar(share, kind), figures.percent(share), class_="share") if length > 0 else "unknown"
    nbytes = _mean(by_rank.values(), "bytes", ranks)
    times = figures.count(_mean(by_rank.values(), "count", ranks))
    cells = [name, kind, meter, times, figures.size(nbytes) if nbytes else "–", figures.seconds(mean)]
    if ranks == 1:
        return cells
    return cells + [figures.seconds(value) for value in (spent if all_ranks else (min(spent), max(spent)))]


def reductions(run: RunFolder) -> Markup:
    """One line for each feature: what the feature reduced, and at what cost."""
    lines = [reduction(row) for row in tables(run.summary, "reductions")]
    return (
        section(
            "What features cut, and what it cost", tag("ul", *(tag("li", line) for line in lines), class_="reductions")
        )
        if lines
        else Markup()
    )


def reduction(row: dict[str, Any]) -> str:
    """Describe one feature's reduction in a sentence; values whose `unit` starts with "bytes" are shown as sizes."""
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
    """The tables that features add to the report."""
    return join(
        _table(row, f"By {row.get('feature', 'a feature')}")
        for row in tables(run.summary, "report_items")
        if row.get("as") == "table"
    )


def _table(row: dict[str, Any], caption: str) -> Markup:
    """A section with a table that a feature or an evaluation adds to the report."""
    title, note = str(row.get("title", "")), str(row.get("note", ""))
    head = [str(cell) for cell in _list(row.get("head"))]
    lines = [zip_longest(_list(line), head[: len(_list(line))]) for line in _list(row.get("rows"))]
    rows = [[_cell(cell, column) for cell, column in line] for line in lines]
    return section(title, tag("p", note, class_="quiet") if note else "", grid(caption, head, rows, figures=1))


def findings(run: RunFolder) -> Markup:
    """The newest tables and pictures of evaluations."""
    shown = [row for row in run.findings if "picture" in row]
    figures_ = [
        tag(
            "figure",
            tag("img", src=row["source"], alt=str(row["name"])) if row.get("source") else "",
            tag("figcaption", tag("b", str(row["name"])), f" {row.get('caption') or ''}, {_after(row)}"),
        )
        for row in shown
    ]
    gallery = section("Pictures of evaluations", tag("div", *figures_, class_="pictures")) if shown else Markup()
    others = (row for row in run.findings if "picture" not in row)
    return join([gallery, *(_table(row, f"By run.evaluate, {_after(row)}") for row in others)])


def _after(row: dict[str, Any]) -> str:
    return f"after step {row['step']:,}"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def features(run: RunFolder) -> Markup:
    """The table of features: name, seams, reason and settings of each feature."""
    rows = []
    for row in tables(run.summary, "features"):
        settings = ", ".join(f"{key} = {value}" for key, value in flat(table(row, "settings")).items())
        seams = ", ".join(map(str, row.get("seams") or []))
        rows.append([str(row.get("name", "")), seams, str(row.get("why", "")), settings or "defaults"])
    return (
        section(
            "Features",
            grid("In the order in which they were applied", ["Name", "Seam", "Why", "Settings"], rows, stacked=True),
        )
        if rows
        else Markup()
    )


def ranks(run: RunFolder) -> Markup:
    """The table of ranks: host, device, data type, threads, speed and memory of each rank."""
    keys = ("rank", "host", "device", "dtype", "threads", "tokens_per_second", "memory_gib")
    rows = [[_cell(row.get(key)) for key in keys] for row in tables(run.summary, "ranks")]
    speed = f"{digest.counted(run).capitalize()}s per second"
    head = ["Rank", "Host", "Device", "Data type", "Threads", speed, "Memory, GiB"]
    return section("Ranks", grid("One row per process", head, rows, figures=4)) if rows else Markup()


def samples(run: RunFolder) -> Markup:
    """Texts generated by the model, with the prompts marked."""
    shown = [
        tag("figure", tag("pre", tag("mark", str(row.get("prompt", ""))), str(row.get("text", "")), tabindex=0))
        for row in tables(run.summary, "samples")
    ]
    note = tag("p", "The prompt is marked; the model wrote the rest.", class_="quiet")
    return section("Samples", note, tag("div", *shown, class_="samples")) if shown else Markup()


def notes(run: RunFolder) -> Markup:
    """The run's notes, and the files of the folder that could not be read."""
    lines = [str(note) for note in _list(run.summary.get("notes"))] + run.problems
    return section("Notes", tag("ul", *(tag("li", line) for line in lines))) if lines else Markup()


def pages(run: RunFolder) -> Markup:
    """Links to the other pages that features wrote to the run's folder."""
    names = sorted(path.name for path in run.path.glob("*.html") if path.name != "report.html")
    links = [tag("li", tag("a", name, href=quote(name))) for name in names]
    return section("Other pages of this run", tag("ul", *links)) if links else Markup()


def documents(run: RunFolder) -> Markup:
    """The resolved run file and the environment, one row per key."""
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
    return section("Settings and environment", *parts) if parts else Markup()


def _optional(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _mean(totals: Iterable[dict[str, Any]], key: str, ranks: int) -> float:
    return sum(number(total.get(key)) or 0.0 for total in totals) / max(ranks, 1)


def _cell(value: object, head: str | None = "") -> str:
    """Format a table cell; the last word of the column's title determines the unit of a number."""
    figure = number(value)
    if value is None or figure is None:
        return "–" if value is None else str(value)
    unit = str(head).lower().rpartition(" ")[2]
    show = {"bytes": figures.size, "memory": figures.memory, "time": figures.seconds}.get(unit, figures.plain)
    return show(figure)
