"""What a technique is to shoestring: a frozen bag of settings that attaches at seams torch already has.

This module imports neither torch nor any area, so that settings can be read, checked and documented in milliseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from shoestring.core.errors import ConflictError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.core.world import World

# Two axes that every mesh of ranks has: across hosts (slow links) and inside one host (fast links). Along both, ranks
# read different samples; a feature may split another axis off, along which they share the work on the same ones.
HOSTS: Final = "hosts"
LOCAL: Final = "local"
DATA: Final = (HOSTS, LOCAL)


AREAS: Final = tuple("precision sparse decode memory graph parallel comm optim checkpoint profile".split())  # noqa: SIM905
"""The areas of this package; inside a seam, features apply in this order, and those of other packages after them."""


class Seam(IntEnum):
    """Where a feature attaches; the value is the order of application."""

    MODEL = 10  # change what a module computes, or add parameters; none renamed  chain
    GRAPH = 20  # a pass over the graph that torch.compile traces                 chain, one backend
    LOSS = 30  # wrap `job.loss`                                                  chain
    SHARD = 40  # DDP | fully_shard | ZeRO-2 | local replicas                     one owner per mesh axis
    WIRE = 50  # DDP communication hook | FSDP2 all-reduce hook | exchange        one owner per mesh axis
    OPTIM = 60  # build the torch.optim.Optimizer                                 one owner
    STEP = 70  # around the optimizer step, in the phases below                   chain


class Phase(IntEnum):
    """The order inside one optimizer step; torch's own step lies between WAIT and PROJECT."""

    FORWARD = 0  # before the first forward pass: what it needs to be there (gathered weights, fresh masks)
    CLIP = 1  # average and bound the gradients
    RATE = 2  # set the learning rates
    GRAD = 3  # change the gradients, or what the step uses with them
    WAIT = 4  # wait for copies of what the step overwrites
    PROJECT = 5  # put the weights back where they must lie
    OUTER = 6  # an outer optimizer over the weights
    CAPTURE = 7  # read the state at the step's one consistent boundary


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One line of the report: how much of a scarce resource the run used, and would have without the feature."""

    unit: str  # what is cut, such as "bytes per step"
    used: float
    without: float
    measured: bool  # False where it was computed from sizes
    cost: str  # what it cost, in words


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that a feature adds to the report."""

    title: str
    head: tuple[str, ...]  # the titles of the columns
    rows: tuple[tuple[str | float, ...], ...]  # the first cell of a row names it
    note: str = ""  # a sentence below the title


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A chart that a feature adds to the report: numbers that it published at each step in `job.numbers`."""

    title: str
    metrics: Mapping[str, str]  # the number's key -> its label in the chart
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Feature(ABC):
    """One technique's settings. Subclasses are final, frozen, keyword-only dataclasses whose field docstrings are help.

    `compose` calls, in this order and each for all features before the next: `arrange`, `resolve`, the check for
    conflicts, `check`, and `apply` once a seam.
    """

    seams: ClassVar[tuple[Seam, ...]]
    neutral: ClassVar[Feature | None] = None
    """The setting that is bit-identical to absence, where one exists."""
    engine: ClassVar[Literal["", "ddp", "fsdp", "zero"]] = ""
    """At SHARD: what spreads the model over ranks, for features at WIRE that hook into it."""
    adds_parameters: ClassVar[bool] = False
    """At MODEL: whether the model gets parameters that it did not have (LoRA); all others keep their names."""

    @property
    def name(self) -> str:
        """`area.technique`, or `package.technique` for a feature of another package; the run file's table."""
        return f"{area_of(type(self))}.{type(self).__name__.lower()}"

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes that it owns at SHARD and WIRE."""
        return DATA

    def placed(self, folder: Path) -> Self:
        """The same feature with every folder that it writes to inside `folder`, the run's own."""
        return self

    def arrange(self, world: World) -> World:
        """The world with the mesh axes that this feature adds: `world.split(LOCAL, "tensor", 2)`."""
        return world

    def resolve(self, world: World) -> Self:
        """The same feature with every "auto" made a concrete choice for this world."""
        return self

    def check(self, job: Job) -> None:
        """Raise ConfigError where the feature cannot work on this job; nothing has been changed or allocated yet."""
        return

    @abstractmethod
    def apply(self, job: Job, seam: Seam) -> None:
        """Attach at one of `seams`. What must be released goes on `job.exits`."""

    def export(self, weights: dict[str, Tensor], kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        """The weights that leave the run, from those that were trained: what the model computes with.

        For features at MODEL whose module computes with something else than its parameters (a sparse weight, merged
        adapters). Called on one rank with whole tensors on the host, also long after the run, from a checkpoint.

        Args:
            weights: parameters and buffers by name, as the features before this one leave them.
            kept: the states of `Job.keep` by name, for masks and the like.
        """
        return weights

    def explain(self, job: Job) -> str:
        """What was chosen and why, in one line; said at the start of a run and in the report."""
        return ""

    def reduction(self, trace: Trace) -> Reduction | None:
        """What the feature cut, for the report, from what the run's trace measured."""
        return None

    def report_items(self, trace: Trace) -> Sequence[Table | Curve]:
        """Tables and charts that it adds to the report; asked once the run has ended, on the first rank."""
        return ()


def area_of(kind: type[Feature]) -> str:
    """The area that a feature of this package belongs to; the top-level package of any other feature."""
    package, *inside = kind.__module__.split(".")
    return inside[0] if package == "shoestring" and inside else package


def export_weights(
    features: Iterable[Feature], weights: dict[str, Tensor], kept: Mapping[str, Mapping[str, Any]]
) -> dict[str, Tensor]:
    """The weights that leave a run, after each feature's `export`."""
    for feature in features:
        weights = feature.export(weights, kept)
    return weights


def arrange_mesh(world: World, features: Iterable[Feature]) -> World:
    """The world with the mesh axes that the features add."""
    for feature in features:
        world = feature.arrange(world)
    return world


def check_owners(features: Sequence[Feature]) -> None:
    """Raise ConflictError where two features own one seam (at SHARD and WIRE: one seam and mesh axis)."""
    for seam in (Seam.SHARD, Seam.WIRE, Seam.OPTIM):
        owners = [feature for feature in features if seam in feature.seams]
        for one, other in combinations(owners, 2):
            shared = [axis for axis in one.over if axis in other.over]
            if shared or seam is Seam.OPTIM:
                where = seam.name if seam is Seam.OPTIM else f"{seam.name} over {' and '.join(shared)}"
                hint = f"remove the table [{one.name}] or [{other.name}]"
                raise ConflictError(f"`{one.name}` and `{other.name}` both own {where}", hint=hint)


def order_of_application(features: Iterable[Feature]) -> list[tuple[Seam, Feature]]:
    """Every (seam, feature) in the order of application; inside a seam the given order stands."""
    return sorted(((seam, feature) for feature in features for seam in feature.seams), key=lambda pair: pair[0])
