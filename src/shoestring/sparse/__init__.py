"""Half the multiplications of linear layers by 2:4 sparsity: two of every four neighbouring weights are zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoestring.sparse.settings import AST, SRSTE, SSTE, STE, TSRSTE, Sparsity

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from shoestring.core.job import Job

__all__ = ["AST", "SRSTE", "SSTE", "STE", "TSRSTE", "attach"]


def attach(model: nn.Module, feature: Sparsity, optimizer: Optimizer) -> Job:
    """Train somebody else's model with sparse weights: one line before its loop.

    Returns:
        The job, to `close`, and to keep what must survive (`job.kept`).

    Raises:
        ConfigError: the feature does not fit the model.
    """
    from shoestring.core.compose import attach

    return attach(model, optimizer, feature)
