"""Two runs side by side: what was set differently, what came out, and their curves over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shoestring.report import curves, digest, figures, page
from shoestring.report.folder import RunFolder, flat, read
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid

_ABSENT = "–"


def compare(a: Path, b: Path, out: Path) -> tuple[str, Path]:
    """Compare the runs in folders `a` and `b`; `out` is the page to write.

    Returns:
        A summary for the terminal (settings that differ, final figures, versions that differ), and the page's path.

    Raises:
        ConfigError: `a` or `b` is not a run folder.
        ShoestringError: the page cannot be written.
    """
    runs = (read(a), read(b))
    names = (digest.label(runs[0], runs), digest.label(runs[1], runs))
    settings = _differing(flat(runs[0].settings), flat(runs[1].settings))
    versions = _differing(*(flat({key: run.environment.get(key, {}) for key in ("versions", "git")}) for run in runs))
    blocks = (
        ("Results", "Final figures; the last column is B relative to A.", ("B against A",), _results(*runs)),
        ("Settings that differ", "From the resolved run files.", (), settings),
        ("Versions that differ", "From what each run wrote about its environment.", (), versions),
    )
    text = [
        _printable(f"{letter}  {name}  {digest.status(run)}")
        for letter, name, run in zip("AB", names, runs, strict=True)
    ]
    parts: list[Markup] = []
    for title, caption, more, rows in blocks:
        text += ["", title.lower(), *_aligned(rows)]
        head = ("", *(f"{letter}: {name}" for letter, name in zip("AB", names, strict=True)), *more)
        shown = grid(caption, head, rows, figures=len(more)) if rows else tag("p", "none", class_="quiet")
        parts.append(tag("section", tag("h2", title), shown))
    return "\n".join(text) + "\n", page.save(Path(out), _page(runs, names, parts))


def _page(runs: tuple[RunFolder, RunFolder], names: tuple[str, str], parts: list[Markup]) -> str:
    data = curves.payload(runs)
    title = f"{names[0]} and {names[1]}"
    states = [
        tag(
            "li",
            tag("b", letter, class_=f"tone{position}"),
            f" {name}: {digest.status(run)}, {digest.last_step(run):,} steps",
        )
        for position, (letter, name, run) in enumerate(zip("AB", names, runs, strict=True))
    ]
    head = tag("div", tag("h1", title), tag("ul", *states, class_="pair"), class_="title")
    return page.document(f"Compared: {title}", head, join([parts[0], page.charts(data), *parts[1:]]), data)


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Keys whose values differ, in A's order, then what only B has."""
    keys = [*a, *(key for key in b if key not in a)]
    return [(key, a.get(key, _ABSENT), b.get(key, _ABSENT)) for key in keys if a.get(key) != b.get(key)]


def _results(a: RunFolder, b: RunFolder) -> list[tuple[str, str, str, str]]:
    ours, theirs = digest.results(a), digest.results(b)
    labels = [*ours, *(label for label in theirs if label not in ours)]
    return [
        (label, _shown(label, ours), _shown(label, theirs), _change(ours.get(label), theirs.get(label)))
        for label in labels
    ]


def _shown(label: str, found: Mapping[str, float]) -> str:
    value = found.get(label)
    if value is None:
        return _ABSENT
    if label == "seconds":
        return figures.duration(value)
    if label.startswith(("share", "MFU")):
        return figures.percent(value)
    return figures.count(value) if value >= 10_000 else figures.plain(value)


def _change(a: float | None, b: float | None) -> str:
    """B relative to A in percent; equal values are said to be equal, so that a rounded 0.0% is not mistaken for it."""
    if a is None or b is None:
        return ""
    if a == b:
        return "equal"
    ratio = b / a - 1 if a else float("nan")
    return f"{ratio:+.2%}" if abs(ratio) < 10 else f"x{b / a:.3g}" if a and ratio == ratio else ""


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as padded columns."""
    clean = [[_printable(cell) for cell in row] for row in rows] or [["none"]]
    widths = [max(len(cell) for cell in column) for column in zip(*clean, strict=True)]
    padded = (zip(row, widths, strict=True) for row in clean)
    return [("  " + "  ".join(f"{cell:<{width}}" for cell, width in cells)).rstrip() for cells in padded]


def _printable(text: str) -> str:
    """Names come from files: characters that could steer a terminal are replaced."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
