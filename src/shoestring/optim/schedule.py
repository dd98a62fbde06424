"""Learning-rate schedules as pure functions of the progress: there is nothing to save."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shoestring import optim
from shoestring.core.job import Job


def follow(job: Job, settings: optim.Schedule) -> Callable[[], None]:
    """Work for Phase.GRAD: set every group's learning rate for the step that is about to be made."""

    def set_lr() -> None:
        factor = settings.factor(job.progress.step, job.progress.total)
        for group in job.built_optimizer.param_groups:
            base = group.setdefault("initial_lr", float(group["lr"]))
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    return set_lr
