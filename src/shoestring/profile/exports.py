"""Exports profiles to the formats of other tools. Data that a format cannot represent, such as links, is left out.

- speedscope: https://www.speedscope.app/file-format-schema.json
- pprof: profile.proto of https://github.com/google/pprof, compressed with gzip
- collapsed stacks: lines of `outer;inner nanoseconds`, which https://github.com/brendangregg/FlameGraph reads
- Hatchet: the argument of `hatchet.GraphFrame.from_literal`, as JSON
- Perfetto: TrackEvents of https://perfetto.dev/docs/reference/trace-packet-proto
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shoestring.profile.protobuf import Field, message, packed
from shoestring.profile.recording import Profile
from shoestring.profile.tree import CallTree, Integers, NodeKind

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def _parts(profile: Profile) -> Iterator[tuple[str, Integers]]:
    """Yield (label, own times) of each rank; for a profile that was not merged, yield one pair with an empty label."""
    if profile.ranks is None:
        yield "", profile.tree.own
    else:
        yield from zip(profile.ranks.labels, profile.ranks.own, strict=True)


def _stacks(tree: CallTree) -> list[tuple[int, ...]]:
    """Return the call path of each node: all nodes from its outermost caller to the node itself, without the root."""
    stacks: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        stacks.append((*stacks[tree.parent[node]], node))
    return stacks


class _Frames:
    """Assigns numbers to distinct frames: nodes with equal label, file and line share a number."""

    def __init__(self, tree: CallTree) -> None:
        self.known: dict[tuple[str, str, int], int] = {}
        self.of_node = []
        for node in range(len(tree)):
            name, file, line = tree.label(node), "", 0
            if tree.kind[node] == NodeKind.PYTHON:
                file, line = tree.place(node)
                name = tree.names[tree.name[node]].partition("\t")[2]
            self.of_node.append(self.known.setdefault((name, file, line), len(self.known)))


def speedscope(profile: Profile) -> bytes:
    """Export as speedscope's JSON, with one profile for each rank."""
    frames, stacks = _Frames(profile.tree), _stacks(profile.tree)
    profiles = []
    for label, own in _parts(profile):
        nodes = [int(node) for node in np.flatnonzero(own > 0)]
        weights = [int(own[node]) for node in nodes]
        profiles.append(
            {
                "type": "sampled",
                "name": label or " ".join(profile.facts.command) or "profile",
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [[frames.of_node[above] for above in stacks[node]] for node in nodes],
                "weights": weights,
            }
        )
    listed = [
        {"name": f"{name}:{line}", "file": file, "line": line} if file and line > 0 else {"name": name}
        for name, file, line in frames.known  # speedscope distinguishes frames by name only
    ]
    document = {"$schema": _SCHEMA, "shared": {"frames": listed}, "profiles": profiles, "exporter": "shoestring"}
    return json.dumps(document, separators=(",", ":")).encode()


def pprof(profile: Profile) -> bytes:
    """Export as a gzipped profile.proto with time, calls and accelerator time; merged profiles have a label `rank`."""
    tree, frames, stacks = profile.tree, _Frames(profile.tree), _stacks(profile.tree)
    texts: dict[str, int] = {"": 0}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    # pprof shows the last kind of value by default
    kinds = (("calls", "count"), ("accelerator", "nanoseconds"), ("time", "nanoseconds"))
    fields: list[Field] = [(1, [(1, text(kind)), (2, text(unit))]) for kind, unit in kinds]
    for number, (label, own) in enumerate(_parts(profile)):
        once = number == 0  # call counts per rank are unknown, so the first rank gets the total
        for node in np.flatnonzero((own > 0) | (once & ((tree.count > 0) | (tree.device > 0)))):
            values = [int(tree.count[node]) * once, int(tree.device[node]) * once, max(int(own[node]), 0)]
            places = packed(frames.of_node[above] + 1 for above in reversed(stacks[node]))
            sample: list[Field] = [(1, places), (2, packed(values))]
            fields.append((2, sample + ([(3, [(1, text("rank")), (2, text(label))])] if label else [])))
    for (name, file, line), number in frames.known.items():
        fields.append((4, [(1, number + 1), (4, [(1, number + 1), (2, line)])]))
        fields.append((5, [(1, number + 1), (2, text(name)), (3, text(name)), (4, text(file))]))
    fields += [(10, int(profile.facts.seconds * 1e9)), (11, [(1, text("time")), (2, text("nanoseconds"))]), (12, 1)]
    fields += [(6, value) for value in texts]
    return gzip.compress(message(fields), mtime=0)


def collapsed(profile: Profile) -> bytes:
    """Export as collapsed stacks, with the nanoseconds of each path; in a merged profile, paths begin with the rank."""
    tree, stacks = profile.tree, _stacks(profile.tree)
    labels = [tree.label(node).translate(_LINE) for node in range(len(tree))]
    lines = []
    for rank, own in _parts(profile):
        for node in np.flatnonzero(own > 0):
            path = [*([rank.translate(_LINE)] if rank else []), *(labels[above] for above in stacks[node])]
            lines.append(f"{';'.join(path) or 'root'} {own[node]}\n")
    return "".join(lines).encode(errors="replace")


