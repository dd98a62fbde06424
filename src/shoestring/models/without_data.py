"""Replaces the meta tensors of a model by fake tensors of another device, for which operators compute only shapes."""

from __future__ import annotations

import torch
from torch import nn


def with_fake_tensors(model: nn.Module, device: str) -> nn.Module:
    """Replace a model's meta tensors by empty tensors on a device, and return it; tied parameters stay tied.

    Inside a context of fake tensors, these tensors are fake and take no memory.
    """
    fake: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in fake:
                    empty = torch.empty_like(parameter, device=device)
                    fake[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = fake[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    return model
