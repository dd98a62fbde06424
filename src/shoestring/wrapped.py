"""Functions for models that a program wrapped in torch's DistributedDataParallel (DDP) before attaching features."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model that DDP wraps; a model without DDP is returned unchanged."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_wrapped(model: nn.Module) -> bool:
    """Whether the model is wrapped in DDP, which averages its gradients during the backward pass."""
    return isinstance(model, DistributedDataParallel)


def last_only(model: nn.Module) -> Callable[[bool], AbstractContextManager[Any]]:
    """Return a function that makes the context of a micro-batch's passes, given whether it is the last of its step.

    In these contexts, DDP averages gradients over ranks only in the last micro-batch; until then, gradients accumulate
    locally.
    """
    assert isinstance(model, DistributedDataParallel)
    return lambda last: nullcontext() if last else model.no_sync()
