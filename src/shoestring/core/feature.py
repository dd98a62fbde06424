"""`Feature`, the base class of all techniques: frozen settings that attach to a job through torch's own hooks.

This module imports neither torch nor any area, so that settings can be read, checked and documented in milliseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from shoestring.core.errors import ConflictError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.core.world import World

# The two axes that every mesh of ranks has: across hosts (slow links) and inside one host (fast links). Ranks along
# these axes read different samples. A feature may split off a third axis, along which ranks work on the same samples.
HOSTS: Final = "hosts"
LOCAL: Final = "local"
DATA: Final = (HOSTS, LOCAL)

Inexact = Literal["", "numbers", "gradients", "replicas", "fragments"]
"""Why several ranks compute a different result than one process does; empty if only the order of sums differs.

"numbers": some numbers are rounded, random or delayed. "gradients": the average of the gradients is approximate.
"replicas": ranks train separate replicas, whose weights are merged at intervals. "fragments": as "replicas", but each
merge covers only some of the weights.
"""

Divided = Literal["", "optimizer", "parameters"]
"""What a feature at SHARD shards: nothing; only the tensors that the optimizer steps; or the parameters as well."""


class Seam(IntEnum):
    """A place where features attach to a job; seams are applied in ascending order of their numbers."""

    MODEL = 10  # change what a module computes; may add parameters, not rename  any number of features
    GRAPH = 20  # a pass over the graph that torch.compile traces                any number of features, one backend
    LOSS = 30  # wrap `attachments.loss`                                         any number of features
    SHARD = 40  # DDP | fully_shard | ZeRO-2 | local replicas                    one owner per mesh axis
    WIRE = 50  # DDP communication hook | FSDP2 all-reduce hook | exchange       one owner per mesh axis
    OPTIM = 60  # build the torch.optim.Optimizer                                one owner
    STEP = 70  # around the optimizer step, in the phases of `Phase`             any number of features


class Phase(IntEnum):
    """The phases of one optimizer step, in their order; torch's own step runs between WAIT and PROJECT."""

    FORWARD = 0  # before the first forward pass: gather weights, update masks
    CLIP = 1  # average the gradients, and clip them
    RATE = 2  # set the learning rates
    GRAD = 3  # change the gradients, or other inputs of the optimizer step (its state, its betas)
    WAIT = 4  # wait until tensors that the step overwrites have been copied
    PROJECT = 5  # project the weights onto a constraint (a sparsity mask)
    OUTER = 6  # an outer optimizer over the weights
    CAPTURE = 7  # read the state of the finished step (checkpoints)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A line of the report: how much of a resource the run used, and what it would have used without the feature."""

    unit: str  # resource and unit, such as "bytes per step"
    used: float
    without: float
    measured: bool  # whether `used` was measured; False if it was computed from sizes
    cost: str  # what the feature costs, in words


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that a feature adds to the report."""

    title: str
    head: tuple[str, ...]  # the titles of the columns
    rows: tuple[tuple[str | float, ...], ...]  # the first cell is the name of the row
    note: str = ""  # a sentence below the title


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A chart that a feature adds to the report: metrics that it published at each step, plotted over the steps."""

    title: str
    metrics: Mapping[str, str]  # name of a metric -> its label in the chart
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Feature(ABC):
    """The settings of one technique: a final, frozen, keyword-only dataclass whose field docstrings are the help texts.

    `compose` calls these methods in turn, each for all features: `arrange`, `resolve`, `beside`, `check`, and `apply`
    once for each seam. Before it calls `check`, `compose` looks for conflicts between features.
    """

    seams: ClassVar[tuple[Seam, ...]]
    neutral: ClassVar[Feature | None] = None
    """Settings with which results are bit-identical to results without the feature; None if there are none."""
    divided: ClassVar[Divided] = ""
    """At SHARD: which tensors are sharded over ranks."""
    averages_in_backward: ClassVar[bool] = False
    """At SHARD: whether gradients are averaged during the backward pass, with a hook that WIRE may replace."""
    data_form: ClassVar[str] = ""
    """At LOSS: value that `data.form` must have for this loss; empty if the loss works on text or chats."""
    reads_first_rank: ClassVar[bool] = False
    """Whether the feature assumes that the first rank holds the whole model, which is wrong in a pipeline."""
    adds_parameters: ClassVar[bool] = False
    """At MODEL: whether the feature adds parameters to the model (LoRA). Existing parameters keep their names."""

    @property
    def scales_loss(self) -> bool:
        """At MODEL: whether the feature scales the loss, and skips steps whose gradients overflow."""
        return False

    @property
    def inexact(self) -> Inexact:
        """Why several ranks compute a different result than one process does; see `Inexact`."""
        return ""

    @property
    def places_model(self) -> bool:
        """Whether the feature moves the model to the device itself, layer by layer, because the model might not fit."""
        return False

    @property
    def tokenizer_of(self) -> str:
        """Model, in the form of `run.model`, whose tokenizer the run's data must use; empty if any tokenizer works."""
        return ""

    @property
    def exports_model(self) -> bool:
        """Whether the run exports the whole model; False if it exports only the files of `write_beside`."""
        return True

    @property
    def name(self) -> str:
        """Name of the feature's table in the run file: `area.technique`, or `package.technique` for other packages."""
        return f"{area_of(type(self))}.{type(self).__name__.lower()}"

    @property
    def over(self) -> tuple[str, ...]:
        """Mesh axes that the feature owns at SHARD and WIRE."""
        return DATA

    def placed(self, folder: Path) -> Self:
        """Return the feature with all its output folders moved into `folder`, the run folder."""
        return self

    def arrange(self, world: World) -> World:
        """Return the world with the mesh axes that this feature adds, such as `world.split(LOCAL, "tensor", 2)`."""
        return world

    def resolve(self, world: World) -> Self:
        """Return the feature with each "auto" replaced by a value that suits this world."""
        return self

    def beside(self, features: Sequence[Feature]) -> Self:
        """Return the feature with those settings filled in that depend on other features; runs after `resolve`."""
        return self

    def check(self, attachments: Attachments) -> None:
        """Raise ConfigError if the feature cannot work on this job. `compose` calls this before it changes anything."""
        return

    @abstractmethod
    def apply(self, attachments: Attachments, seam: Seam) -> None:
        """Attach the feature at one of its `seams`, and add callbacks that undo this to `attachments.exits`."""

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Turn trained weights into weights with which a plain model, without the feature, computes the same outputs.

        Features at MODEL need this if their module does not compute with its parameters as they are (masked weights,
        adapters). `export` is called on one rank, with unsharded tensors in host memory; also after the run, with a
        checkpoint's content.

        Args:
            weights: parameters and buffers by name, after the `export` of earlier features.
            states: the states that features saved with `Attachments.keep`, such as masks, by name.
        """
        return weights

    def write_beside(self, attachments: Attachments, base: str) -> Callable[[Path], None] | None:
        """Gather what the feature exports besides the model, and return a function that writes it to the export folder.

        All ranks call this method; the function that it returns is called only on the first rank. The result is None
        if the feature exports nothing besides the model.

        Args:
            base: name or path of the model that the run started from; empty if the run started from no model.
        """
        return None

    def check_gradients(self, count: int) -> None:
        """Raise ConfigError if `count`, the gradients per step over all ranks and micro-batches, is too small."""
        return

    def explain_resume(self, attachments: Attachments) -> str:
        """A log line on what changes because the run is resumed with different settings; empty if nothing changes."""
        return ""

    def explain(self, attachments: Attachments) -> str:
        """A line on the values that the feature chose and why, printed at the start of a run and in the report."""
        return ""

    def reduction(self, trace: Trace) -> Reduction | None:
        """How much the feature reduced the use of a resource, computed from the run's trace; None if not known."""
        return None

    def report_items(self, trace: Trace) -> Sequence[Table | Curve]:
        """Tables and charts for the report; called on the first rank after the run."""
        return ()


