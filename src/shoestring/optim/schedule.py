"""Learning-rate schedules, which are pure functions of the run's progress, so that checkpoints hold no state of a
schedule."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shoestring.core.attachments import Attachments


def follow(attachments: Attachments, factor: Callable[[float, int], float]) -> Callable[[], None]:
    """Build the function for Phase.RATE, which sets the learning rate of each parameter group for the next step.

    Args:
        factor: function of (position, total steps); returns the factor by which the groups' configured learning rates
            are multiplied.
    """
    base_rates = [float(group["lr"]) for group in attachments.optimizer.param_groups]

    def set_lr() -> None:
        current = factor(attachments.progress.position, attachments.progress.total)
        for group, base in zip(attachments.optimizer.param_groups, base_rates, strict=True):
            if isinstance(group["lr"], Tensor):  # changed in place, because a compiled step reads this tensor
                group["lr"].fill_(base * current)
            else:
                group["lr"] = base * current

    return set_lr
