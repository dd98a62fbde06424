"""In which order the stages of a pipeline run the passes of a step, and where a model is cut into parts.

A stage has one part of the model, or several parts that are `stages` apart (interleaved; Narayanan et al., 2021): part
p belongs to stage p mod S. Where embeddings are tied to the output layer, the last stage also has what lies before the
blocks, as part -1: it then sends embeddings, which are far less than the gradient of a large vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

Schedule = Literal["1f1b", "gpipe"]


class Pass(NamedTuple):
    """A forward or backward pass of a micro-batch through a part of the model."""

    part: int
    micro: int
    backward: bool


@cache
def orders(
    stages: int,
    chunks: int,
    micro: int,
    schedule: Schedule,
    ahead: int = 0,
    training: bool = True,
    first: Literal[-1, 0] = 0,
) -> tuple[list[Pass], ...]:
    """The passes of each stage in their order, as if a backward pass took as long as two forward passes.

    A stage runs a backward pass as soon as one can, and else a forward pass, unless as many micro-batches are under way
    as "1f1b" (PipeDream-Flush; Narayanan et al., 2021) holds activations of. "gpipe" (Huang et al., 2019) holds all.

    Args:
        stages: S. chunks: parts of each stage. micro: micro-batches of the step.
        ahead: how long a message takes, in forward passes. A stage has as many more micro-batches under way for each
            link to the last stage, so that it need not wait for messages.
        first: number of the first part; part -1 takes no time.
    """
    parts = range(first, stages * chunks)
    forward = dict.fromkeys(parts, 0)  # passes begun, by part
    backward = dict.fromkeys(parts, 0 if training else micro)
    ends: dict[Pass, int] = {}
    free, result = [0] * stages, tuple(list[Pass]() for _ in range(stages))
    limits = [
        math.inf if schedule == "gpipe" or not training else _held(stages, chunks, stage, ahead)
        for stage in range(stages)
    ]

    def ready(one: Pass, now: int) -> bool:
        if one.backward and one.part == parts[-1]:
            needed = Pass(one.part, one.micro, False)
        else:
            needed = Pass(one.part + (1 if one.backward else -1), one.micro, one.backward)
        delay = 0 if needed.part == one.part else ahead
        return needed.part < first or ends.get(needed, now + 1) + delay <= now

    def choose(stage: int, now: int) -> Pass | None:
        own = [part for part in parts if part % stages == stage]
        # Embeddings take no time: they go out early, but not all at once, where other messages would wait behind them.
        if -1 in own and (sent := forward[-1]) < min(micro, forward[0] + ahead + 2):
            return Pass(-1, sent, False)
        begun, ended = (sum(counts[part] for part in own if part >= 0) for counts in (forward, backward))
        if training and (schedule == "1f1b" or begun == micro * chunks):
            for part in reversed(own):
                if backward[part] < forward[part] and ready(one := Pass(part, backward[part], True), now):
                    return one
        if begun - ended >= limits[stage] and training:
            return None
        nexts = (Pass(part, forward[part], False) for part in own if part >= 0 and forward[part] < micro)
        possible = [one for one in nexts if ready(one, now)]
        return min(possible, key=lambda one: (one.micro // stages, one.part, one.micro), default=None)

    now = 0
    while any(count < micro for count in (*forward.values(), *backward.values())):
        waiting = True
        for stage in range(stages):
            waiting &= free[stage] + ahead <= now  # nothing is computed, and no message is under way
            while free[stage] <= now and (one := choose(stage, now)) is not None:
                (backward if one.backward else forward)[one.part] += 1
                free[stage] = ends[one] = now if one.part < 0 else now + (2 if one.backward else 1)
                result[stage].append(one)
                waiting = False
        if waiting:  # all stages hold as much as they may: only with interleaved parts and few micro-batches
            limits = [limit + 1 for limit in limits]
        else:
            now += 1
    return result


def _held(stages: int, chunks: int, stage: int, ahead: int) -> int:
    """Number of micro-batches, times parts, whose activations a stage holds at most."""
    links = stages - stage - 1
    if chunks == 1:
        return links + 1 + ahead * links
    return 2 * links + (chunks - 1) * stages + 1 + ahead * stages


def balanced(costs: Sequence[float], parts: int, sends: Sequence[float] = ()) -> list[range]:
    """Cut a sequence into consecutive parts, none empty, so that the most expensive part is as cheap as possible.

    Among such cuts, the sum of squares of the parts' costs is small.

    Args:
        sends: what it costs to send the results before each item, and those of the last one, while parts compute; a
            part sends what it computes to the next one, and as much back to the one before.

    Raises:
        ValueError: there are too few costs.
    """
    count = len(costs)
    if not 0 < parts <= count:
        raise ValueError(f"{count} costs do not fill {parts} parts")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    def slowest(start: int, stop: int) -> float:
        """The cost of a part, or that of its messages."""
        if not sends:
            return before[stop] - before[start]
        sent = (sends[start] if start else 0.0) + (sends[stop] if stop < count else 0.0)
        return max(before[stop] - before[start], sent)

    # best[n]: the most expensive part, the sum of squares, and the cuts, of the first n costs in the parts so far
    best: list[tuple[float, float, tuple[int, ...]]] = [
        (slowest(0, n) if n else 0.0, before[n] ** 2, ()) for n in range(count + 1)
    ]
    for part in range(1, parts):
        best = [
            min(
                (
                    max(best[cut][0], slowest(cut, n)),
                    best[cut][1] + (before[n] - before[cut]) ** 2,
                    (*best[cut][2], cut),
                )
                for cut in range(part, n)
            )
            if n > part
            else (math.inf, math.inf, ())
            for n in range(count + 1)
        ]
    cuts = (0, *best[count][2], count)
    return [range(*pair) for pair in pairwise(cuts)]
