"""A training step as features describe it before anything is built: what ranks compute, store and send.

A `StepPlan` starts as the step of one process. Each feature that is `Plannable` changes the plan. `planning.predict`
then predicts the time and the memory of the planned step.
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
    """Shape of the groups of ranks that communicate at the same time: ranks per group, and hosts per group."""

    ranks: int
    hosts: int


def group_over(world: World, axes: Iterable[str]) -> GroupShape:
    """The shape of the groups of ranks along mesh axes."""
    axes = [*axes]
    # Ranks are numbered host by host, so the hosts that a group spans follow from its ranks' numbers.
    place = {rank: rank // world.local_size for rank in _members(world, axes)}
    return GroupShape(world.ranks_over(axes), len(set(place.values())))


def _members(world: World, axes: Sequence[str]) -> list[int]:
    """The ranks of the first group along mesh axes, which contains rank 0."""
    ranks, stride = [0], world.size
    for axis, size in world.axes.items():
        stride //= size
        if axis in axes:
            ranks = [rank + place * stride for rank in ranks for place in range(size)]
    return ranks


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """Costs of a block, or of the layers before or after all blocks, on one rank while all ranks compute.

    `forward` and `backward` (seconds), and `held` (bytes of activations that autograd keeps in between), have one entry
    for each number in `ModelCosts.samples`.
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
    """The measured costs of a model's parts. A model without repeated blocks has only one part, `behind`."""

    samples: tuple[int, ...]
    """Micro-batch sizes, in samples, that were measured, in increasing order."""
    blocks: tuple[PartCosts, ...]
    before: PartCosts
    behind: PartCosts
    hidden: tuple[int, ...]
    """Bytes of hidden states per sample: before the first block, then after each block; empty without blocks."""
    tied: int
    """Bytes of trained weights that are used both before and after the blocks; they are counted in `behind`."""
    scored: int
    """Bytes per sample of the model's output, which the loss reads (logits)."""
    optimizer: float
    """Seconds of an optimizer step per byte of trained weights."""
    state: float
    """Bytes of optimizer state per byte of trained weights."""
    moved: float
    """Bytes per second that memory-bound operators read and write."""

    @property
    def trained(self) -> int:
        return sum(part.trained for part in (self.before, *self.blocks, self.behind))

    def at(self, values: Sequence[float], samples: float) -> float:
        """Interpolate measured values linearly, to a micro-batch of `samples` samples."""
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
    """A forward or backward pass of a micro-batch through the whole model."""

    part: int
    micro: int
    backward: bool


@dataclass(frozen=True)
class GradientExchange:
    """An average of gradients over mesh axes.

    Args:
        kind: kind of the collective. over: mesh axes.
        bucket: bytes of gradients per collective, which starts during the backward pass; infinite if a single
            collective at the end sends all gradients.
        every: whether gradients are averaged after every micro-batch, instead of only after the last.
        lanes: number of collectives that run at the same time.
        shard: number of shards into which the gradients were already divided before this average.
    """

    kind: Kind
    over: tuple[str, ...]
    bucket: float
    every: bool = False
    lanes: int = 1
    shard: int = 1


