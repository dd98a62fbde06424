"""A training step as features describe it before anything is built: what ranks compute, hold and send.

`StepPlan` starts as the step of one process. Each feature that is `Plannable` changes it. `predict` then simulates the
step of one rank of each pipeline stage, and sums up what such a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from shoestring.core.feature import DATA, Feature
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Collective
from shoestring.planning.simulate import Task, makespan, simulate

if TYPE_CHECKING:
    from shoestring.core.world import World

Kind = Literal["all-reduce", "all-gather", "all-to-all", "reduce-scatter", "message", "swap"]


class GroupShape(NamedTuple):
    """Groups of ranks that communicate at the same time: ranks of a group, and hosts that they are on."""

    ranks: int
    hosts: int


def group_over(world: World, axes: Iterable[str]) -> GroupShape:
    """The groups of ranks along mesh axes."""
    axes = [*axes]
    # Ranks are numbered along the mesh, hosts first: a group spans as many hosts as its ranks differ by hosts.
    place = {rank: rank // world.local_size for rank in _members(world, axes)}
    return GroupShape(world.ranks_over(axes), len(set(place.values())))


def _members(world: World, axes: Sequence[str]) -> list[int]:
    """The ranks of the first group along mesh axes."""
    ranks, stride = [0], world.size
    for axis, size in world.axes.items():
        stride //= size
        if axis in axes:
            ranks = [rank + place * stride for rank in ranks for place in range(size)]
    return ranks


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """What a block, or what lies before or behind the blocks, costs a rank while all ranks compute.

    `forward`, `backward` (seconds) and `held` (bytes of results that autograd holds between them) have one entry for
    each number in `ModelCosts.samples`.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    held: tuple[float, ...]
    trained: int
    """Bytes of trained weights."""
    frozen: int = 0
    """Bytes of frozen weights and buffers."""


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """The measured costs of a model's parts. A model without repeated blocks is one part, `behind`."""

    samples: tuple[int, ...]
    """Numbers of samples of a micro-batch that were measured, in increasing order."""
    blocks: tuple[PartCosts, ...]
    before: PartCosts
    behind: PartCosts
    hidden: tuple[int, ...]
    """Bytes of hidden states for a sample: before the first block, and behind each block; empty without blocks."""
    tied: int
    """Bytes of trained weights that are both before and behind the blocks; they count as `behind`."""
    scored: int
    """Bytes of the results that the loss reads, for a sample (logits)."""
    optimizer: float
    """Seconds of an optimizer step for a byte of trained weights."""
    state: float
    """Bytes of optimizer state for a byte of trained weights."""
    moved: float
    """Bytes a second that operators bound by memory read and write."""

    @property
    def trained(self) -> int:
        return sum(part.trained for part in (self.before, *self.blocks, self.behind))

    def at(self, values: Sequence[float], samples: float) -> float:
        """Interpolate measured values, in the number of samples of a micro-batch."""
        sizes = self.samples
        if len(sizes) == 1:
            return values[0] * samples / sizes[0]
        upper = next((place for place, size in enumerate(sizes) if size >= samples and place), len(sizes) - 1)
        low, high = sizes[upper - 1], sizes[upper]
        part = (samples - low) / (high - low)
        return max(values[upper - 1] * (1 - part) + values[upper] * part, 0.0)


class StagePass(Protocol):
    """A forward or backward pass of a micro-batch through a part of the model."""

    @property
    def part(self) -> int: ...

    @property
    def micro(self) -> int: ...

    @property
    def backward(self) -> bool: ...


class PlainPass(NamedTuple):
    part: int
    micro: int
    backward: bool


@dataclass(frozen=True)
class GradientExchange:
    """How gradients are averaged.

    Args:
        kind: kind of the collectives. over: mesh axes.
        bucket: bytes of gradients that travel together, during the backward pass; infinite for all at its end.
        every: in the backward pass of every micro-batch, and not of the last alone.
        lanes: collectives that run at a time.
        shard: number by which the gradients that this averages were divided before.
    """

    kind: Kind
    over: tuple[str, ...]
    bucket: float
    every: bool = False
    lanes: int = 1
    shard: int = 1


