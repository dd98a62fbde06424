"""Predicts the time and the memory of a step from the `StepPlan` that features have described.

For each pipeline stage, one rank is simulated, and the memory that this rank holds is summed up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from shoestring.core.trace import Trace
from shoestring.planning.schedule import ROUNDS, schedule
from shoestring.planning.simulate import Task, makespan, simulate
from shoestring.planning.step import Links, PartCosts, StagePass, StepPlan


@dataclass(frozen=True)
class Predicted:
    """The predicted trace of a step, and `peaks`: the peak memory, in bytes, of a rank of each stage."""

    trace: Trace
    peaks: tuple[float, ...]

    @cached_property
    def seconds(self) -> float:
        return makespan(self.trace)

    @property
    def peak(self) -> float:
        return max(self.peaks)

    def busy(self) -> list[float]:
        """Seconds that a rank of each stage computes, without waiting."""
        seconds = [0.0] * len(self.peaks)
        for span in self.trace.spans:
            if span.kind == "compute":
                seconds[stage_of(span.name)] += span.stop - span.start
        return seconds


def stage_of(name: str) -> int:
    """The stage of a task, read from the task's name."""
    return int(name.rpartition(" of stage ")[2])


def predict(step: StepPlan, links: Links, slowdown: Mapping[str, float] | None = None) -> Predicted:
    """Predict the time and the memory of a step.

    Args:
        slowdown: see `simulate`; ignored for pipelines, because their stages compute on different processors.
    """
    trace = simulate(tasks_of(step, links), slowdown if step.stages == 1 else None)
    return Predicted(trace, peaks(step))


def tasks_of(step: StepPlan, links: Links) -> list[Task]:
    """The tasks of a step, of one rank of each stage, in the order in which each resource does them.

    `after` lists everything that a task waits for, so `planning.schedule` may reorder the tasks.
    """
    building = _Building(step, links)
    building.passes()
    return building.tasks


def with_order(step: StepPlan, links: Links, more: int = 0, rounds: int = ROUNDS) -> StepPlan:
    """Reorder the passes of the stages, so that the step may end earlier.

    Args:
        more: number of micro-batches of each part whose activations a stage may hold in addition to those that it holds
            in the given order. rounds: see `schedule`.
    """
    building = _Building(step, links, {part: count + more for part, count in in_flight(step).items()})
    building.passes()
    planned = schedule(building.tasks, rounds)
    passes: list[list[StagePass]] = [[] for _ in range(step.stages)]
    every = {(one.part, one.backward, one.micro): one for order in step.passes for one in order}
    counts = Counter[tuple[int, bool]]()
    for index in planned.order:
        if index in building.begins:
            stage, one = building.begins[index]
            kind = one.part, one.backward
            # All micro-batches take equally long, so they stay in the order of their numbers whatever the schedule
            # orders.
            passes[stage].append(every[one.part, one.backward, counts[kind]])
            counts[kind] += 1
    return replace(step, passes=passes)


# -- time ------------------------------------------------------------------------------------------------------------


_SUMMED = 0.3
"""Fraction of a block's forward pass that is spent in split layers whose outputs ranks add up: 3.7 of the 12 products
of width d x d in a transformer's block."""
_WEIGHT_GRADIENTS = 0.35
"""Fraction of a block's backward pass that computes the weight gradients of the other layers."""
_PIECE = 2**18
"""Bytes of a message when updated weights are gathered; slow links carry more bytes a second in short messages."""