@dataclass
class StepPlan:
    """The step of all ranks, described for prediction; features change it.

    Args:
        world: the mesh, including the axes that the features add.
        batch: number of samples in a step. micro: number of micro-batches of a replica.
    """

    world: World
    model: ModelCosts
    batch: int
    micro: int
    features: Sequence[Feature] = ()
    device: str = "cpu"
    links: Links | None = None
    """Speeds of the links between ranks; None until they are measured."""
    parts: tuple[range, ...] = ()
    """Range of blocks in each part of the model; part p belongs to stage p modulo `stages`."""
    stages: int = 1
    over_stages: tuple[str, ...] = ()
    first: int = 0
    """Index of the part that has the layers before the blocks: 0, or -1 if they are a part of their own, which then
    belongs to the last stage."""
    passes: Sequence[Sequence[StagePass]] = ()
    """The passes of each stage in order; by default one stage does the passes of each micro-batch in turn."""
    ways: int = 1
    """Number of ranks over which each layer is split."""
    over_ways: tuple[str, ...] = ()
    tiles: int = 1
    """Number of tiles in which split layers compute outputs that ranks add up, so that messages overlap computation."""
    whole_vocabulary: bool = True
    averages: list[GradientExchange] = field(default_factory=list)
    gathered: tuple[str, ...] = ()
    """Mesh axes over which weights are gathered before each use."""
    gathers: int = 0
    """How often a micro-batch gathers each weight: 1 in the forward pass, 2 if also in the backward pass."""
    regathered: tuple[str, ...] = ()
    """Mesh axes over which updated weights are gathered after the optimizer's step."""
    divided: dict[str, int] = field(default_factory=lambda: {"optimizer": 1, "gradients": 1, "parameters": 1})
    """Name of a state ("optimizer", "gradients", "parameters") -> number of ranks over which it is sharded."""
    buckets: bool = False
    """Whether gradients also lie in communication buckets, which take as much memory."""
    recomputed: frozenset[int] = frozenset()
    """Indices of blocks that are recomputed in the backward pass."""

    def __post_init__(self) -> None:
        self.parts = self.parts or (range(len(self.model.blocks)),)
        both = [PlainPass(0, micro, backward) for micro in range(self.micro) for backward in (False, True)]
        self.passes = self.passes or [both]

    @property
    def replicas(self) -> int:
        return self.world.ranks_over(DATA)

    @property
    def samples(self) -> float:
        """Number of samples in a replica's micro-batch."""
        return self.batch / self.replicas / self.micro

    @property
    def sums_tied(self) -> bool:
        """Whether the first and the last stage add up the gradients of tied weights."""
        return self.model.tied > 0 and self.stages > 1 and self.first == 0

    def hidden(self, block: int) -> float:
        """Bytes of a micro-batch's hidden states before block `block`; after the last block if there is none."""
        return self.model.hidden[block] * self.samples

    def group(self, axes: Iterable[str]) -> GroupShape:
        return group_over(self.world, axes)

    def average(self, averaging: GradientExchange) -> None:
        """Add an average of gradients over mesh axes, if several ranks lie along them."""
        if self.world.ranks_over(averaging.over) > 1:
            self.averages.append(averaging)

    @property
    def collectives(self) -> set[tuple[Kind, tuple[str, ...]]]:
        """The kinds of collectives in the step, with the mesh axes that they run over."""
        used: list[tuple[Kind, tuple[str, ...]]] = [
            *((one.kind, one.over) for one in self.averages),
            ("message", self.over_stages),
            ("swap", self.over_stages if self.model.tied else ()),  # needed only in plans where stages sum tied weights
            ("all-reduce", self.over_ways),
            ("all-gather", self.gathered),
            ("all-gather", self.regathered),
        ]
        return {(kind, axes) for kind, axes in used if self.group(axes).ranks > 1}


@runtime_checkable
class Plannable(Protocol):
    """A feature that can describe its effect on a step to the planner."""

    def plan(self, step: StepPlan) -> Feature:
        """Change the step as this feature would; returns the feature with the settings that follow from the costs."""
        ...


class Situation(NamedTuple):
    """The facts about a run on which `Alternative.alternatives` may depend."""

    world: World
    blocks: int
    """Number of repeated blocks of the model."""
    device: str

    @property
    def two_levels(self) -> bool:
        """Whether there are several hosts with several ranks each."""
        return all(self.world.axes[axis] > 1 for axis in DATA)


@runtime_checkable
class Alternative(Protocol):
    """A kind of feature that the planner may add to a run, because the training result stays the same."""

    @classmethod
    def alternatives(cls, situation: Situation) -> Iterable[Feature]:
        """Yield the feature with each combination of settings that the planner should consider."""
        ...


@dataclass(frozen=True)
class Links:
    """Measured speeds of collectives, by kind and shape of the group."""

    speeds: Mapping[tuple[Kind, GroupShape], Collective]

    def seconds(self, kind: Kind, group: GroupShape, nbytes: float) -> float:
        """Seconds of a collective; `nbytes` is the size of a message as defined by `planning.links.time_collective`."""
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
    """Plan the step of a run; returns the plan, and the features with the settings that follow from the costs.

    Args:
        world: the mesh, including the axes that the features add.
    """
    step = StepPlan(world, model, batch, micro, features, device, links)
    return step, tuple(feature.plan(step) if isinstance(feature, Plannable) else feature for feature in features)
