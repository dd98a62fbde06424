"""Finds the layers that behave exactly like `nn.Linear` or `nn.Embedding`, so that an equivalent layer can replace
them.

Models derive classes from `nn.Linear` and `nn.Embedding`: some scale the output, route tokens or add positions. The
behaviour of such a class is tested by running its forward pass on a few numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring._torch import real_tensors
from shoestring.models.gpt import GPT


def is_product(layer: nn.Linear) -> bool:
    """Whether a linear layer computes x Wᵀ + b, as `nn.Linear` itself does."""
    if type(layer).forward is nn.Linear.forward:
        return True
    with real_tensors(), torch.device("cpu"):
        weight, x = torch.arange(6.0).view(2, 3) - 2.0, torch.tensor([[1.0, -0.5, 2.0]])
        bias = None if layer.bias is None else torch.tensor([0.5, -3.0])
        y = _tried(layer, x, weight=weight, bias=bias)
        return y is not None and y.shape == (1, 2) and torch.allclose(y, F.linear(x, weight, bias))


def scale_of(embedding: nn.Embedding) -> float | None:
    """The factor by which an embedding multiplies its rows, 1 for `nn.Embedding`; None if it does something else."""
    if type(embedding).forward is nn.Embedding.forward:
        return None if embedding.max_norm else 1.0
    with real_tensors(), torch.device("cpu"):
        weight = (torch.arange(1.0, 9.0).view(4, 2)).to(embedding.weight.dtype)
        tokens = torch.tensor([[3, 0, 1]])
        rows = _tried(embedding, tokens, weight=weight, padding_idx=None)
        if rows is None or rows.shape != (1, 3, 2):
            return None
        if rows.is_meta:  # the factor is a tensor without data, so only shapes can be checked
            return 1.0
        factor = rows[0, 1, 0]  # the first element of the row [1, 2] is 1, so this is the factor
        return float(factor) if torch.equal(rows, factor * weight[tokens]) else None


@torch.no_grad()
def _tried(layer: nn.Module, x: Tensor, **attributes: Any) -> Tensor | None:
    """The output of a layer's forward pass for the input `x`, with its parameters replaced by `attributes`; None if it
    fails."""
    probe = copy.copy(layer)
    names = set(layer._parameters)
    vars(probe)["_parameters"] = {name: attributes.pop(name) for name in names & set(attributes)}
    vars(probe).update(attributes)
    try:
        y = type(layer).forward(probe, x)
    except Exception:  # a forward pass that needs more arguments or other shapes may raise any error
        return None
    return y if isinstance(y, Tensor) else None


@torch.no_grad()
def read_directly(model: nn.Module) -> set[nn.Module]:
    """Find, by a pass over two tokens, the layers whose weight the model reads without calling the layer, even if only
    to get the weight's data type. The result is empty for a model that does not take tokens, and for `GPT`, which works
    with every type of embedding layer.
    """
    if isinstance(model, GPT):
        return set()
    readings: set[nn.Module] = set()
    first = next(model.parameters(), None)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=None if first is None else first.device)
    training = [module for module in model.modules() if module.training]
    with ExitStack() as stack:
        for layer in model.modules():
            if "weight" in layer._parameters and not list(layer.children()):
                stack.enter_context(_watched(layer, readings))
        model.eval()
        try:
            model(tokens)
        except Exception:  # a model that takes no tokens may raise any error
            return set()
        finally:
            for module in training:
                module.training = True
    return readings


@contextmanager
def _watched(layer: nn.Module, readings: set[nn.Module]) -> Iterator[None]:
    """Add the layer to `readings` if its weight is read outside of its forward pass."""
    kind, running = type(layer), [0]

    class Watched(kind):  # type: ignore
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            running[0] += 1
            try:
                return super().__call__(*args, **kwargs)
            finally:
                running[0] -= 1

        def __getattr__(self, name: str) -> Any:
            if name == "weight" and not running[0]:
                readings.add(self)
            return super().__getattr__(name)

    layer.__class__ = Watched
    try:
        yield
    finally:
        layer.__class__ = kind
