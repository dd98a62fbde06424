"""Exchanges gradients between ranks in fewer bytes, and overlaps the exchange with computing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoestring.comm.settings.auto import Auto, Selective
from shoestring.comm.settings.local_steps import DiLoCo, LocalSGD, LocalSteps, SparseLoCo
from shoestring.comm.settings.per_step import (
    BF16,
    DGC,
    Dense,
    Exchange,
    OkTopK,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from shoestring.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from shoestring.core.job import Job

__all__ = [
    "BF16",
    "DGC",
    "Auto",
    "Dense",
    "DiLoCo",
    "LocalSGD",
    "OkTopK",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Selective",
    "Sign",
    "SparseLoCo",
    "TernGrad",
    "TopK",
    "attach",
]


def attach(
    model: nn.Module,
    feature: Exchange,
    optimizer: Optimizer | None = None,
    *,
    scaler: GradScaler | None = None,
) -> Job:
    """Exchange the gradients of a model in a training loop of your own by `feature`; call it after wrapping in DDP.

    Args:
        optimizer: needed without DDP, where the exchange runs right before its step, and for the report's metrics.
        scaler: the loop's loss scaler, for fp16; under DDP gradients are exchanged before it unscales them.

    Returns:
        The job, to `close`, with the state that checkpoints must hold (`job.kept`).

    Raises:
        ConfigError: the feature does not fit the model.
    """
    from shoestring.comm.exchange.attach import attach
    from shoestring.core.world import World

    if optimizer is None and isinstance(feature, Auto | LocalSteps):
        said = f"`{feature.name}` needs the optimizer's steps, and no optimizer was given"
        raise ConfigError(said, hint="give the optimizer as third argument")
    if scaler is not None and isinstance(feature, LocalSteps):
        world = World.current()
        feature.resolve(world).check_scaler(scaler, world)
    return attach(model, feature, optimizer, scaler)