@dataclass
class StepPlan:
    """A step of all ranks; features change it.

    Args:
        world: the mesh, with the axes that the features add.
        batch: samples of a step. micro: micro-batches of a replica.
    """

    world: World
    model: ModelCosts
    batch: int
    micro: int
    features: Sequence[Feature] = ()
    device: str = "cpu"
    links: Links | None = None
    """The links between ranks, once they are measured."""
    parts: tuple[range, ...] = ()
    """Blocks of each part of the model; part p is of stage p modulo `stages`."""
    stages: int = 1
    over_stages: tuple[str, ...] = ()
    first: int = 0
    """Number of the part with what lies before the blocks: 0, or -1, which the last stage has."""
    orders: Callable[[int, int], Sequence[Sequence[StagePass]]] | None = None
    """(micro-batches, number of the first part) -> the passes of each stage; None for one pass after the other."""
    ways: int = 1
    """Ranks over which each layer is split."""
    over_ways: tuple[str, ...] = ()
    whole_vocabulary: bool = True
    averages: list[GradientExchange] = field(default_factory=list)
    gathered: tuple[str, ...] = ()
    """Mesh axes over which weights are gathered before each use."""
    gathers: int = 0
    """Times that a micro-batch gathers each weight."""
    regathered: tuple[str, ...] = ()
    """Mesh axes over which updated weights are gathered after the optimizer's step."""
    divided: dict[str, int] = field(default_factory=lambda: {"optimizer": 1, "gradients": 1, "parameters": 1})
    """Ranks over which something is divided."""
    buckets: bool = False
    """Whether gradients also lie in buckets."""
    recomputed: frozenset[int] = frozenset()
    """Blocks that are computed again in the backward pass."""

    def __post_init__(self) -> None:
        self.parts = self.parts or (range(len(self.model.blocks)),)

    @property
    def replicas(self) -> int:
        return self.world.ranks_over(DATA)

    @property
    def samples(self) -> float:
        """Samples of a replica's micro-batch."""
        return self.batch / self.replicas / self.micro

    @property
    def sums_tied(self) -> bool:
        """Whether the first and the last stage add up the gradients of tied weights."""
        return self.model.tied > 0 and self.stages > 1 and self.first == 0

    def hidden(self, block: int) -> float:
        """Bytes of hidden states that a block gets for a micro-batch, or that leave the last one."""
        return self.model.hidden[block] * self.samples

    def group(self, axes: Iterable[str]) -> GroupShape:
        return group_over(self.world, axes)

    def average(self, averaging: GradientExchange) -> None:
        """Average gradients over mesh axes, if there are several ranks along them."""
        if self.world.ranks_over(averaging.over) > 1:
            self.averages.append(averaging)

    @property
    def collectives(self) -> set[tuple[Kind, tuple[str, ...]]]:
        """The collectives of the step, with the mesh axes that they are over."""
        used: list[tuple[Kind, tuple[str, ...]]] = [
            *((one.kind, one.over) for one in self.averages),
            ("message", self.over_stages),
            ("swap", self.over_stages if self.model.tied else ()),  # whether they are summed is a choice
            ("all-reduce", self.over_ways),
            ("all-gather", self.gathered),
            ("all-gather", self.regathered),
        ]
        return {(kind, axes) for kind, axes in used if self.group(axes).ranks > 1}


@runtime_checkable
class Plannable(Protocol):
    """A feature that the planner knows how to price."""

    def plan(self, step: StepPlan) -> Feature:
        """Change the step as this feature does; returns the feature with the settings that follow from the costs."""
        ...


class Situation(NamedTuple):
    """What alternatives depend on."""

    world: World
    blocks: int
    """Number of repeated blocks of the model."""
    device: str

    @property
    def two_levels(self) -> bool:
        """Whether there are several hosts of several ranks each."""
        return all(self.world.axes[axis] > 1 for axis in DATA)


@runtime_checkable
class Alternative(Protocol):
    """A kind of feature that the planner may add to a run; the training result stays the same."""

    @classmethod
    def alternatives(cls, situation: Situation) -> Iterable[Feature]:
        """Settings to plan with."""
        ...


