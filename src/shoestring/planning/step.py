"""A training step as features describe it before anything is built: what ranks compute, hold and send.

`StepPlan` starts as the step of one process. Each feature that is `Plannable` changes it. `planning.predict` then says
how long it takes and what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from shoestring.core.feature import DATA, Feature
from shoestring.planning.cluster import Collective

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
    """A pass through the whole model."""

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
    passes: Sequence[Sequence[StagePass]] = ()
    """The passes of each stage in their order; by default the passes of one process, one after the other."""
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
        both = [PlainPass(0, micro, backward) for micro in range(self.micro) for backward in (False, True)]
        self.passes = self.passes or [both]

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