_LINE = str.maketrans({";": ":", "\n": " ", "\r": " "})


def hatchet(profile: Profile) -> bytes:
    """Export as Hatchet's nested frames with metrics, summed over ranks; times are in seconds."""
    tree = profile.tree
    texts: list[str] = []
    inside: list[list[str]] = [[] for _ in range(len(tree))]
    for node in range(len(tree)):
        frame: dict[str, Any] = {"name": tree.label(node), "type": NodeKind(int(tree.kind[node])).name.lower()}
        if tree.kind[node] == NodeKind.PYTHON:
            frame["file"], frame["line"] = tree.place(node)
        metrics = {"time": tree.own[node] / 1e9, "time (inc)": tree.inclusive[node] / 1e9}
        for name in ("count", "bytes", "flops"):
            metrics[name] = int(getattr(tree, name)[node])
        metrics["accelerator"] = tree.device[node] / 1e9
        texts.append(f'{{"frame":{json.dumps(frame)},"metrics":{json.dumps(metrics)},"children":[')
    for node in range(len(tree) - 1, 0, -1):  # a loop, because recursion over deep call paths may exceed Python's limit
        inside[tree.parent[node]].append(f"{texts[node]}{','.join(reversed(inside[node]))}]}}")
        inside[node] = []
    return f"[{texts[0]}{','.join(reversed(inside[0]))}]}}]".encode()


def perfetto(profile: Profile) -> bytes:
    """Export as a Perfetto trace: optimizer steps at the times they ran, and each rank's call paths in sequence.

    A profile stores sums, not events, so all calls with the same call path become one slice with their total duration.
    Slices are in the order in which their call paths were first recorded.
    """
    tree, packets, names = profile.tree, [], {}
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        children[tree.parent[node]].append(node)
    for number, (label, own) in enumerate(_parts(profile)):
        track, inclusive = number + 2, own.copy()
        for node in range(len(tree) - 1, 0, -1):
            inclusive[tree.parent[node]] += inclusive[node]
        name = f"call paths{' of ' + label if label else ''}, all calls together"
        packets.append([(60, [(1, track), (2, name)])])
        packets += _slices(tree, children, inclusive, track, names)
    packets += _steps(profile)
    interned: list[Field] = [(2, [(1, number), (2, name)]) for name, number in names.items()]
    first: list[Field] = [(12, interned), (13, 1)]
    return message([(1, [*fields, (10, 1)]) for fields in (first, *packets)])


def _slices(
    tree: CallTree, children: list[list[int]], inclusive: Integers, track: int, names: dict[str, int]
) -> Iterator[list[Field]]:
    """Yield packets that begin and end a slice for each node; slices of callees follow one another inside the slice."""
    begin, end = 1, 2  # TrackEvent.Type
    start, open_nodes = 0, [(0, 0, iter(children[0]))]  # (node, start time of its next child, remaining children)
    while open_nodes:
        node, start, left = open_nodes[-1]
        child = next((callee for callee in left if inclusive[callee] > 0), None)
        if child is None:
            open_nodes.pop()
            if open_nodes:
                above, started, siblings = open_nodes[-1]
                ended = started + int(inclusive[node])
                open_nodes[-1] = (above, ended, siblings)
                yield [(8, ended), (13, 2), (11, [(9, end), (11, track)])]
            continue
        name = names.setdefault(tree.label(child), len(names) + 1)
        calls: Field = (4, [(10, "calls"), (4, int(tree.count[child]))])
        yield [(8, start), (13, 2), (11, [(9, begin), (11, track), (10, name), calls])]
        open_nodes.append((child, start, iter(children[child])))


def _steps(profile: Profile) -> Iterator[list[Field]]:
    """Yield the packets of two tracks: the optimizer steps, and the process's memory after each step."""
    begin, end, counter, track, memory = 1, 2, 4, 1 << 32, 1 << 33
    if not profile.facts.clock:
        return
    yield [(60, [(1, track), (2, "optimizer steps")])]
    yield [(60, [(1, memory), (2, "resident memory"), (8, [(3, 3)])])]  # CounterDescriptor.Unit: bytes
    now = 0.0
    for steps in profile.facts.clock:
        span = f"step {steps.first}" if steps.steps == 1 else f"steps {steps.first} to {steps.first + steps.steps - 1}"
        yield [(8, int(now * 1e9)), (11, [(9, begin), (11, track), (23, span)])]
        now += steps.seconds
        yield [(8, int(now * 1e9)), (11, [(9, end), (11, track)])]
        if steps.resident:
            yield [(8, int(now * 1e9)), (11, [(9, counter), (11, memory), (30, steps.resident)])]


FORMATS: dict[str, tuple[str, Callable[[Profile], bytes]]] = {
    "speedscope": (".speedscope.json", speedscope),
    "pprof": (".pb.gz", pprof),
    "collapsed": (".collapsed.txt", collapsed),
    "hatchet": (".hatchet.json", hatchet),
    "perfetto": (".perfetto-trace", perfetto),
}
"""Maps each format to its file extension and export function."""
