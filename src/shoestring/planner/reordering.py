"""Puts the passes of planned pipelines into an order in which a step ends earlier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoestring.core.feature import Feature
from shoestring.parallel import Pipeline
from shoestring.parallel.pipeline.orders import write_order
from shoestring.planner.search import TrainingPlan
from shoestring.planning.predict import predict, with_order
from shoestring.planning.step import Links

REORDERED = 2
"""Number of pipelines, the fastest ones, whose passes are reordered."""
ROUNDS = 100
"""Effort of finding an order: see `planning.schedule`."""
MORE = (0, 2, 4)
"""Numbers of micro-batches of each part that an order may have in flight beyond those of the schedule."""
GAIN = 0.01
"""Part of a step that an order must save: a run file with it is longer, and fits one number of micro-batches."""


def with_reordered(plans: Sequence[TrainingPlan], links: Links, room: float) -> list[TrainingPlan]:
    """The plans, sorted as before, and among them the fastest pipelines with their passes in a better order.

    Args:
        room: bytes that a rank may hold.
    """
    pipelines = [plan for plan in plans if plan.step.stages > 1 and not plan.refused][:REORDERED]
    more = [plan for one in pipelines if (plan := reordered(one, links, room)) is not None]
    return sorted([*plans, *more], key=lambda plan: (bool(plan.refused), plan.seconds))


def reordered(plan: TrainingPlan, links: Links, room: float, rounds: int = ROUNDS) -> TrainingPlan | None:
    """A pipeline's plan with the passes of its stages in an order that ends a step earlier.

    None if no order saves as much as `GAIN`, if it takes more memory than there is, or if the run file sets the
    pipeline.
    """
    pipeline = next((feature for feature in plan.added if isinstance(feature, Pipeline)), None)
    if pipeline is None or pipeline.passes:
        return None
    tried = [(predict(step, links), step) for step in (with_order(plan.step, links, more, rounds) for more in MORE)]
    fitting = [one for one in tried if one[0].peak <= room and one[0].seconds <= plan.seconds * (1 - GAIN)]
    if not fitting:
        return None
    predicted, step = min(fitting, key=lambda one: one[0].seconds)
    settled = replace(pipeline, passes=tuple(map(write_order, step.passes)))

    def settle(features: Sequence[Feature]) -> tuple[Feature, ...]:
        return tuple(settled if feature == pipeline else feature for feature in features)

    run = replace(plan.run, features=settle(plan.run.features))
    return replace(plan, run=run, added=settle(plan.added), predicted=predicted, step=step)