class _Building:
    """Builds the tasks of a step, for one rank of each stage."""

    def __init__(self, step: StepPlan, links: Links, limits: Mapping[int, int] | None = None) -> None:
        self.step, self.links, self.model = step, links, step.model
        self.tasks: list[Task] = []
        self.begins = dict[int, tuple[int, StagePass]]()  # first task of a pass -> its stage, and the pass
        self.released = dict[int, list[int]]()  # part -> last tasks of its backward passes, which free activations
        self.limits = limits or {}  # part -> micro-batches that may be in flight in any order of the tasks
        self.ends = dict[tuple[int, int, bool], int]()  # pass -> index of its last task, which delivers its result
        self.waiting = {stage: [0.0] * len(step.averages) for stage in range(step.stages)}  # bytes in unsent buckets
        self.wires = {stage: list[int]() for stage in range(step.stages)}  # transfers that the optimizer must wait for
        self._work = dict[tuple[int, bool], list[_Piece]]()  # (part, backward) -> work, equal for all micro-batches

    def passes(self) -> None:
        """Add the passes of all stages, in each stage's own order, and then the optimizer updates."""
        step = self.step
        places = [0] * step.stages
        while any(place < len(order) for place, order in zip(places, step.passes, strict=True)):
            before = [*places]
            for stage, order in enumerate(step.passes):
                while places[stage] < len(order) and self._add_pass(stage, order[places[stage]]):
                    places[stage] += 1
            if places == before:
                raise ValueError("the stages wait for each other")
        for stage in range(step.stages):
            self._update(stage)

    def _task(
        self,
        what: str,
        kind: Literal["compute", "wire"],
        seconds: float,
        resource: str,
        stage: int,
        after: Iterable[int] = (),
        nbytes: float = 0,
    ) -> int:
        name = f"{what} of stage {stage}"
        self.tasks.append(Task(name, kind, seconds, f"{resource} {stage}", tuple(sorted(after)), int(nbytes)))
        return len(self.tasks) - 1

    def _add_pass(self, stage: int, one: StagePass) -> bool:
        """Add a pass if the pass that it depends on was already added; return whether the pass was added."""
        step, last = self.step, len(self.step.parts) - 1
        needed: tuple[int, int, bool] | None
        if one.backward:
            needed = (one.part, one.micro, False) if one.part == last else (one.part + 1, one.micro, True)
        else:
            needed = (one.part - 1, one.micro, False) if one.part > step.first else None
        if needed is not None and needed not in self.ends:
            return False
        after = [self.ends[needed]] if needed is not None else []
        begun = len(self.tasks)
        ended = self._compute(stage, one, [*after, *self._waits(one)])
        first = next(index for index in range(begun, len(self.tasks)) if self.tasks[index].kind == "compute")
        self.begins[first] = stage, one
        if one.backward:
            self.released.setdefault(one.part, []).append(ended)
        crosses = one.part > step.first if one.backward else one.part < last
        if crosses and step.stages > 1:
            part = one.part - 1 if one.backward else one.part  # sends the results of `part`, or their gradients
            nbytes = step.hidden(step.parts[part].stop if part >= 0 else 0)
            seconds = self.links.seconds("message", step.group(step.over_stages), nbytes)
            # Activations and gradients share the host's outgoing link.
            ended = self._task("messages", "wire", seconds, "egress", stage, [ended], nbytes)
        self.ends[one.part, one.micro, one.backward] = ended
        return True

    def _waits(self, one: StagePass) -> list[int]:
        """Tasks that a pass waits for in any order of tasks, besides the pass that feeds it.

        A backward pass that averages gradients waits until the gradients of all micro-batches are added up. A forward
        pass that would exceed the limit of micro-batches in flight waits for a backward pass that frees activations.
        """
        released = self.released.get(one.part, [])
        if one.backward:
            return released if self.step.averages and one.micro == self.step.micro - 1 else []
        begun = sum(part == one.part and not backward for part, _, backward in self.ends) if self.limits else 0
        limit = self.limits.get(one.part, begun + 1)
        return [released[begun - limit]] if begun >= limit else []

    def _compute(self, stage: int, one: StagePass, after: Sequence[int]) -> int:
        """Add the tasks of a pass; returns the index of the last one."""
        step = self.step
        averaged = one.backward and any(a.every or one.micro == step.micro - 1 for a in step.averages)
        pieces = self._work.get((one.part, one.backward)) or [*self._pieces(one)]
        self._work[one.part, one.backward] = pieces
        if not averaged and not step.gathered:
            pieces = [
                _Piece(
                    sum(piece.seconds for piece in pieces),
                    sum(piece.exchanged for piece in pieces),
                    sum(piece.calls for piece in pieces),
                    sum(piece.trained for piece in pieces),
                )
            ]
        name = "backward" if one.backward else "forward"
        ended, gathers = -1, list[int]()
        for number, piece in enumerate(pieces):
            waits = [*after] if not number else [ended]
            if step.gathered:
                if not number:
                    gathers.append(self._gather(stage, piece, one, []))
                if number + 1 < len(pieces):  # gather the next block's weights while this block computes
                    gathers.append(self._gather(stage, pieces[number + 1], one, [ended] if ended >= 0 else []))
                waits += [gathers[number]] if gathers[number] >= 0 else []
            ended = self._task(name, "compute", piece.seconds, "stage", stage, waits)
            if piece.calls:
                seconds = self._activations(piece, backward=one.backward)
                ended = self._task(
                    "activations of split layers", "wire", seconds, "stage", stage, [ended], piece.exchanged
                )
            if averaged:
                self._average(stage, one, piece.trained, ended, number == len(pieces) - 1)
        return ended

    def _activations(self, piece: _Piece, *, backward: bool) -> float:
        """Seconds that ranks with split layers spend in a pass on exchanging activations while they compute nothing."""
        group, tiles = self.step.group(self.step.over_ways), self.step.tiles
        whole = piece.calls * self.links.seconds("all-reduce", group, piece.exchanged / piece.calls)
        if tiles == 1:
            return whole
        if backward:  # exchanged while weight gradients are computed
            return max(whole - _WEIGHT_GRADIENTS * piece.seconds, 0.0)
        parted = piece.calls * tiles * self.links.seconds("all-reduce", group, piece.exchanged / piece.calls / tiles)
        return max(parted - _SUMMED * piece.seconds * (tiles - 1) / tiles, parted / tiles)

    def _pieces(self, one: StagePass) -> Iterator[_Piece]:
        """Yield the work of a pass, block by block, in the order of execution."""
        step, model = self.step, self.model
        blocks = step.parts[one.part] if one.part >= 0 else range(0)
        parts: list[tuple[int | None, PartCosts]] = [(index, model.blocks[index]) for index in blocks]
        if one.part == step.first:
            parts.insert(0, (None, model.before))
        if one.part == len(step.parts) - 1:
            parts.append((None, model.behind))
        for index, part in reversed(parts) if one.backward else parts:
            seconds = self._seconds(part, index, backward=one.backward)
            if one.backward and index in step.recomputed:
                seconds += self._seconds(part, index, backward=False)
            # With split layers, a pass through a block adds up the ranks' outputs by two all-reduces.
            calls = 2 if index is not None and step.ways > 1 else 0
            exchanged = calls * step.hidden(index) if index is not None else 0.0
            trained = part.trained + (model.tied if part is model.before and step.sums_tied else 0)  # bytes
            trained /= 1 if index is None and step.whole_vocabulary else step.ways
            yield _Piece(seconds, exchanged, calls, trained)

    def _seconds(self, part: PartCosts, index: int | None, *, backward: bool) -> float:
        """Seconds of a pass through a block; through the layers outside the blocks if `index` is None."""
        step, model = self.step, self.model
        seconds = model.at(part.backward if backward else part.forward, step.samples)
        if step.ways == 1 or (index is None and (step.whole_vocabulary or part is model.before)):
            return seconds
        # Norms and additions are not split over ranks. They read and write the hidden states about ten times.
        whole = 0.0 if index is None else 10 * (1 + backward) * step.hidden(index) / model.moved
        whole = min(whole, seconds)
        return whole + (seconds - whole) / step.ways

    # -- exchanges of gradients and weights ----------------------------------------------------------------------------

    def _gather(self, stage: int, piece: _Piece, one: StagePass, after: Sequence[int]) -> int:
        step = self.step
        if not piece.trained or (one.backward and step.gathers < 2):
            return -1
        group = step.group(step.gathered)
        seconds = self.links.seconds("all-gather", group, piece.trained / group.ranks)
        return self._task("weights", "wire", seconds, "wire", stage, after, piece.trained)

    def _average(self, stage: int, one: StagePass, nbytes: float, ended: int, last: bool) -> None:
        """Add exchanges of the gradients that a piece of a backward pass has computed, once buckets are full."""
        for number, averaging in enumerate(self.step.averages):
            if not (averaging.every or one.micro == self.step.micro - 1):
                continue
            waiting = self.waiting[stage]
            waiting[number] += nbytes / averaging.shard
            if waiting[number] and (last or waiting[number] >= averaging.bucket):
                sent, waiting[number] = waiting[number], 0.0
                lane = len(self.wires[stage]) % averaging.lanes
                pieces = max(round(sent / averaging.bucket), 1) if 0 < averaging.bucket < sent else 1
                group = self.step.group(averaging.over)
                seconds = pieces * self.links.seconds(averaging.kind, group, sent / pieces)
                resource = "wire" if averaging.lanes == 1 else f"wire {lane}"
                self.wires[stage].append(self._task("gradients", "wire", seconds, resource, stage, [ended], sent))

    def _update(self, stage: int) -> None:
        """Add the optimizer step of a stage, which starts once the stage's gradients are averaged."""
        step, model = self.step, self.model
        own = [index for index, task in enumerate(self.tasks) if task.resource == f"stage {stage}"]
        after = [*self.wires[stage], *own]
        weights = _weights_of(step, stage)
        if step.sums_tied and stage in (0, step.stages - 1):
            seconds = self.links.seconds("swap", step.group(step.over_stages), model.tied)
            after = [self._task("tied weights", "wire", seconds, "egress", stage, after, model.tied)]
        seconds = model.optimizer * weights / step.divided["optimizer"]
        ended = self._task("optimizer", "compute", seconds, "stage", stage, after)
        if step.regathered:
            group = step.group(step.regathered)
            pieces = max(round(weights / group.ranks / _PIECE), 1)
            seconds = pieces * self.links.seconds("all-gather", group, weights / group.ranks / pieces)
            self._task("updated weights", "wire", seconds, "wire", stage, [ended], weights)


