"""2:4 sparsity: two of every four neighbouring weights are zero, which halves the multiplications of linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from shoestring.core.errors import ConfigError
from shoestring.sparse.settings import AST, SRSTE, SSTE, STE, STEP, TSRSTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from shoestring.core.task import Batch, Forward
    from shoestring.sparse.oneshot import Metric, PruningResult

__all__ = ["AST", "SRSTE", "SSTE", "STE", "STEP", "TSRSTE", "prune"]


def attach(*_: object, **__: object) -> NoReturn:
    """Raise a ConfigError that names the replacement of this removed function."""
    raise ConfigError(
        "`sparse.attach` was removed: `shoestring.attach` now serves every area",
        hint="write `ss.attach(model, optimizer, ss.sparse.SSTE())`",
    )


def prune(
    model: nn.Module,
    layers: Sequence[str] = (),
    *,
    metric: Metric = "magnitude",
    batches: Sequence[Batch] = (),
    forward: Forward | None = None,
) -> PruningResult:
    """Prune linear layers of a trained model to 2:4 in one pass, in place, without training.

    Args:
        layers: patterns of layer names; by default all linear layers in the model's repeated blocks, but not embeddings
            or the output head.
        metric: score that decides which two of four weights are kept: `magnitude`, or magnitude times the norm of the
            input (`wanda`).
        batches: calibration batches for `wanda`, on the model's device; about 128 samples suffice.
        forward: function (model, batch) -> output, for batches in a form that `Job` does not take by default.

    Raises:
        ConfigError: no layer can be pruned, or the metric is `wanda` and there are no batches.
    """
    from shoestring.sparse.oneshot import prune_model

    return prune_model(model, layers, metric=metric, batches=batches, forward=forward)
