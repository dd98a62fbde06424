"""Schedules of pipelines: the order in which stages run the passes of a step, and the cuts of a model into parts.

A stage has one part of the model, or several parts that are `stages` apart (interleaved; Narayanan et al., 2021): part
p belongs to stage p mod S. If embeddings are tied to the output layer, the last stage can also hold the layers before
the blocks, as part -1. It then sends embedded tokens, which are far fewer bytes than the gradient of a large
vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

from shoestring.planning.step import StagePass

Schedule = Literal["1f1b", "gpipe"]
_PASS = re.compile(r"(?P<way>[fb])(?P<part>-?\d+)\.(?P<micro>\d+)")


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
    """The passes of each stage in order, computed as if a backward pass took as long as two forward passes.

    A stage runs a backward pass as soon as one is possible. Otherwise it runs a forward pass, unless the number of its
    micro-batches in flight has reached the limit of the schedule. "1f1b" (PipeDream-Flush; Narayanan et al., 2021)
    limits this number; "gpipe" (Huang et al., 2019) does not.

    Args:
        stages: the number S of stages. chunks: number of parts in each stage. micro: number of micro-batches in a step.
        ahead: time that a message takes, in units of a forward pass. For each link between it and the last stage, a
            stage may have this many more micro-batches in flight, so that it need not wait for messages.
        first: index of the first part; part -1 is assumed to take no time.
    """
    parts = range(first, stages * chunks)
    forward = dict.fromkeys(parts, 0)  # part -> number of passes begun
    backward = dict.fromkeys(parts, 0 if training else micro)
    ends: dict[Pass, int] = {}
    free, result = [0] * stages, tuple(list[Pass]() for _ in range(stages))
    limits = [
        math.inf if schedule == "gpipe" or not training else _held(stages, chunks, stage, ahead)
        for stage in range(stages)
    ]

    def ready(one: Pass, now: int) -> bool:
        turns = one.backward and one.part == parts[-1]  # the last part's backward pass follows its own forward pass
        needed = one._replace(backward=False) if turns else one._replace(part=one.part + (1 if one.backward else -1))
        delay = 0 if needed.part == one.part else ahead
        return needed.part < first or ends.get(needed, now + 1) + delay <= now

    def choose(stage: int, now: int) -> Pass | None:
        own = [part for part in parts if part % stages == stage]
        # Embeddings are computed in no time, so they could all be sent early. They are sent one by one, because other
        # messages would have to wait behind them.
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
            waiting &= free[stage] + ahead <= now  # the stage computes nothing, and none of its messages is in flight
            while free[stage] <= now and (one := choose(stage, now)) is not None:
                (backward if one.backward else forward)[one.part] += 1
                free[stage] = ends[one] = now if one.part < 0 else now + (2 if one.backward else 1)
                result[stage].append(one)
                waiting = False
        if waiting:  # deadlock: all stages are at their limits; happens with interleaved parts and few micro-batches
            limits = [limit + 1 for limit in limits]
        else:
            now += 1
    return result


def write_order(order: Sequence[StagePass]) -> str:
    """The passes of a stage as text: `f0.3` is the forward pass of micro-batch 3 through part 0, `b0.3` its backward
    pass."""
    return " ".join(f"{'b' if one.backward else 'f'}{one.part}.{one.micro}" for one in order)


@cache
def read_orders(texts: tuple[str, ...], stages: int, chunks: int, first: int = 0) -> tuple[list[Pass], ...]:
    """Read the passes of each stage from texts that `write_order` wrote.

    Args:
        first: index of the first part.

    Raises:
        ValueError: the passes are not those of a training step with this number of stages, or the stages wait for each
            other.
    """
    if len(texts) != stages:
        raise ValueError(f"there are {len(texts)} orders for {stages} stages")
    every = tuple([_read_pass(word) for word in text.split()] for text in texts)
    micro, parts = 1 + max((one.micro for order in every for one in order), default=-1), range(first, stages * chunks)
    for stage, order in enumerate(every):
        wanted = {
            Pass(part, m, way)
            for part in parts
            if part % stages == stage
            for m in range(micro)
            for way in (False, True)
        }
        if len(order) != len(wanted) or {*order} != wanted:
            odd = sorted({*order} ^ wanted)[:1]
            raise ValueError(f"stage {stage} needs each of its {len(wanted)} passes once: see {write_order(odd)}")
    done, places, passes = set[Pass](), [0] * stages, {one for order in every for one in order}
    while len(done) < len(passes):
        before = len(done)
        for stage, order in enumerate(every):
            for one in order[places[stage] :]:
                needed = {one._replace(part=one.part + (1 if one.backward else -1))} & passes
                needed |= {one._replace(backward=False)} if one.backward else set()
                if not needed <= done:
                    break
                done.add(one)
                places[stage] += 1
        if len(done) == before:
            raise ValueError("the stages wait for each other")
    return every


def _read_pass(word: str) -> Pass:
    read = _PASS.fullmatch(word)
    if read is None:
        raise ValueError(f"`{word}` is no pass, such as f0.3 or b0.3")
    return Pass(int(read["part"]), int(read["micro"]), read["way"] == "b")


def _held(stages: int, chunks: int, stage: int, ahead: int) -> int:
    """Maximum number of passes, over micro-batches and parts, whose activations a stage may hold."""
    links = stages - stage - 1
    if chunks == 1:
        return links + 1 + ahead * links
    return 2 * links + (chunks - 1) * stages + 1 + ahead * stages


def balanced(costs: Sequence[float], parts: int, sends: Sequence[float] = ()) -> list[range]:
    """Cut a sequence into consecutive parts, none empty, so that the most expensive part is as cheap as possible.

    Among such cuts, a cut with a small sum of squares of the parts' costs is chosen.

    Args:
        sends: cost of sending the activations at each boundary: before each item, and after the last. A part sends
            activations to the next part and gradients to the previous part, while it computes.

    Raises:
        ValueError: there are fewer costs than parts.
    """
    count = len(costs)
    if not 0 < parts <= count:
        raise ValueError(f"{count} costs do not fill {parts} parts")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    def slowest(start: int, stop: int) -> float:
        """The cost of a part's work, or of its messages if they take longer."""
        if not sends:
            return before[stop] - before[start]
        sent = (sends[start] if start else 0.0) + (sends[stop] if stop < count else 0.0)
        return max(before[stop] - before[start], sent)

    # best[n] describes the best cut of the first n costs: its most expensive part, its sum of squares, and its cuts
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
