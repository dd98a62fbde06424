"""Analysis of exposed communication: steps wait for collectives that could be merged or overlapped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoestring.figures import nanoseconds, percent
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

_COLLECTIVE = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py\t"
    r"(?!init_process|new_|destroy_|_new|get_|is_|isend|irecv|batch_isend_irecv)"
)
_BEGUN = re.compile(r"/torch/distributed/distributed_c10d\.py\t(isend|irecv|batch_isend_irecv)$")
"""Matches non-blocking functions of torch.distributed, which return before the data has arrived."""
_BLOCKS = re.compile(r"/torch/distributed/distributed_c10d\.py\t(send|recv)$")
_OPERATORS = re.compile(r"^(c10d::|_c10d_functional::|gloo:|nccl:|mpi:|communication)")


_DISTRIBUTED = re.compile(r"/torch/nn/parallel/distributed\.py\t")
_ENGINE = re.compile(r"\t_engine_run_backward$")
_ACCUMULATE = re.compile(r"AccumulateGrad$")
_AVERAGED = re.compile(r"ddp\.reducer::copy_bucket_to_grad$")
_BEGINS = re.compile(r"\b(batch_isend_irecv|isend|irecv)\(|async_op\s*=\s*True")
ALWAYS = 0.9
"""If at least this fraction of the computed gradients is averaged, every backward pass is assumed to average them."""
IN_BACKWARD = 0.32
"""Waits are reported if autograd's engine is outside backward functions for at least this share of the profiled
time."""
FARTHEST = 40
"""Maximum distance, in lines, between the line that starts a communication and the line that waits for it."""
SINGLE = 0.5
"""A single collective per step is reported if overlapping it is expected to save this share of the profiled time."""
AT_ONCE = 0.2
"""A wait for communication that begins just before it is reported if it takes this share of the profiled time."""
TINY = 1024
"""Messages of at most this many elements are assumed to take mostly latency."""


def exposed_communication(reading: Reading) -> Iterator[Finding]:
    """Find lines on which the program waits for other ranks."""
    tree = reading.tree
    named = np.array([bool(_COLLECTIVE.search(name)) for name in tree.names])
    operators = np.array([bool(_OPERATORS.search(name)) for name in tree.names])
    wanted = (tree.kind == NodeKind.PYTHON) & named[tree.name]
    wanted |= np.isin(tree.kind, (NodeKind.OPERATOR, NodeKind.SPAN)) & operators[tree.name]
    wanted &= ~reading.under(_BEGUN) | reading.under(_BLOCKS)
    waits: dict[Place, list[int]] = {}
    for node in reading.topmost(wanted):
        place = reading.place(node)
        if place[0] and not reading.behind[node]:
            waits.setdefault(place, []).append(node)
    for place in reading.python if (operators[tree.name] & (tree.count > 0)).any() else ():
        if ".wait(" in reading.text(place) and place not in waits:
            waits[place] = []
    beside = set[Place]()
    for place, nodes in waits.items():
        if place in beside:
            continue
        taken = int(tree.inclusive[nodes].sum()) if nodes else reading.python.get(place, 0)
        if ".wait(" in reading.text(place) and nodes:
            taken += reading.python.get(place, 0)
        sent = [call for call in reading.calls if call.place == place and _OPERATORS.search(call.name)]
        calls = sum(call.count for call in sent)
        small = _beside(reading, sent, waits)
        beside |= small
        taken += sum(int(tree.inclusive[waits[other]].sum()) for other in small)
        calls_per_step = max(calls / _steps(reading, sent), 1.0) + len(small)
        many = calls_per_step > 1.5
        gain = taken * (1 - 0.5 / calls_per_step) if many else taken
        waiting = ".wait(" in reading.text(place)
        if not many and waiting and (nodes or _meanwhile(reading, place)):
            continue  # the communication was started earlier, and overlaps with the work since then
        saves = reading.gain("communication", gain, nodes)
        if reading.share(taken) < AT_ONCE if waiting and not many else saves.expected < (MATTERS if many else SINGLE):
            continue
        fewer = "Send tensors together, in buckets: one collective instead of many. " if many else ""
        yield reading.finding(
            "the step waits for communication",
            place,
            f"{calls} collectives take {reading.spent(taken)}, on this line,"
            f" about {calls_per_step:.0f} a step, and nothing overlaps them.",
            f"{fewer}Begin them early (async_op=True, DistributedDataParallel) and wait only where the result is used.",
            saves if many else replace(saves, told=False),  # it is unknown how much other work could overlap
            nodes,
        )
    yield from _in_backward(reading)


def _in_backward(reading: Reading) -> Iterator[Finding]:
    """Find waits in the backward pass of DistributedDataParallel: the engine's time outside backward functions."""
    tree = reading.tree
    if not reading.matching(_DISTRIBUTED).any():
        return
    accumulates = reading.matching(_ACCUMULATE) & (tree.kind == NodeKind.BACKWARD)
    averaged = tree.count[reading.matching(_AVERAGED)].sum() / max(tree.count[accumulates].sum(), 1)
    if 0 < averaged < ALWAYS:
        return  # the program accumulates gradients over several backward passes, and averages them once
    engine = reading.behind & reading.matching(_ACCUMULATE)  # here DDP sends full buckets
    engine |= reading.matching(_ENGINE) & (tree.kind == NodeKind.PYTHON)
    waits: dict[Place, list[int]] = {}
    for node in np.flatnonzero(engine & (tree.own > 0)).tolist():
        waits.setdefault(reading.place(node), []).append(node)
    for place, nodes in waits.items():
        taken = int(tree.own[nodes].sum())
        if reading.share(taken) >= IN_BACKWARD and place[0]:
            yield reading.finding(
                "the backward pass waits for the averaging of gradients",
                place,
                f"After or between its functions, the backward pass waits {nanoseconds(taken)},"
                f" {percent(reading.share(taken))} of the time.",
                "Average less often (no_sync() while gradients are accumulated), in buckets that are sent while others"
                " are computed (bucket_cap_mb), or in fewer bytes (a compressing communication hook).",
                None,
                nodes,
            )


