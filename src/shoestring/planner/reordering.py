"""Changes planned steps so that messages overlap more: passes of pipelines in another order, split layers in tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoestring.core.feature import Feature
from shoestring.parallel import Pipeline, Tensor
from shoestring.parallel.pipeline.orders import write_order
from shoestring.planner.search import TrainingPlan
from shoestring.planning.predict import predict, with_order
from shoestring.planning.step import Links

CHANGED = 2
"""Number of plans of each kind that are changed: the fastest ones."""
TILES = (2, 4)
"""Numbers of tiles of split layers."""
ROUNDS = 100
"""Rounds in which `planning.schedule` improves an order."""
MORE = (0, 2, 4)
"""Numbers of micro-batches per part, tried one by one, that an order may have in flight beyond the schedule's."""
GAIN = 0.01
"""Fraction of a step's seconds that an order or tiles must save. A run file with an order is longer, and fits only one
number of micro-batches."""


def with_overlap(
    plans: Sequence[TrainingPlan], links: Links, slowdown: Mapping[str, float] | None, room: float
) -> list[TrainingPlan]:
    """Add changed copies of the fastest plans in which messages overlap more; returns all plans, the fastest first.

    Args:
        slowdown: see `simulate`. room: bytes that a rank may hold.
    """
    possible = [plan for plan in plans if not plan.refused]
    split = [plan for plan in possible if plan.step.ways > 1][:CHANGED]
    parted = [plan for one in split if (plan := in_tiles(one, links, slowdown)) is not None]
    pipelines = sorted([*possible, *parted], key=lambda plan: plan.seconds)
    pipelines = [plan for plan in pipelines if plan.step.stages > 1][:CHANGED]
    ordered = [plan for one in pipelines if (plan := reordered(one, links, room)) is not None]
    return sorted([*plans, *parted, *ordered], key=lambda plan: (bool(plan.refused), plan.seconds))


def in_tiles(plan: TrainingPlan, links: Links, slowdown: Mapping[str, float] | None = None) -> TrainingPlan | None:
    """A plan with its split layers in tiles; None if that is not faster, or if the run file sets the split."""
    split = next((feature for feature in plan.added if isinstance(feature, Tensor)), None)
    if split is None or split.tiles > 1:
        return None
    steps = {tiles: replace(plan.step, tiles=tiles) for tiles in TILES}
    predicted = {tiles: predict(step, links, slowdown) for tiles, step in steps.items()}
    tiles = min(predicted, key=lambda count: predicted[count].seconds)
    if predicted[tiles].seconds > plan.seconds * (1 - GAIN):
        return None
    changed = _with_feature(plan, split, replace(split, tiles=tiles))
    return replace(changed, predicted=predicted[tiles], step=steps[tiles])


def _with_feature(plan: TrainingPlan, before: Feature, after: Feature) -> TrainingPlan:
    """A plan with the feature `after` in place of `before`."""

    def changed(features: Sequence[Feature]) -> tuple[Feature, ...]:
        return tuple(after if feature == before else feature for feature in features)

    return replace(plan, run=replace(plan.run, features=changed(plan.run.features)), added=changed(plan.added))


def reordered(plan: TrainingPlan, links: Links, room: float, rounds: int = ROUNDS) -> TrainingPlan | None:
    """A pipeline's plan with the passes of its stages in an order that ends a step earlier.

    None if no order saves as much as `GAIN`, if it takes more memory than there is, or if the run file sets the
    pipeline.
    """
    pipeline = next((feature for feature in plan.added if isinstance(feature, Pipeline)), None)
    if pipeline is None or pipeline.pass_order:
        return None
    tried = [(predict(step, links), step) for step in (with_order(plan.step, links, more, rounds) for more in MORE)]
    fitting = [one for one in tried if one[0].peak <= room and one[0].seconds <= plan.seconds * (1 - GAIN)]
    if not fitting:
        return None
    predicted, step = min(fitting, key=lambda one: one[0].seconds)
    settled = replace(pipeline, pass_order=tuple(map(write_order, step.passes)))
    return replace(_with_feature(plan, pipeline, settled), predicted=predicted, step=step)