def in_flight(step: StepPlan) -> dict[int, int]:
    """For each part of a pipeline, the number of micro-batches whose activations its stage holds at most."""
    most = dict[int, int]()
    for order in step.passes if step.stages > 1 else ():
        now = Counter[int]()
        for one in order:
            now[one.part] += -1 if one.backward else 1
            most[one.part] = max(most.get(one.part, 1), now[one.part])
    return most


class _Piece(NamedTuple):
    """Work of a block in a pass: seconds, bytes of activations exchanged in `calls` calls, and bytes of its weights."""

    seconds: float
    exchanged: float
    calls: int
    trained: float


# -- memory ----------------------------------------------------------------------------------------------------------


def _own(step: StepPlan, stage: int) -> list[int]:
    return [part for part in range(step.first, len(step.parts)) if part % step.stages == stage]


def _weights_of(step: StepPlan, stage: int) -> float:
    """Bytes of trained weights of a rank of a stage, before they are sharded over replicas."""
    model, own = step.model, _own(step, stage)
    blocks = sum(model.blocks[index].trained for part in own if part >= 0 for index in step.parts[part])
    around = 1 if step.whole_vocabulary else step.ways
    first, last = step.first in own, len(step.parts) - 1 in own
    total = blocks / step.ways + first * model.before.trained / around + last * model.behind.trained / around
    return total + (model.tied / around if first and not last else 0.0)


