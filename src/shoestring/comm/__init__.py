"""Exchanges gradients between ranks in fewer bytes, and overlaps the exchange with computation."""

from __future__ import annotations

from typing import NoReturn

from shoestring.comm.settings.auto import Auto, Selective
from shoestring.comm.settings.base import Transport
from shoestring.comm.settings.federated import FedAvg
from shoestring.comm.settings.local_steps import DiLoCo, LocalSGD, SparseLoCo
from shoestring.comm.settings.per_step import (
    BF16,
    DGC,
    Dense,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from shoestring.core.errors import ConfigError

__all__ = [
    "BF16",
    "DGC",
    "Auto",
    "Dense",
    "DiLoCo",
    "FedAvg",
    "LocalSGD",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Selective",
    "Sign",
    "SparseLoCo",
    "TernGrad",
    "TopK",
    "Transport",
]


def attach(*_: object, **__: object) -> NoReturn:
    """Raise a ConfigError that names the replacement of this removed function."""
    raise ConfigError(
        "`comm.attach` was removed: `shoestring.attach` now serves every area",
        hint="write `ss.attach(model, optimizer, ss.comm.PowerSGD(rank=4))`; a loss scaler is its argument `scaler`",
    )
