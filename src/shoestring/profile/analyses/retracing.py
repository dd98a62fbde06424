"""Analysis of retracing, recompilation and graph breaks of compiled code."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from shoestring.figures import nanoseconds
from shoestring.profile.analyses.reading import MATTERS, Place, Reading
from shoestring.profile.analyses.statements import called, names_read, names_written
from shoestring.profile.findings import Finding
from shoestring.profile.recording import Events
from shoestring.profile.tree import NodeKind

_REGION = re.compile(r"^Torch-Compiled Region: (\d+)/(\d+)")
LARGE = 0.1
"""Graph breaks are reported if the compiled code takes at least this share of the profiled time."""
_JAX = re.compile(r"^jax (?:trace|lower|compile): (?:jit\()?(.*?)\)?$")
_COMPILING = re.compile(r"/jax/_src/(pjit|stages|compiler|interpreters/\w+)\.py\t")
_COMPILES = {"compile", "trace", "script", "make_fx", "export"}
JITTED_AGAIN = 4
"""A JAX function is reported if it is compiled at least this often; fewer compilations are assumed to be for intended
shapes."""
_LOOKUP = re.compile(r"^TorchDynamo Cache Lookup")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")


def retracings(reading: Reading) -> Iterator[Finding]:
    """Find calls that trace or compile repeatedly, and lines that cause graph breaks in compiled code."""
    yield from _compiled_again(reading)
    yield from _jitted_again(reading)
    yield from _graph_breaks(reading)


def _compiled_again(reading: Reading) -> Iterator[Finding]:
    tree = reading.tree
    tops: dict[Place, list[int]] = {}
    for node in reading.topmost(reading.traced & ~reading.behind):
        tops.setdefault(reading.place(node), []).append(node)
    # torch.compile's reason for the first recompilation
    compiled = ((name.partition(": "), events.count) for name, events in reading.profile.facts.waits.items())
    reasons = ((count, reason) for (kind, _, reason), count in compiled if kind in ("recompile", "retrace") and reason)
    because = next((f"; {count} times because of {reason}" for count, reason in reasons), "")
    for place, nodes in tops.items():
        taken = int(tree.inclusive[nodes].sum())
        times = _times(reading, nodes, place)
        if not place[0] or times < 3:
            continue
        at_place = np.array([reading.place(node) == place for node in range(len(tree))])
        looked = 0.7 * tree.inclusive[reading.matching(_LOOKUP) & at_place].sum()
        gain = (taken + looked) * (1 - 1 / times)
        saves = reading.gain("retracing", gain, nodes)
        if saves.expected < MATTERS:
            continue
        yield reading.finding(
            "the same code is traced or compiled again and again",
            place,
            f"{times} times, which takes {reading.spent(taken)}{because}.",
            "Compile once, outside of the loop; keep shapes, types and Python values that the code depends on fixed"
            " (pad, or mark them dynamic).",
            saves,
            nodes,
        )


def _jitted_again(reading: Reading) -> Iterator[Finding]:
    """Find functions that JAX compiles again for many shapes or static values, by the events that JAX reports."""
    functions: dict[Place, dict[str, list[Events]]] = {}
    for name, events in reading.profile.facts.waits.items():
        if match := _JAX.match(name):
            file, _, line = events.where.rpartition(":")
            functions.setdefault((file, int(line or 0)), {}).setdefault(match[1], []).append(events)
    compiling = reading.under(_COMPILING)
    for place, named in functions.items():
        repeated = [group for group in named.values() if max(events.count for events in group) >= JITTED_AGAIN]
        again = [events for group in repeated for events in group]
        if not place[0] or not again:
            continue
        seconds, times = sum(e.seconds for e in again), max(e.count for e in again)
        saves = reading.gain("retracing", 1e9 * seconds * (1 - 1 / times))
        if saves.expected < MATTERS:
            continue
        nodes = [node for node in reading.topmost(compiling) if reading.place(node) == place]
        yield reading.finding(
            "the same function is traced and compiled again and again",
            place,
            f"{times} times, which takes {reading.spent(1e9 * seconds)}.",
            "Keep shapes, types and static arguments fixed: pad to a few lengths, and give numbers that change as"
            " arrays.",
            saves,
            nodes,
        )


def _times(reading: Reading, nodes: list[int], place: Place) -> int:
    """Lower bound of the number of times that the code at these nodes was compiled."""
    tree = reading.tree
    inside = np.zeros(len(tree), bool)
    for node in nodes:
        inside |= reading.below(node)
    counts = tree.count[inside & (tree.kind == NodeKind.OPERATOR) & (tree.count > 0)]
    times = int(np.quantile(counts, 0.1)) if len(counts) else 0
    for name in tree.names:
        if match := _REGION.search(name):
            times = max(times, int(match[2]) + 1)
    regions = reading.matching(_REGION) & (tree.kind == NodeKind.OPERATOR)
    ran = int(tree.count[reading.topmost(regions)].sum())
    usual = int(np.median(counts)) if len(counts) else 0
    if usual >= 0.5 * ran > 1:  # nearly every call compiles
        times = max(times, min(usual, ran))
    waits = [events.count for name, events in reading.profile.facts.waits.items() if name.startswith("re")]
    return max(times, sum(waits), ran if _in_loop(reading, place) else 0)


def _in_loop(reading: Reading, place: Place) -> bool:
    """Whether each iteration of a loop compiles the code that a line calls."""
    text = reading.syntax(place[0])
    statement = text.at(place[1]) if text else None
    if text is None or statement is None:
        return False
    return any(
        text.loop(other) is not None and (other is statement or names_written(other) & names_read(statement))
        for other in text.statements
        if called(other) & _COMPILES and text.function(other) is text.function(statement)
    )


def _graph_breaks(reading: Reading) -> Iterator[Finding]:
    tree = reading.tree
    broken: dict[Place, list[int]] = {}
    for node in np.flatnonzero(tree.kind == NodeKind.PYTHON).tolist():
        file, _, function = reading.names(node).partition("\t")
        if match := _RESUMED.search(function):
            broken.setdefault((file, int(match[2])), []).append(node)
    compiled = tree.inclusive[reading.topmost(reading.matching(_REGION))].sum()
    for place, nodes in broken.items():
        taken = int(tree.inclusive[nodes].sum())
        if reading.share(max(taken, compiled)) >= LARGE:
            yield reading.finding(
                "compiled code breaks into parts at this line",
                place,
                f"What follows this line runs as a function of its own; compiled code takes {nanoseconds(compiled)}.",
                "Move what torch.compile cannot trace (printing, item(), calls into other libraries) out of the"
                " function; TORCH_LOGS=graph_breaks tells why.",
                None,
                nodes,
            )