def area_of(kind: type[Feature]) -> str:
    """The area that a feature of shoestring belongs to; for any other feature, its top-level package."""
    package, *inside = kind.__module__.split(".")
    return inside[0] if package == "shoestring" and inside else package


def export_weights(
    features: Iterable[Feature], weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Pass trained weights through the `export` of one feature after another."""
    for feature in features:
        weights = feature.export(weights, states)
    return weights


def arrange_mesh(world: World, features: Iterable[Feature]) -> World:
    """The world with the mesh axes that the features add."""
    for feature in features:
        world = feature.arrange(world)
    return world


def resolve_all(features: Sequence[Feature], world: World) -> tuple[Feature, ...]:
    """Return the features with each "auto" replaced by a value that suits this world and the other features."""
    resolved = tuple(feature.resolve(world) for feature in features)
    return tuple(feature.beside(resolved) for feature in resolved)


def check_owners(features: Sequence[Feature]) -> None:
    """Raise ConflictError if two features own the same seam (at SHARD and WIRE: the same seam and mesh axis)."""
    for seam in (Seam.SHARD, Seam.WIRE, Seam.OPTIM):
        owners = [feature for feature in features if seam in feature.seams]
        for one, other in combinations(owners, 2):
            shared = [axis for axis in one.over if axis in other.over]
            if shared or seam is Seam.OPTIM:
                where = seam.name if seam is Seam.OPTIM else f"{seam.name} over {' and '.join(shared)}"
                hint = f"remove the table [{one.name}] or [{other.name}]"
                raise ConflictError(f"`{one.name}` and `{other.name}` both own {where}", hint=hint)


def order_of_application(features: Iterable[Feature]) -> list[tuple[Seam, Feature]]:
    """All pairs (seam, feature) in the order of application; within a seam, features mostly keep their order.

    Features that split a replica over ranks are the exception. At SHARD they go first, so that other features see the
    parameters that this rank trains. At WIRE they go last, after gradients have been averaged over replicas.
    """

    def place(pair: tuple[Seam, Feature]) -> tuple[Seam, bool]:
        seam, feature = pair
        return seam, seam in (Seam.SHARD, Seam.WIRE) and splits_replicas(feature) == (seam is Seam.WIRE)

    return sorted(((seam, feature) for feature in features for seam in feature.seams), key=place)


def splits_replicas(feature: Feature) -> bool:
    """Whether the feature makes several ranks work on the same samples, so that none runs the whole model."""
    return Seam.SHARD in feature.seams and not {*feature.over} <= {*DATA}


def splitting(features: Iterable[Feature], world: World) -> list[str]:
    """Names of the features that split replicas over several ranks of `world`, to which `arrange_mesh` was applied."""
    return [part.name for part in features if splits_replicas(part) and world.ranks_over(part.over) > 1]