@dataclass(frozen=True)
class Links:
    """Measured collectives, by kind and group."""

    speeds: Mapping[tuple[Kind, GroupShape], Collective]

    def seconds(self, kind: Kind, group: GroupShape, nbytes: float) -> float:
        """Seconds of a collective; `nbytes` is what `planning.links.time_collective` calls a message."""
        if group.ranks == 1 or not nbytes:
            return 0.0
        return self.speeds[kind, group].seconds(nbytes)


@dataclass(frozen=True)
class Predicted:
    """A predicted step. `peaks`: bytes that a rank of each stage holds; `sent`: bytes of a rank by kind of exchange."""

    trace: Trace
    peaks: tuple[float, ...]
    sent: Mapping[str, float]

    @cached_property
    def seconds(self) -> float:
        return makespan(self.trace)

    @property
    def peak(self) -> float:
        return max(self.peaks)

    def busy(self, kind: str = "compute") -> list[float]:
        """Seconds that the stages compute."""
        return [
            sum(span.stop - span.start for span in self.trace.spans if span.kind == kind and _stage(span.name) == stage)
            for stage in range(len(self.peaks))
        ]


def _stage(name: str) -> int:
    return int(name.rpartition(" of stage ")[2] or 0)


def predict(step: StepPlan, links: Links, slowdown: Mapping[str, float] | None = None) -> Predicted:
    """Predict the time and the memory of a step.

    Args:
        slowdown: see `simulate`; without effect on pipelines, whose stages compute on different processors.
    """
    building = _Building(step, links)
    building.passes()
    trace = simulate(building.tasks, slowdown if step.stages == 1 else None)
    return Predicted(trace, tuple(_peak(step, stage) for stage in range(step.stages)), building.sent)


# -- time ------------------------------------------------------------------------------------------------------------


_PIECE = 2**18
"""Bytes of the messages in which updated weights are gathered; slow links carry shorter messages faster."""


