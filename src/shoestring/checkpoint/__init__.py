"""Write checkpoints of a run while it trains, and resume from them after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoestring.checkpoint.settings import Plain, Tiered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoestring.checkpoint.attached import Attached
    from shoestring.core.kept import Stateful

__all__ = ["Plain", "Tiered", "attach"]


def attach(
    state: Mapping[str, Stateful],
    *,
    own: Mapping[str, Stateful] | None = None,
    settings: Tiered | None = None,
) -> Attached:
    """Write and restore checkpoints in a program with a training loop of its own.

    Call `.restore()` of the returned object once before the loop, and `.step()` after each optimizer step.

    Args:
        state: objects that all ranks replicate or shard, such as the model, the optimizer and a schedule.
        own: objects that differ from rank to rank, such as a data loader. The states of random number generators are
            always saved.
        settings: settings of the checkpoints; defaults to `Tiered()`.

    Raises:
        ConfigError: a state has a reserved name (progress, random, checkpoint), or two states have the same name.
    """
    from shoestring.checkpoint.attached import Attached

    return Attached(state, own or {}, settings or Tiered())
