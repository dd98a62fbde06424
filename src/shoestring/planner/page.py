"""The page of a plan: a picture of the predicted step, its stages, and why other ways to train were not chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from shoestring.core.trace import Span
from shoestring.figures import memory, percent, seconds, size
from shoestring.planner.search import TrainingPlan
from shoestring.planning.predict import stage_of
from shoestring.report.document import PageFrame, document, packaged, save
from shoestring.report.drawing import WIDTH, picture, text
from shoestring.report.markup import Markup, join, tag
from shoestring.report.markup import table as grid
from shoestring.report.sections import section

_LEFT, _ROW, _GAP = 150, 24, 6
_MOST = 4000
"""Maximum number of spans to draw; the shortest ones are left out."""
_KINDS = {"forward": "forward passes", "backward": "backward passes", "optimizer": "optimizer", "wire": "messages"}
_WAYS_HEAD = ("Way to train", "Why not", "Predicted", "Tried", "Against the chosen", "Memory of a rank")
_STAGE_HEAD = ("Stage", "Blocks", "Computes", "Waits", "Memory of a rank")


def write(
    plan: TrainingPlan, others: Sequence[TrainingPlan], tried: Mapping[str, float], measured: float, path: Path
) -> Path:
    """Write the page of a chosen plan.

    Args:
        others: plans that were not chosen, in the order of the table. tried: text of a plan -> measured seconds.
        measured: measured seconds of a step of the chosen plan.

    Raises:
        ShoestringError: the file cannot be written.
    """
    title = f"A plan of {seconds(plan.seconds)} a step"
    told = f"{plan}. When it was tried, a step took {seconds(measured)}."
    heading = tag("div", tag("h1", title), tag("p", told, class_="quiet"), class_="title")
    body = [
        section("A step", _key(), _step([*plan.predicted.trace.spans], plan.seconds)),
        section("Stages", grid("What a rank of each stage does and holds", _STAGE_HEAD, _stages(plan), figures=2)),
        section(
            "Other ways",
            grid("Predicted, the fastest first", _WAYS_HEAD, _ways(plan, others, tried), figures=2, stacked=True),
        ),
    ]
    return save(path, document(title, heading, join(body), {}, _frame()))


@cache
def _frame() -> PageFrame:
    return PageFrame(packaged("shoestring.report", "page.css") + packaged("shoestring.planner", "plan.css"), "")


def _key() -> Markup:
    return tag("ul", *(tag("li", tag("i", class_=kind), words) for kind, words in _KINDS.items()), class_="key")


def _step(spans: Sequence[Span], total: float) -> Markup:
    """Draw the step as rows of bars: for each stage one row for its work, and one for the messages of its ranks."""
    rows = sorted({_row(span) for span in spans}, key=lambda row: (int(row.split()[1]), row.endswith("sends")))
    height = len(rows) * (_ROW + _GAP) + 30
    scale = (WIDTH - _LEFT - 10) / (total or 1.0)
    drawn = list[Markup]()
    for place, row in enumerate(rows):
        top = place * (_ROW + _GAP)
        drawn.append(text(_LEFT - 8, top + _ROW * 0.7, row, anchor="end"))
        drawn.append(_bar(_LEFT, top, WIDTH - _LEFT - 10, "lane"))
    longest = sorted(spans, key=lambda span: span.start - span.stop)[:_MOST]
    for span in sorted(longest, key=lambda span: span.start):
        what, left = span.name.partition(" of stage ")[0], _LEFT + span.start * scale
        sent = f", {size(span.nbytes)}" if span.nbytes else ""
        told = f"{what}: {seconds(span.start)} to {seconds(span.stop)}{sent}"
        top, width = rows.index(_row(span)) * (_ROW + _GAP), max((span.stop - span.start) * scale, 0.2)
        drawn.append(_bar(left, top, width, what if what in _KINDS else "wire", told))
    for share, anchor in ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end")):
        drawn.append(text(_LEFT + share * total * scale, height - 8, seconds(share * total), anchor))
    return tag("div", picture(drawn, "The predicted step of a rank of each stage", height), class_="step")


def _bar(x: float, y: float, width: float, kind: str, title: str = "") -> Markup:
    inner = [tag("title", title)] if title else []
    return tag("path", *inner, d=f"M{x:.2f} {y}h{width:.2f}v{_ROW}h{-width:.2f}z", class_=kind)


def _row(span: Span) -> str:
    return f"stage {stage_of(span.name)}{' sends' if span.kind == 'wire' else ''}"


def _stages(plan: TrainingPlan) -> Iterator[list[str]]:
    step, busy = plan.step, plan.predicted.busy()
    for stage, computing in enumerate(busy):
        blocks = [part for number, part in enumerate(step.parts) if number % step.stages == stage]
        counts = ", ".join(f"{part.start} to {part.stop - 1}" for part in blocks if len(part))
        waits = percent(max(1 - computing / plan.seconds, 0.0)) if plan.seconds else ""
        yield [str(stage), counts or "all", seconds(computing), waits, memory(int(plan.predicted.peaks[stage]))]


def _ways(plan: TrainingPlan, others: Sequence[TrainingPlan], tried: Mapping[str, float]) -> Iterator[list[str]]:
    for other in others:
        real = seconds(tried[str(other)]) if str(other) in tried else ""
        against = f"{other.seconds / plan.seconds:.2f}x" if plan.seconds else ""
        yield [str(other), _why(plan, other), seconds(other.seconds), real, against, memory(int(other.predicted.peak))]


def _why(plan: TrainingPlan, other: TrainingPlan) -> str:
    """The reason, as text, why a plan was not chosen."""
    if other.refused:
        return other.refused
    wire = max((total for total in _wires(other).values()), default=0.0)
    busy = max(other.predicted.busy())
    if other.seconds <= plan.seconds:
        return "took longer when it was tried, or has more parts"
    if wire > 0.9 * other.seconds:
        return f"messages take {seconds(wire)}"
    if busy > 0.9 * other.seconds:
        return f"a rank computes {seconds(busy)}"
    return f"a rank computes {seconds(busy)}, and waits {seconds(other.seconds - busy)} for others"


def _wires(plan: TrainingPlan) -> dict[str, float]:
    """Name of a row of messages -> seconds that a rank of the stage spends on sending."""
    totals = dict[str, float]()
    for span in plan.predicted.trace.spans:
        if span.kind == "wire":
            totals[_row(span)] = totals.get(_row(span), 0.0) + span.stop - span.start
    return totals