class _Building:
    """The tasks of a step, for one rank of each stage."""

    def __init__(self, step: StepPlan, links: Links) -> None:
        self.step, self.links, self.model = step, links, step.model
        self.tasks: list[Task] = []
        self.sent = dict[str, float]()
        self.ends = dict[tuple[int, int, bool], int]()  # pass -> index of the task that ends it, or brings its result
        self.waiting = {stage: [0.0] * len(step.averages) for stage in range(step.stages)}  # bytes of a bucket so far
        self.wires = {stage: list[int]() for stage in range(step.stages)}  # what the optimizer waits for

    def passes(self) -> None:
        """Add the passes of all stages, each stage's in its order, and then the updates."""
        step = self.step
        orders: Sequence[Sequence[StagePass]] = (
            step.orders(step.micro, step.first)
            if step.orders
            else [[PlainPass(0, micro, backward) for micro in range(step.micro) for backward in (False, True)]]
        )
        places = [0] * step.stages
        while any(place < len(order) for place, order in zip(places, orders, strict=True)):
            before = [*places]
            for stage, order in enumerate(orders):
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
        if nbytes:
            self.sent[what] = max(self.sent.get(what, 0.0), nbytes)
        return len(self.tasks) - 1

    def _add_pass(self, stage: int, one: StagePass) -> bool:
        """Add a pass if the one that it waits for was added."""
        step, last = self.step, len(self.step.parts) - 1
        needed: tuple[int, int, bool] | None
        if one.backward:
            needed = (one.part, one.micro, False) if one.part == last else (one.part + 1, one.micro, True)
        else:
            needed = (one.part - 1, one.micro, False) if one.part > step.first else None
        if needed is not None and needed not in self.ends:
            return False
        after = [self.ends[needed]] if needed is not None else []
        ended = self._compute(stage, one, after)
        crosses = one.part > step.first if one.backward else one.part < last
        if crosses and step.stages > 1:
            part = one.part - 1 if one.backward else one.part  # whose results they are, or the gradients of these
            nbytes = step.hidden(step.parts[part].stop if part >= 0 else 0)
            seconds = self.links.seconds("message", step.group(step.over_stages), nbytes)
            # Activations and gradients leave a host by the same wire.
            ended = self._task("messages", "wire", seconds, "egress", stage, [ended], nbytes)
        self.ends[one.part, one.micro, one.backward] = ended
        return True

    def _compute(self, stage: int, one: StagePass, after: Sequence[int]) -> int:
        """Add a pass; returns the index of its last task."""
        step = self.step
        averaged = one.backward and any(a.every or one.micro == step.micro - 1 for a in step.averages)
        pieces = [*self._pieces(one)]
        if not averaged and not step.gathered:
            pieces = [
                _Piece(
                    sum(p.seconds for p in pieces), sum(p.exchanged for p in pieces), sum(p.calls for p in pieces), 0.0
                )
            ]
        name = "backward" if one.backward else "forward"
        ended, gathers = -1, list[int]()
        for number, piece in enumerate(pieces):
            waits = [*after] if not number else []
            if step.gathered:
                if not number:
                    gathers.append(self._gather(stage, piece, one, []))
                if number + 1 < len(pieces):  # the next one's weights travel while this one computes
                    gathers.append(self._gather(stage, pieces[number + 1], one, [ended] if ended >= 0 else []))
                waits += [gathers[number]] if gathers[number] >= 0 else []
            ended = self._task(name, "compute", piece.seconds, "stage", stage, waits)
            if piece.calls:
                group = step.group(step.over_ways)
                seconds = sum(
                    self.links.seconds("all-reduce", group, piece.exchanged / piece.calls) for _ in range(piece.calls)
                )
                ended = self._task("activations of split layers", "wire", seconds, "stage", stage, (), piece.exchanged)
            if averaged:
                self._average(stage, one, piece.trained, ended, number == len(pieces) - 1)
        return ended

    def _pieces(self, one: StagePass) -> Iterator[_Piece]:
        """The work of a pass, block by block, in its order."""
        step, model = self.step, self.model
        blocks = step.parts[one.part] if one.part >= 0 else range(0)
        own = [*((index, model.blocks[index]) for index in blocks)]
        parts: list[tuple[int | None, PartCosts]] = [*own]
        if one.part == step.first:
            parts.insert(0, (None, model.before))
        if one.part == len(step.parts) - 1:
            parts.append((None, model.behind))
        for index, part in reversed(parts) if one.backward else parts:
            seconds = self._seconds(part, index, backward=one.backward)
            if one.backward and index in step.recomputed:
                seconds += self._seconds(part, index, backward=False)
            # Twice a block the outputs of split layers are added up: in the forward pass, and in the backward pass.
            calls = 2 if index is not None and step.ways > 1 else 0
            exchanged = calls * step.hidden(index) if index is not None else 0.0
            yield _Piece(seconds, exchanged, calls, self._weights(part, index is not None))

    def _seconds(self, part: PartCosts, index: int | None, *, backward: bool) -> float:
        """Seconds of a pass through a block, or through what lies around the blocks if `index` is None."""
        step, model = self.step, self.model
        seconds = model.at(part.backward if backward else part.forward, step.samples)
        if step.ways == 1 or (index is None and (step.whole_vocabulary or part is model.before)):
            return seconds
        # Norms and additions of hidden states are not divided: they read and write these about ten times.
        whole = 0.0 if index is None else 10 * (1 + backward) * step.hidden(index) / model.moved
        whole = min(whole, seconds)
        return whole + (seconds - whole) / step.ways

    def _weights(self, part: PartCosts, block: bool) -> float:
        return part.trained / (1 if not block and self.step.whole_vocabulary else self.step.ways)

    # -- exchanges of gradients and weights ----------------------------------------------------------------------------

    def _gather(self, stage: int, piece: _Piece, one: StagePass, after: Sequence[int]) -> int:
        step = self.step
        if not piece.trained or (one.backward and step.gathers < 2):
            return -1
        group = step.group(step.gathered)
        seconds = self.links.seconds("all-gather", group, piece.trained / group.ranks)
        return self._task("weights", "wire", seconds, "wire", stage, after, piece.trained)

    def _average(self, stage: int, one: StagePass, nbytes: float, ended: int, last: bool) -> None:
        """Exchange the gradients that a piece of a backward pass has computed, in full buckets."""
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
        """Add the optimizer's step of a stage, once its gradients are averaged."""
        step, model = self.step, self.model
        after = [*self.wires[stage]]
        weights = _weights_of(step, stage)
        if step.sums_tied and stage in (0, step.stages - 1):
            seconds = self.links.seconds("swap", step.group(step.over_stages), model.tied)
            after = [
                self._task("tied weights", "wire", seconds, "egress", stage, self._all_ends(stage, after), model.tied)
            ]
        seconds = model.optimizer * weights / step.divided["optimizer"]
        ended = self._task("optimizer", "compute", seconds, "stage", stage, after)
        if step.regathered:
            group = step.group(step.regathered)
            pieces = max(round(weights / group.ranks / _PIECE), 1)
            seconds = pieces * self.links.seconds("all-gather", group, weights / group.ranks / pieces)
            self._task("updated weights", "wire", seconds, "wire", stage, [ended], weights)

    def _all_ends(self, stage: int, after: Sequence[int]) -> list[int]:
        own = [index for index, task in enumerate(self.tasks) if task.resource == f"stage {stage}"]
        return [*after, own[-1]]


