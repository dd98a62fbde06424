"""Repeated copies: values go to an accelerator and back, one by one, or through Python's lists."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoestring.profile.analyses.layout import copying
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Reading, costliest, milliseconds
from shoestring.profile.analyses.statements import Text, called, names_read
from shoestring.profile.findings import Finding

COPIES = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::cpu", "aten::cuda"})
OFTEN = 4.0
"""Copies that one line makes in a step, from which on it is a loop."""
_FROM_LISTS = re.compile(r"\b(tensor|as_tensor|FloatTensor|LongTensor)\(")


def repeated_copies(reading: Reading) -> Iterator[Finding]:
    """Lines that copy between devices again and again, and tensors that are made of lists that were tensors."""
    copies = copying(reading)
    moved = [call for call in reading.calls if call.name in COPIES and copies[call.node] and _between_devices(call)]
    yield from _back_and_forth(reading, moved)
    yield from _in_a_loop(reading, moved)
    yield from _through_lists(reading)


def _between_devices(call: OperatorCall) -> bool:
    given, made = call.given, call.made
    return bool(given and made and call.place[0] and given[0].device != made[0].device)


def _back_and_forth(reading: Reading, moved: list[OperatorCall]) -> Iterator[Finding]:
    functions: dict[tuple[int, int], list[OperatorCall]] = {}
    for call in moved:
        functions.setdefault(call.frame, []).append(call)
    for calls in functions.values():
        ways = {(call.given[0].device, call.made[0].device, call.made[0].elements): call for call in calls}
        back = [call for (given, made, size), call in ways.items() if (made, given, size) in ways]
        if back:
            yield _finding(
                reading,
                "a tensor is copied to another device and back",
                back,
                "Keep it on the device that computes with it.",
            )


def _in_a_loop(reading: Reading, moved: list[OperatorCall]) -> Iterator[Finding]:
    for call in moved:
        if call.count >= OFTEN * reading.steps and reading.share(call.forward) >= MATTERS:
            yield _finding(
                reading,
                "a loop copies tensors between devices one at a time",
                [call],
                "Copy once before the loop, or join the tensors and copy them together.",
            )


def _finding(reading: Reading, title: str, calls: list[OperatorCall], advice: str) -> Finding:
    taken, nodes = sum(call.time for call in calls), [call.node for call in calls]
    ways = " and ".join(dict.fromkeys(f"{call.given[0].device} to {call.made[0].device}" for call in calls))
    return reading.finding(
        title,
        costliest(calls).place,
        f"{sum(call.count for call in calls)} copies from {ways} take {milliseconds(taken)},"
        f" {reading.share(taken):.0%} of the time.",
        advice,
        reading.gain("copies", taken, nodes),
        nodes,
    )


def _through_lists(reading: Reading) -> Iterator[Finding]:
    """Lines that make a tensor of what the same function has taken out of one, value by value."""
    for place, python in reading.line_itself.items():
        text = reading.syntax(place[0])
        statement = text.at(place[1]) if text else None
        if text is None or statement is None or not _FROM_LISTS.search(reading.text(place)):
            continue
        lists = _taken_out(text, text.function(statement))
        calls = [call for call in reading.calls if call.place == place]
        if not calls or (not names_read(statement) & lists and "tolist" not in called(statement)):
            continue
        lines = {(place[0], each.lineno) for each in text.statements if "tolist" in called(each)}
        taken = python + sum(call.forward for call in calls)
        taken += sum(reading.line_itself.get(line, 0) for line in lines - {place})
        nodes = [call.node for call in calls]
        saves = reading.gain("copies", taken, nodes)
        if saves.expected >= MATTERS:
            yield reading.finding(
                "a tensor goes through a list of Python and becomes one again",
                place,
                f"Taking values out of a tensor and making one of them takes {milliseconds(taken)},"
                f" {reading.share(taken):.0%} of the time; on an accelerator each step waits for both copies.",
                "Compute with the tensor itself: indexing, torch.where and sorting need no lists.",
                saves,
                nodes,
            )


def _taken_out(text: Text, function: object) -> set[str]:
    """Names in a function that have what was taken out of a tensor, or was made of that."""
    found = set[str]()
    for _ in range(3):
        for statement in text.statements:
            if text.function(statement) is function and hasattr(statement, "targets"):
                value = statement.value
                if value is not None and ("tolist" in called(value) or names_read(value) & found):
                    found |= {name for target in getattr(statement, "targets", ()) for name in _written(target)}
    return found


def _written(target: object) -> set[str]:
    return {target.id} if hasattr(target, "id") else set()
