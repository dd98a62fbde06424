"""Learning-rate schedules as pure functions of the progress: there is nothing to save."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shoestring.core.job import Job


def follow(job: Job, factor: Callable[[float, int], float]) -> Callable[[], None]:
    """Work for Phase.RATE: set every group's learning rate for the step that is about to be made.

    Args:
        factor: (position, total) -> what the learning rate of each group is multiplied by.
    """
    bases = [float(group["lr"]) for group in job.built_optimizer.param_groups]

    def set_lr() -> None:
        now = factor(job.progress.position, job.progress.total)
        for group, base in zip(job.built_optimizer.param_groups, bases, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * now)
            else:
                group["lr"] = base * now

    return set_lr
