"""The repeated units of a model: what is checkpointed, sharded or compiled one by one."""

from __future__ import annotations

import re

from torch import nn

_OUTSIDE = re.compile(r"(lm_)?head|classifier|pooler|router|embed.*|score", re.IGNORECASE)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, GPT-2's linear layer, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def repeated(model: nn.Module) -> list[nn.Module]:
    """The items of the outermost module lists (a transformer's layers), in order; empty where there are none."""
    found: list[nn.Module] = []
    for child in model.children():
        found.extend(child if isinstance(child, nn.ModuleList) else repeated(child))
    return found


def is_in_block(name: str) -> bool:
    """Whether a layer of this name belongs to a transformer's block, and does not route its tokens."""
    parts = name.split(".")
    numbered = any(part.isdecimal() for part in parts)  # in a list of blocks
    return numbered and not any(_OUTSIDE.fullmatch(part) for part in parts)


def read_by_others(model: nn.Module) -> dict[nn.Module, str]:
    """Layers whose weights torch's own modules read without calling them, with which module does."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            found[module.out_proj] = "nn.MultiheadAttention reads its weight itself"
        elif isinstance(module, nn.TransformerEncoderLayer):
            for layer in (module.linear1, module.linear2):
                found[layer] = "nn.TransformerEncoderLayer reads its weight itself"
    return found
