"""Half the multiplications of linear layers by 2:4 sparsity: two of every four neighbouring weights are zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoestring.sparse.settings import AST, SRSTE, SSTE, STE, STEP, TSRSTE, Sparsity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from shoestring.core.job import Job
    from shoestring.core.task import Batch
    from shoestring.sparse.oneshot import Metric, PruningResult

__all__ = ["AST", "SRSTE", "SSTE", "STE", "STEP", "TSRSTE", "attach", "prune"]


def attach(model: nn.Module, feature: Sparsity, optimizer: Optimizer) -> Job:
    """Train somebody else's model with sparse weights: one line before its loop.

    Returns:
        The job, to `close`, and to keep what must survive (`job.kept`).

    Raises:
        ConfigError: the feature does not fit the model.
    """
    from shoestring.core.compose import attach

    return attach(model, optimizer, feature)


def prune(
    model: nn.Module, layers: Sequence[str] = (), *, metric: Metric = "magnitude", batches: Sequence[Batch] = ()
) -> PruningResult:
    """Make linear layers of a trained model 2:4 at once, in place, without training.

    Args:
        layers: patterns of their names; by default all those of the blocks, and neither embeddings nor the head.
        metric: by what two of four weights are kept: their magnitude, or that times the norm of their inputs (Wanda).
        batches: what inputs are measured on, for `wanda`, on the model's device: about 128 samples.

    Raises:
        ConfigError: no layer can be pruned, or Wanda has no batches.
    """
    from shoestring.sparse.oneshot import prune_model

    return prune_model(model, layers, metric=metric, batches=batches)