def peaks(step: StepPlan) -> tuple[float, ...]:
    """The peak memory, in bytes, of a rank of each stage."""
    return tuple(_peak(step, stage) for stage in range(step.stages))


def _peak(step: StepPlan, stage: int) -> float:
    """Bytes that a rank of a stage holds at its peak: weights, gradients, optimizer state and activations."""
    model, own, last = step.model, _own(step, stage), len(step.parts) - 1
    weights = _weights_of(step, stage)
    frozen = sum(model.blocks[index].frozen for part in own if part >= 0 for index in step.parts[part])
    frozen += model.before.frozen * (step.first in own) + model.behind.frozen * (last in own)
    gradients = weights / step.divided["gradients"]
    state = weights / step.divided["parameters"] + gradients + model.state * weights / step.divided["optimizer"]
    if step.buckets and step.micro > 1:
        state += gradients
    held = {part: _held(step, part) for part in own}
    transient = max((_transient(step, part) for part in own), default=0.0)
    most = now = 0.0
    for one in step.passes[stage]:
        if one.backward:
            now -= held[one.part]
        else:
            now += held[one.part]
        most = max(most, now)
    gathered = max((part.trained for part in (*model.blocks, model.behind)), default=0) if step.gathered else 0.0
    return state + frozen / step.ways + most + transient + 2 * gathered


def _held(step: StepPlan, part: int) -> float:
    """Bytes of activations that a micro-batch keeps between its forward and backward pass through a part."""
    model = step.model
    total = model.at(model.before.held, step.samples) if part == step.first else 0.0
    total += model.at(model.behind.held, step.samples) if part == len(step.parts) - 1 else 0.0
    for index in step.parts[part] if part >= 0 else ():
        whole = step.hidden(index)
        held = model.at(model.blocks[index].held, step.samples)
        total += whole if index in step.recomputed else whole + max(held - whole, 0.0) / step.ways
    return total


def _transient(step: StepPlan, part: int) -> float:
    """Bytes that a backward pass holds briefly: gradients of the loss's inputs, or of a block's activations."""
    model, sizes = step.model, [0.0]
    if part == len(step.parts) - 1:
        sizes.append(2 * model.scored * step.samples)
    for index in step.parts[part] if part >= 0 else ():
        held = model.at(model.blocks[index].held, step.samples) / step.ways
        sizes.append(held if index in step.recomputed else held / 2)
    return max(sizes)
