"""Finds the blocks of a model: the repeated units that are checkpointed, sharded or compiled one by one."""

from __future__ import annotations

import re

from torch import nn

_READ_BY_MAMBA = ("x_proj", "dt_proj", "out_proj")
_OUTSIDE = re.compile(r"(lm_)?head|classifier|pooler|router|embed.*|score", re.IGNORECASE)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, GPT-2's linear layer, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def repeated(model: nn.Module) -> list[nn.Module]:
    """The items of the outermost module lists (a transformer's layers), in order; empty if there are none."""
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks.extend(child if isinstance(child, nn.ModuleList) else repeated(child))
    return blocks


def is_in_block(name: str) -> bool:
    """Whether a layer of this name belongs to a transformer's block and is not its router."""
    parts = name.split(".")
    numbered = any(part.isdecimal() for part in parts)  # a number in a name is an index in a list of blocks
    return numbered and not any(_OUTSIDE.fullmatch(part) for part in parts)


def routers(model: nn.Module) -> set[nn.Module]:
    """The layers of a model that choose experts (routers), including the layers inside them.

    A router is recognised by its name, or by having as many outputs as there are experts in the same block.
    """
    layers = {module for name, module in model.named_modules() if "router" in name.split(".")}
    for block in model.modules():
        experts: dict[nn.Module, int] = {}  # modules that hold experts, as a list or in parameters of three dimensions
        for name, child in block.named_children():
            shapes = [parameter.shape for parameter in child.parameters(recurse=False) if parameter.dim() == 3]
            if isinstance(child, nn.ModuleList) and name == "experts":
                count = len(child)
            else:
                count = shapes[0][0] if shapes else 0
            if count:
                experts[child] = count
        if experts:
            inside = {module for child in experts for module in child.modules()}
            weights = {module: module._parameters.get("weight") for module in set(block.modules()) - inside}
            layers |= {
                module
                for module, weight in weights.items()
                if weight is not None and weight.dim() == 2 and weight.shape[0] in experts.values()
            }
    return layers | {module for layer in layers for module in layer.modules()}


def read_by_others(model: nn.Module) -> dict[nn.Module, str]:
    """Map each layer whose weight other code uses without calling the layer to a sentence that names this code."""
    layers: dict[nn.Module, str] = {}
    for module in model.modules():
        if {"A_log", "D"} <= module._parameters.keys():  # a state-space mixer
            layers |= {
                child: "the kernels of Mamba read its weight themselves"
                for name, child in module.named_children()
                if name in _READ_BY_MAMBA
            }
        if hasattr(module, "layers_are_rescaled"):
            layers |= {
                child: "its model divides its weight in place"
                for name, child in module.named_modules()
                if name.endswith(("attention.output", "feed_forward.value"))
            }
        if isinstance(module, nn.MultiheadAttention):
            layers[module.out_proj] = "nn.MultiheadAttention reads its weight itself"
        elif isinstance(module, nn.TransformerEncoderLayer):
            for layer in (module.linear1, module.linear2):
                layers[layer] = "nn.TransformerEncoderLayer reads its weight itself"
    return layers