class _Piece(NamedTuple):
    """The work of a block in a pass: seconds, bytes of activations exchanged in `calls`, and bytes of its weights."""

    seconds: float
    exchanged: float
    calls: int
    trained: float


# -- memory ----------------------------------------------------------------------------------------------------------


def _own(step: StepPlan, stage: int) -> list[int]:
    return [part for part in range(step.first, len(step.parts)) if part % step.stages == stage]


def _weights_of(step: StepPlan, stage: int) -> float:
    """Bytes of trained weights of a stage's rank, before they are divided."""
    model, own = step.model, _own(step, stage)
    blocks = sum(model.blocks[index].trained for part in own if part >= 0 for index in step.parts[part])
    around = 1 if step.whole_vocabulary else step.ways
    first, last = step.first in own, len(step.parts) - 1 in own
    total = blocks / step.ways + first * model.before.trained / around + last * model.behind.trained / around
    return total + (model.tied / around if first and not last else 0.0)


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
    orders = step.orders(step.micro, step.first) if step.orders else [[PlainPass(0, 0, False), PlainPass(0, 0, True)]]
    for one in orders[stage]:
        if one.backward:
            now -= held[one.part]
        else:
            now += held[one.part]
        most = max(most, now)
    gathered = max((part.trained for part in (*model.blocks, model.behind)), default=0) if step.gathered else 0.0
    return state + frozen / (step.ways if step.ways > 1 else 1) + most + transient + 2 * gathered


def _held(step: StepPlan, part: int) -> float:
    """Bytes of activations that a micro-batch holds in a part of the model between its passes."""
    model = step.model
    total = model.at(model.before.held, step.samples) if part == step.first else 0.0
    total += model.at(model.behind.held, step.samples) if part == len(step.parts) - 1 else 0.0
    for index in step.parts[part] if part >= 0 else ():
        whole = step.hidden(index)
        held = model.at(model.blocks[index].held, step.samples)
        total += whole if index in step.recomputed else whole + max(held - whole, 0.0) / step.ways
    return total


def _transient(step: StepPlan, part: int) -> float:
    """Bytes that a backward pass holds for a moment: gradients of what the loss reads, or of a block's results."""
    model, sizes = step.model, [0.0]
    if part == len(step.parts) - 1:
        sizes.append(2 * model.scored * step.samples)
    for index in step.parts[part] if part >= 0 else ():
        held = model.at(model.blocks[index].held, step.samples) / step.ways
        sizes.append(held if index in step.recomputed else held / 2)
    return max(sizes)


def planned_step(
    world: World,
    features: Sequence[Feature],
    model: ModelCosts,
    *,
    batch: int,
    micro: int,
    device: str = "cpu",
    links: Links | None = None,
) -> tuple[StepPlan, tuple[Feature, ...]]:
    """The step of a run with these features, and the features with the settings that follow from the costs.

    Args:
        world: the mesh, with the axes that the features add.
    """
    step = StepPlan(world, model, batch, micro, features, device, links)
    return step, tuple(feature.plan(step) if isinstance(feature, Plannable) else feature for feature in features)
