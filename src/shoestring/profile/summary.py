"""Formats a profile as text for a terminal: findings, the program's lines by time, operators and native functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from shoestring.figures import nanoseconds, percent, seconds
from shoestring.profile.analyses import find
from shoestring.profile.comparison import Comparison
from shoestring.profile.lines import by_line, import_time, in_backward, short, without_imports
from shoestring.profile.recording import Facts, Profile
from shoestring.profile.tree import CallTree, NodeKind, without_native

_CODE = 48
"""Maximum number of characters shown of a source line."""

_NOTABLE = 0.005
"""Events and costs below this share of the time are not shown."""


def summary(profile: Profile, most: int = 15) -> Iterator[str]:
    """Yield lines of text that show at most `most` source lines, and a third as many operators and native functions."""
    tree, total = profile.tree, max(without_imports(profile.tree), 1)
    yield from _headline(profile)
    findings = find(profile)
    for number, finding in enumerate(findings, 1):
        where = f"{short(finding.file)}:{finding.line}: " if finding.file else ""
        saving = f"; {finding.saving}" if finding.saving else ""
        yield ""
        yield f"{number}. {where}{finding.title}{saving}"
        yield f"   {finding.evidence}"
        yield f"   {finding.advice}"
    lines = sorted(by_line(tree, profile.facts.inside).items(), key=lambda item: -item[1].total)
    rows = []
    for place, line in lines[:most]:
        times = (nanoseconds(value) if value else "" for value in (line.forward, line.backward, line.python))
        mostly = max(line.operators, key=lambda name: line.operators[name], default="")
        unsure = percent(line.uncertainty / total) if line.uncertainty >= 0.0005 * total else ""
        where, text = f"{short(place[0])}:{place[1]}", code(profile.sources, *place)
        rows.append([percent(line.total / total), unsure, *times, where, text, mostly])
    yield ""
    yield from columns(["share", "±", "forward", "backward", "Python", "line", "code", "mostly"], rows, figures=5)
    if len(lines) > most:
        yield f"and {len(lines) - most} more lines"
    rows = [
        [
            percent(own / total),
            nanoseconds(own),
            f"{count:,}",
            nanoseconds(own / max(count, 1)),
            name,
        ]
        for name, (own, count) in list(by_operator(without_native(tree)).items())[: max(most // 3, 1)]
    ]
    if rows:
        yield ""
        yield from columns(["share", "time", "calls", "mean", "operator, without those that it calls"], rows, figures=4)
    rows = [
        [percent(own / total), nanoseconds(own), name]
        for name, own in list(by_native_function(tree).items())[: max(most // 3, 1)]
    ]
    if rows:
        yield ""
        yield from columns(["share", "time", "native function, without those that it calls"], rows, figures=2)


def _headline(profile: Profile) -> Iterator[str]:
    tree, facts = profile.tree, profile.facts
    own, behind = tree.own, in_backward(tree)
    python = np.isin(tree.kind, (NodeKind.PYTHON, NodeKind.SPAN))
    forward, backward = (nanoseconds(own[~python & ~root(tree) & (behind == side)].sum()) for side in (False, True))
    ranks = f" on {len(profile.ranks.labels)} ranks" if profile.ranks else ""
    title = command(facts)
    title = title if len(title) <= 60 else f"{title[:59]}…"
    steps = f", {facts.steps:,} steps" if facts.steps else ""
    yield f"{title}: {seconds(facts.seconds)}{ranks}{steps}"
    imported, share = import_time(tree), facts.beside / (facts.seconds or 1)
    more = f", and {seconds(facts.beside)} on other threads ({percent(share)})" if share >= _NOTABLE else ""
    outside = nanoseconds(own[python].sum() - imported)
    yield (
        f"{forward} in operators, {backward} in the backward pass, {outside} in Python outside of operators; recording"
        f" took {seconds(facts.overhead)} ({percent(facts.overhead / (facts.seconds or 1))}){more}"
    )
    if imported > _NOTABLE * tree.inclusive[0]:
        yield f"importing packages took {nanoseconds(imported)}, which is in no line and no share"
    if profile.ranks:
        times = dict(zip(profile.ranks.labels, profile.ranks.own.sum(1), strict=True))
        least, longest = min(times, key=lambda name: times[name]), max(times, key=lambda name: times[name])
        yield f"{least} took least, {nanoseconds(times[least])}, and {longest} longest, {nanoseconds(times[longest])}"
    beside = int(tree.inclusive[0]) - (facts.seconds - facts.overhead) * 1e9
    if beside > _NOTABLE * tree.inclusive[0]:
        yield f"lines and operators include {nanoseconds(beside)} of other threads, which ran at the same time"
    if device := int(tree.device.sum()):
        yield f"{nanoseconds(device)} on the accelerator"
    if facts.share < 1:
        share = percent(facts.share)
        yield f"sampled: operators were recorded {share} of the time; counts and times are scaled up to all"
    yield from notes(facts)
    yield from [line for line, share in waits(facts) if share >= _NOTABLE][:5]


def notes(facts: Facts) -> Iterator[str]:
    """Yield sentences about work that is missing from the call tree."""
    if facts.lost:
        yield f"{facts.lost:,} calls found no room in the tree; they are in no line."
    yield from facts.unseen


def command(facts: Facts) -> str:
    """The program's name and its arguments."""
    if not facts.command:
        return "program"
    program = Path(facts.command[0])
    return " ".join([program.parent.name if program.name == "__main__.py" else program.name, *facts.command[1:]])


