"""Analysis of repeated copies: tensors move between devices one at a time, or become Python lists and back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoestring.figures import nanoseconds, percent
from shoestring.profile.analyses.layout import copying
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Reading, costliest
from shoestring.profile.analyses.statements import Text, called, names_read
from shoestring.profile.findings import Finding

COPIES = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::cpu", "aten::cuda"})
OFTEN = 4.0
"""A line in a loop is reported if it makes at least this many copies per step."""
_FROM_LISTS = re.compile(r"\b(tensor|as_tensor|FloatTensor|LongTensor)\(")


def repeated_copies(reading: Reading) -> Iterator[Finding]:
    """Find lines that repeatedly copy tensors between devices, or that convert tensors to Python lists and back."""
    copies = copying(reading)
    moved = [
        call
        for call in reading.calls
        if call.name in COPIES and copies[call.node] and call.given and call.made and call.place[0]
        if call.given[0].device != call.made[0].device
    ]
    functions: dict[tuple[int, int], list[OperatorCall]] = {}
    for call in moved:
        functions.setdefault(call.frame, []).append(call)
    for calls in functions.values():
        ways = {(call.given[0].device, call.made[0].device, call.made[0].elements): call for call in calls}
        back = [call for (source, target, size), call in ways.items() if (target, source, size) in ways]
        if back:
            yield _finding(
                reading,
                "a tensor is copied to another device and back",
                back,
                "Keep it on the device that computes with it.",
            )
    for call in moved:
        if call.count >= OFTEN * reading.steps and reading.share(call.forward) >= MATTERS:
            yield _finding(
                reading,
                "a loop copies tensors between devices one at a time",
                [call],
                "Copy once before the loop, or join the tensors and copy them together.",
            )
    yield from _through_lists(reading)


def _finding(reading: Reading, title: str, calls: list[OperatorCall], advice: str) -> Finding:
    taken, nodes = sum(call.time for call in calls), [call.node for call in calls]
    ways = " and ".join(dict.fromkeys(f"{call.given[0].device} to {call.made[0].device}" for call in calls))
    return reading.finding(
        title,
        costliest(calls).place,
        f"{sum(call.count for call in calls)} copies from {ways} take {nanoseconds(taken)},"
        f" {percent(reading.share(taken))} of the time.",
        advice,
        reading.gain("copies", taken, nodes),
        nodes,
    )


def _through_lists(reading: Reading) -> Iterator[Finding]:
    """Find lines that create a tensor from values that the same function has read out of another tensor."""
    for place, python in reading.line_itself.items():
        text = reading.syntax(place[0])
        statement = text.at(place[1]) if text else None
        if text is None or statement is None or not _FROM_LISTS.search(reading.text(place)):
            continue
        lists = _taken_out(text, text.function(statement))
        calls = [call for call in reading.calls if call.place == place]
        if not calls or (not names_read(statement) & lists and "tolist" not in called(statement)):
            continue
        lines = {(place[0], other.lineno) for other in text.statements if "tolist" in called(other)}
        taken = python + sum(call.forward for call in calls)
        taken += sum(reading.line_itself.get(line, 0) for line in lines - {place})
        nodes = [call.node for call in calls]
        saves = reading.gain("copies", taken, nodes)
        if saves.expected >= MATTERS:
            yield reading.finding(
                "a tensor is converted to a Python list and back",
                place,
                f"Reading values out of a tensor and making a new tensor of them takes {nanoseconds(taken)},"
                f" {percent(reading.share(taken))} of the time; on an accelerator each step waits for both copies.",
                "Compute with the tensor itself: indexing, torch.where and sorting need no lists.",
                saves,
                nodes,
            )


def _taken_out(text: Text, function: object) -> set[str]:
    """Names in a function whose values were read out of a tensor, or computed from such values."""
    names = set[str]()
    for _ in range(3):  # names may depend on names that later lines assign
        for statement in text.statements:
            if text.function(statement) is function and hasattr(statement, "targets"):
                value = statement.value
                if value is not None and ("tolist" in called(value) or names_read(value) & names):
                    targets = getattr(statement, "targets", ())
                    names |= {target.id for target in targets if hasattr(target, "id")}
    return names
