"""Measurements for a run on the ranks of a job, and the plans that follow from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoestring.core.feature import Feature
from shoestring.core.world import World
from shoestring.planner.measure import measure
from shoestring.planner.reordering import with_overlap
from shoestring.planner.search import Costs, PlanSearch, TrainingPlan, TrainingWay
from shoestring.planning.links import time_collective
from shoestring.planning.step import Links, ModelCosts
from shoestring.planning.system import free_memory
from shoestring.run import Run
from shoestring.training.data_loading import DataSets
from shoestring.training.user_code import UserCode

LARGEST = 1 << 25
"""Size in bytes of the largest message for measuring links."""
GIB = 2**30
FILLED = 0.9
"""Fraction of the free memory that a plan's tensors may take; the rest is for collectives' buffers and rounding up."""


@dataclass(frozen=True)
class Outlook:
    """The ways to train a run, the measured costs for predicting them, and the bytes that a rank may hold."""

    search: PlanSearch
    ways: Sequence[TrainingWay]
    costs: Costs
    links: Links
    room: float

    def plans(self, slowdown: Mapping[str, float] | None = None) -> list[TrainingPlan]:
        """All plans: plans that fit into memory come first, and the fastest first among them.

        For `slowdown`, see `simulate`.
        """
        plans = self.search.plans(self.ways, self.costs, self.links, slowdown or {}, self.room)
        return with_overlap(plans, self.links, slowdown, self.room)

    def priced(self, run: Run, slowdown: Mapping[str, float] | None = None) -> TrainingPlan:
        """Predict the plan that corresponds to a run file's own settings."""
        return self.search.priced(run, self.costs, self.links, slowdown or {}, self.room)


def look(
    run: Run,
    code: UserCode,
    world: World,
    data: DataSets,
    gib: float = 0.0,
    left_out: Collection[str] = (),
    also: Sequence[Feature] = (),
) -> Outlook:
    """Measure the run's model and the links between ranks. A collective.

    Args:
        run: the run, without features that a plan chooses.
        gib: memory of a rank in GiB; 0 means the memory that is free now. left_out, also: see `PlanSearch`.

    Raises:
        ConfigError: no way to train fits the model and the ranks.
    """
    search = PlanSearch(run, code, world, data, world.device.type, left_out, also)
    ways = search.ways()
    sizes = search.sizes(ways)
    costs = dict[str, ModelCosts]()
    for feature in (None, *also):
        with_it = replace(run, features=(*run.features, feature)) if feature else run
        costs[feature.name if feature else ""] = measure(with_it.completed(world), code, world, data, sizes)
    room = gib * GIB if gib else FILLED * _room(world)  # free memory now: all modules are loaded, but no model is
    needed = sorted(search.needed(ways, world, costs).items())
    links = Links({key: time_collective(place, key[0], over, LARGEST) for key, (place, over) in needed})
    return Outlook(search, ways, costs, links, room)


def of_all_ranks(number: float, world: World) -> list[float]:
    """Gather one number from each rank. A collective."""
    return [float(message) for message in world.gather(str(number).encode())]


def _room(world: World) -> float:
    """Free bytes of the rank with the least free memory. A collective."""
    device = world.device
    own = float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory() / world.local_size
    return min(of_all_ranks(own, world))
