"""Learning-rate schedules as pure functions of the progress: there is nothing to save."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shoestring import optim
from shoestring.core.job import Job


def follow(job: Job, settings: optim.Schedule) -> Callable[[], None]:
    """Work for Phase.RATE: set every group's learning rate for the step that is about to be made."""

    bases = [float(group["lr"]) for group in job.built_optimizer.param_groups]

    def set_lr() -> None:
        factor = settings.factor(job.progress.position, job.progress.total)
        for group, base in zip(job.built_optimizer.param_groups, bases, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    return set_lr
