"""The repeated units of a model: what is checkpointed, sharded or compiled one by one."""

from __future__ import annotations

from torch import nn


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, GPT-2's linear layer, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def repeated(model: nn.Module) -> list[nn.Module]:
    """The items of the outermost module lists (a transformer's layers), in order; empty where there are none."""
    found: list[nn.Module] = []
    for child in model.children():
        found.extend(child if isinstance(child, nn.ModuleList) else repeated(child))
    return found