def _steps(reading: Reading, sent: Sequence[OperatorCall]) -> int:
    """Number of steps; if unknown, it is taken from the least frequent call in the functions that communicate."""
    if reading.steps > 1:
        return reading.steps
    counts: dict[tuple[int, int], list[int]] = {call.frame: [] for call in sent}
    for call in reading.calls:
        if call.frame in counts:
            counts[call.frame].append(call.count)
    return sum(min(of_function) for of_function in counts.values()) or 1


def _beside(reading: Reading, sent: Sequence[OperatorCall], waits: Mapping[Place, Sequence[int]]) -> set[Place]:
    """Other lines in the same function that wait for small messages, so that latencies add up in each step.

    Only messages in the same direction count, because a request and its answer cannot be merged into one message.
    """
    if not sent or any(call.elements > TINY or call.count < reading.steps for call in sent):
        return set()
    frames = {call.frame for call in sent}
    others = [call for call in reading.calls if call.place in waits and call.frame in frames and call not in sent]
    ways = {_way(call) for call in sent}
    small = (call for call in others if call.elements <= TINY and _way(call) in ways)
    return {call.place for call in small if call.place != sent[0].place}


def _way(call: OperatorCall) -> str:
    """The direction of a point-to-point message, "send" or "recv"; empty for collectives."""
    return next((way for way in ("send", "recv") if way in call.name), "")


def _meanwhile(reading: Reading, place: Place) -> bool:
    """Whether the function computes anything between starting a communication and waiting for it at `place`."""
    tree, (file, line) = reading.tree, place
    begun = [number for number in range(line - FARTHEST, line) if _BEGINS.search(reading.text((file, number)))]
    begins = reading.matching(_BEGUN)
    for node in range(len(tree) - 1, 0, -1):
        begins[tree.parent[node]] |= begins[node]
    begun += [
        number
        for node in np.flatnonzero(begins & (reading.lines == np.arange(len(tree)))).tolist()
        for at, number in [reading.place(node)]
        if at == file and line - FARTHEST < number < line
    ]
    begun.sort()
    if not begun:
        return False
    waiting = (tree.kind == NodeKind.PYTHON) & (tree.line == line)
    waiting &= np.array([name.startswith(f"{file}\t") for name in tree.names])[tree.name]
    between = (tree.kind == NodeKind.PYTHON) & (tree.line > begun[-1]) & (tree.line < line) & (tree.inclusive > 0)
    return any(
        bool((between & (tree.parent == tree.parent[node]) & (tree.name == tree.name[node])).any())
        for node in np.flatnonzero(waiting)
    )
