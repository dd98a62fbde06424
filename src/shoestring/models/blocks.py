"""The repeated units of a model: what is checkpointed, sharded or compiled one by one."""

from __future__ import annotations

from torch import nn


def repeated(model: nn.Module) -> list[nn.Module]:
    """The items of the outermost module lists (a transformer's layers), in order; empty where there are none."""
    found: list[nn.Module] = []
    for child in model.children():
        found.extend(child if isinstance(child, nn.ModuleList) else repeated(child))
    return found
