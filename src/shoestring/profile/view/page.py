"""Writes the page of a profile, or of a comparison of two profiles: one HTML file that works offline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from shoestring.figures import nanoseconds, percent, seconds
from shoestring.profile.analyses import find
from shoestring.profile.comparison import Comparison
from shoestring.profile.findings import Finding
from shoestring.profile.lines import by_line, import_time, without_imports
from shoestring.profile.recording import Profile
from shoestring.profile.summary import by_operator, code, command, notes, waits
from shoestring.profile.view import payload
from shoestring.profile.view.steps import steps
from shoestring.report.document import PageFrame, document, packaged, save
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid
from shoestring.report.sections import section, share_bar

_PACKAGE, STYLE = "shoestring.profile.view", "flame.css"
SCRIPT = ("calls.js", "flame.js", "table.js", "start.js")
_LINES, _OPERATORS = 25, 15

_KEYS = (
    ("↑ ↓", "caller, and the call inside it that takes longest"),
    ("← →", "calls beside it"),
    ("Enter", "show this call alone"),
    ("Esc", "show all"),
)
_LEGEND = (
    ("python", "line of the program"),
    ("package", "function of a package"),
    ("operator", "operator"),
    ("backward", "backward pass"),
    ("span", "named span"),
    ("kernel", "accelerator kernel"),
    ("native", "native function"),
)
_CHANGES = (("more", "slower than before"), ("less", "faster than before"), ("all", "as before"))


def write(profile: Profile, path: Path) -> Path:
    """Write the page of a profile.

    Raises:
        ShoestringError: the file cannot be written.
    """
    tree, inside = profile.tree, profile.facts.inside
    lines = {place: line.total for place, line in by_line(tree, inside).items()}
    total = max(without_imports(tree), 1)
    order = sorted(lines, key=lambda place: -lines[place])
    rows = [
        [
            _place(*place),
            tag("code", code(profile.sources, *place)),
            share_bar(lines[place] / total, lines[order[0]] / total),
            nanoseconds(lines[place]),
        ]
        for place in order[:_LINES]
    ]
    longest = list(by_operator(tree).items())[:_OPERATORS]
    operators = [
        [
            name,
            share_bar(own / total, longest[0][1][0] / total),
            nanoseconds(own),
            f"{count:,}",
            nanoseconds(own / max(count, 1)),
        ]
        for name, (own, count) in longest
    ]
    shown = [*notes(profile.facts), *(line for line, _ in waits(profile.facts))]
    if profile.facts.collector != "native":
        shown.append(f"Operators were recorded by {profile.facts.collector}.")
    shown.append(", ".join(f"{name} {version}" for name, version in profile.facts.versions.items()))
    parts = [
        _findings(find(profile), profile.sources),
        _strip(profile),
        _calls(_LEGEND),
        section(
            "Lines of the program",
            grid(
                "With all that they call outside of the program, longest first",
                _LINE_HEAD,
                rows,
                figures=2,
                stacked=True,
            ),
        ),
        _source(profile.sources, ("Forward", "Backward", "Python")),
        steps(profile.facts),
        section("Operators", grid("Without the operators that they call", _OPERATOR_HEAD, operators, figures=1)),
        section("Notes", tag("ul", *(tag("li", note) for note in shown if note))),
    ]
    name = command(profile.facts)
    return save(path, document(name, _heading(name, "Profile"), join(parts), payload.of_profile(profile), _frame()))


_LINE_HEAD = ("Line", "Code", "Share", "Time")
_OPERATOR_HEAD = ("Operator", "Share", "Time", "Calls", "A call")


def write_comparison(comparison: Comparison, names: tuple[str, str], path: Path) -> Path:
    """Write the page of a comparison of two profiles.

    Args:
        names: the names to show for the older and the newer profile.

    Raises:
        ShoestringError: the file cannot be written.
    """
    before, after = comparison.total
    rows = [
        [
            _place(*place),
            tag("code", code(comparison.sources, *place)),
            nanoseconds(old),
            nanoseconds(new),
            nanoseconds(new - old, sign=True),
        ]
        for place, (old, new) in list(comparison.by_line().items())[:_LINES]
    ]
    unit = "a step" if comparison.by_step else "in all"
    facts = {
        f"Before ({names[0]})": f"{nanoseconds(before)} {unit}",
        f"After ({names[1]})": f"{nanoseconds(after)} {unit}",
        "Change": f"{(after - before) / max(before, 1):+.1%}",
        "As fast": f"{before / max(after, 1):.2f}x",
    }
    head = ("Line", "Code", "Before", "After", "Change")
    parts = [
        _facts(facts),
        _calls(_CHANGES),
        section("Lines of the program", grid("Largest change first", head, rows, figures=2, stacked=True)),
        _source(comparison.sources, ("Before", "After", "Change")),
    ]
    title = f"{names[0]} and {names[1]}"
    data = payload.of_comparison(comparison)
    return save(path, document(title, _heading(title, "Two profiles compared"), join(parts), data, _frame()))


@cache
def _frame() -> PageFrame:
    style = packaged("shoestring.report", "page.css") + packaged(_PACKAGE, STYLE)
    script = (packaged("shoestring.report", "elements.js"), *(packaged(_PACKAGE, name) for name in SCRIPT))
    return PageFrame(style, "\n".join(script))


def _heading(title: str, kind: str) -> Markup:
    return tag("div", tag("h1", title), tag("p", kind, class_="quiet"), class_="title")


def _findings(findings: Sequence[Finding], sources: Mapping[str, str]) -> Markup:
    shown = [
        tag(
            "li",
            tag("h3", finding.title, " ", _place(finding.file, finding.line) if finding.file else ""),
            tag("p", finding.saving, class_="saving") if finding.saving else "",
            tag("code", code(sources, finding.file, finding.line)) if finding.file else "",
            tag("p", finding.evidence),
            tag("p", finding.advice),
            tag("button", "Show in the graph", type="button", data_nodes=str(list(finding.nodes)))
            if finding.nodes
            else "",
        )
        for finding in findings
    ]
    return section("Findings", tag("ol", *shown, class_="findings")) if shown else Markup()


def _strip(profile: Profile) -> Markup:
    tree, facts = profile.tree, profile.facts
    python, imported = tree.own[tree.kind == 1].sum(), import_time(tree)
    return _facts(
        {
            "Time": seconds(facts.seconds),
            "In operators, on all threads": nanoseconds(tree.inclusive[0] - python - tree.own[0]),
            "In Python outside of them": nanoseconds(python - imported),
            "Importing packages, in no share": nanoseconds(imported) if imported else "",
            "For recording": percent(facts.overhead / (facts.seconds or 1)),
            "For recording, on other threads": percent(facts.beside / (facts.seconds or 1)) if facts.beside else "",
            "Processor time of all threads": seconds(facts.processor) if facts.processor else "",
            "Threads of an operator": f"{facts.threads} on {facts.cores} cores" if facts.threads else "",
            "Optimizer steps": f"{facts.steps:,}" if facts.steps else "",
            "Ranks": str(len(profile.ranks.labels)) if profile.ranks else "",
            "Time with operators recorded": percent(facts.share) if facts.share < 1 else "",
            "Call paths": f"{len(tree):,}",
        }
    )


def _facts(shown: Mapping[str, str]) -> Markup:
    pairs = [tag("div", tag("dt", name), tag("dd", value)) for name, value in shown.items() if value]
    return tag("dl", *pairs, class_="facts")


def _calls(legend: Iterable[tuple[str, str]]) -> Markup:
    keys = [part for key, use in _KEYS for part in (tag("kbd", key), f" {use}  ")]
    entries = [tag("li", tag("span", class_=f"dot box-{tone}", aria_hidden="true"), name) for tone, name in legend]
    canvas = tag(
        "canvas",
        tabindex=0,
        role="application",
        aria_roledescription="flame graph",
        aria_label="Calls by the time that they take. Arrow keys move between calls; the table shows the same.",
        aria_describedby="keys",
    )
    return section(
        "Calls",
        tag("form", id="controls", class_="controls"),
        tag("figure", tag("div", canvas, class_="graph-box"), id="graph", class_="graph"),
        tag("div", id="rows", class_="calls", hidden=True),
        tag("ul", *entries, class_="legend"),
        tag("p", *keys, id="keys", class_="quiet"),
        tag("div", id="call", class_="call-box"),
        tag("p", id="said", class_="unseen", aria_live="polite"),
    )


def _source(sources: Mapping[str, str], head: Sequence[str]) -> Markup:
    if not sources:
        return Markup()
    titles = [tag("th", title, scope="col") for title in (*head, "Line", "Code")]
    table = tag("table", tag("thead", tag("tr", *titles)), tag("tbody"))
    pick = tag("label", "File ", tag("select", id="file"))
    box = tag("div", table, id="source", class_="source", tabindex=0, role="region", aria_label="Source with times")
    return tag("section", tag("h2", "Source"), tag("div", pick, class_="pick"), box, id="source-section")


def _place(file: str, line: int) -> Markup:
    """A button, labelled with file and line, that shows the line in the page's source view."""
    text = f"{Path(file).name}:{abs(line)}{' (was)' if line < 0 else ''}"
    return tag("button", text, type="button", class_="place", title=file, data_file=file, data_line=line)
