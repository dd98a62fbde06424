"""SLoRB, an adapter beside a pruned linear layer (Huang et al., AAAI 2025): y = (W ∘ M) x + B (P x).

P adds up every k consecutive inputs, so it has no weights. B begins with the mean, over each such block, of the weights
that pruning dropped: the best approximation of these by one number a block. A layer of N x K weights gets N x K / k
more, under the name `slorb`. They cannot be merged into the weight, which would not be 2:4 any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

NAME = "slorb"


def block_size(columns: int, most: int) -> int:
    """The k that a layer gets: `most`, or what it has in common with a number of inputs that it does not divide."""
    return math.gcd(columns, most)


def block_sums(x: Tensor, blocks: int) -> Tensor:
    """P x: (..., K) -> (..., blocks), each the sum of K / blocks consecutive inputs."""
    return x.unflatten(-1, (blocks, -1)).sum(-1)


def block_means(dropped: Tensor, size: int) -> Tensor:
    """B before training, from the weights that pruning dropped, with zeros elsewhere: (N, K) -> (N, K / size)."""
    return dropped.unflatten(-1, (-1, size)).mean(-1)


def adapt(layer: nn.Module, factor: nn.Parameter) -> Callable[[], None]:
    """Add B (P x) to what a layer returns; B is its parameter `slorb` from now on.

    Returns:
        What takes it off.
    """
    layer.register_parameter(NAME, factor)
    handle = layer.register_forward_hook(_add)

    def undo() -> None:
        handle.remove()
        delattr(layer, NAME)

    return undo


def carry_over(layer: nn.Module, to: nn.Module) -> None:
    """Give the module that takes the place of `layer` its adapter, if it has one."""
    if isinstance(factor := getattr(layer, NAME, None), nn.Parameter):
        adapt(to, factor)


def _add(layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    factor = layer.slorb
    return output + F.linear(block_sums(args[0], factor.shape[1]), factor)


def adapted(model: nn.Module) -> dict[str, int]:
    """The layers of a model that have an adapter, with the number of its blocks."""
    names = ((name, getattr(layer, NAME, None)) for name, layer in model.named_modules())
    return {name: factor.shape[1] for name, factor in names if isinstance(factor, nn.Parameter)}


def make_room(model: nn.Module, blocks: Mapping[str, int]) -> None:
    """Give layers adapters that are 0, for `load_state_dict` to fill."""
    for name, count in blocks.items():
        layer: Any = model.get_submodule(name)
        like = next(each for each in layer.state_dict().values() if each.is_floating_point())
        adapt(layer, nn.Parameter(like.new_zeros(layer.out_features, count)))


def names_in(weights: Mapping[str, Any]) -> list[str]:
    """The layers for which a model's weights hold an adapter."""
    return [name.removesuffix(f".{NAME}") for name in weights if name.endswith(f".{NAME}")]


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a plain model, with the adapters that they hold.

    Raises:
        RuntimeError: they do not fit.
    """
    make_room(model, {name: weights[f"{name}.{NAME}"].shape[1] for name in names_in(weights)})
    model.load_state_dict(weights)