def waits(facts: Facts) -> list[tuple[str, float]]:
    """List (line of text, share of the time) for each kind of event that delayed the program, the longest first."""
    lines = []
    for name, events in sorted(facts.waits.items(), key=lambda item: -item[1].seconds):
        file, _, number = events.where.rpartition(":")
        where = f", first at {short(file)}:{number}" if events.where else ""
        times = f"{events.count:,} time{'s' * (events.count != 1)}"
        lines.append((f"{name}: {times}, {seconds(events.seconds)}{where}", events.seconds / (facts.seconds or 1)))
    return lines


def root(tree: CallTree) -> np.ndarray:
    """Mask that selects the root node, whose own time belongs to no line and no operator."""
    return tree.kind == NodeKind.ROOT


def by_operator(tree: CallTree) -> dict[str, tuple[int, int]]:
    """Own nanoseconds and number of calls of each operator and backward function, the longest first."""
    operators: dict[str, tuple[int, int]] = {}
    for node in np.flatnonzero(np.isin(tree.kind, (NodeKind.OPERATOR, NodeKind.BACKWARD))):
        own, count = operators.get(name := tree.label(int(node)), (0, 0))
        operators[name] = own + int(tree.own[node]), count + int(tree.count[node])
    return dict(sorted(operators.items(), key=lambda item: -item[1][0]))


def by_native_function(tree: CallTree) -> dict[str, int]:
    """Own nanoseconds of each native function below operators, the longest first."""
    functions: Counter[str] = Counter()
    for node in np.flatnonzero((tree.kind == NodeKind.NATIVE) & (tree.own > 0)):
        functions[tree.label(int(node))] += int(tree.own[node])
    return dict(functions.most_common())


def changes(comparison: Comparison, most: int = 15) -> Iterator[str]:
    """Format a comparison of two profiles as text: their total times, and the lines whose time changed most."""
    before, after = comparison.total
    unit = "a step" if comparison.by_step else "in all"
    factor = f"{before / after:.2f}x as fast" if after > 0 else ""
    yield f"{nanoseconds(before)} {unit} before, {nanoseconds(after)} after: {factor}"
    rows = []
    for place, (old, new) in list(comparison.by_line().items())[:most]:
        line = f"{short(place[0])}:{place[1]}" if place[1] >= 0 else f"{short(place[0])}:{-place[1]} (was)"
        rows.append(
            [
                nanoseconds(old),
                nanoseconds(new),
                nanoseconds(new - old, sign=True),
                line,
                code(comparison.sources, *place),
            ]
        )
    yield ""
    yield from columns(["before", "after", "change", "line", "code"], rows, figures=3)
    if len(comparison.by_line()) > most:
        yield f"and {len(comparison.by_line()) - most} more lines"


def code(sources: Mapping[str, str], file: str, line: int) -> str:
    """The text of a source line, cut to `_CODE` characters; empty if unknown."""
    lines = sources.get(file, "").splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return text if len(text) <= _CODE else f"{text[: _CODE - 1]}…"


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], figures: int) -> Iterator[str]:
    """The lines of a text table without empty columns; the first `figures` columns are right-aligned."""
    table = [head, *rows]
    shown = [column for column in range(len(head)) if any(row[column] for row in table[1:])]
    widths = [max(len(row[column]) for row in table) for column in shown]
    for row in table:
        cells = (
            row[column].rjust(width) if column < figures else row[column].ljust(width)
            for column, width in zip(shown, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()
