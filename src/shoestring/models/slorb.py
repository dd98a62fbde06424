"""SLoRB, an adapter of pruned linear layers (Huang et al., AAAI 2025): y = (W ∘ M) x + B (P x).

P sums every k consecutive inputs, so it has no weights. B starts as the mean of the pruned weights over each block of k
inputs, which is their best approximation by one number per block. A layer of N x K weights gets an additional parameter
`slorb` of N x K / k weights, which holds B. The adapter cannot be merged into the weight, because the result would not
be 2:4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

NAME = "slorb"


def block_size(columns: int, most: int) -> int:
    """The block size k of a layer: the greatest common divisor of its number of inputs and `most`."""
    return math.gcd(columns, most)


def block_sums(x: Tensor, blocks: int) -> Tensor:
    """Compute P x: (..., K) -> (..., blocks); each element is the sum of K / blocks consecutive inputs."""
    return x.unflatten(-1, (blocks, -1)).sum(-1)


def block_means(dropped: Tensor, size: int) -> Tensor:
    """Initial B: the block means of `dropped`, which holds the pruned weights and zeros elsewhere: (N, K) -> (N, K /
    size)."""
    return dropped.unflatten(-1, (-1, size)).mean(-1)


def adapt(layer: nn.Module, factor: nn.Parameter) -> Callable[[], None]:
    """Add an adapter B (P x) to the output of a layer; B becomes the layer's parameter `slorb`.

    Returns:
        A function that removes the adapter from the layer.
    """
    layer.register_parameter(NAME, factor)
    handle = layer.register_forward_hook(_add)

    def undo() -> None:
        handle.remove()
        delattr(layer, NAME)

    return undo


def carry_over(layer: nn.Module, to: nn.Module) -> None:
    """Register the adapter of `layer`, if it has one, on the module that replaces the layer."""
    if isinstance(factor := getattr(layer, NAME, None), nn.Parameter):
        adapt(to, factor)


def _add(layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    factor = layer.slorb
    return output + F.linear(block_sums(args[0], factor.shape[1]), factor)


def adapted(model: nn.Module) -> dict[str, int]:
    """The names of the layers that have an adapter, with the number of blocks of each adapter."""
    names = ((name, getattr(layer, NAME, None)) for name, layer in model.named_modules())
    return {name: factor.shape[1] for name, factor in names if isinstance(factor, nn.Parameter)}


def make_room(model: nn.Module, blocks: Mapping[str, int]) -> None:
    """Add adapters whose weights are zero to layers, for `load_state_dict` to fill."""
    for name, count in blocks.items():
        layer: Any = model.get_submodule(name)
        like = next(tensor for tensor in layer.state_dict().values() if tensor.is_floating_point())
        adapt(layer, nn.Parameter(like.new_zeros(layer.out_features, count)))


def names_in(weights: Mapping[str, Any]) -> list[str]:
    """The names of the layers for which a model's weights contain an adapter."""
    return [name.removesuffix(f".{NAME}") for name in weights if name.endswith(f".{NAME}")]


def fill(model: nn.Module, weights: Mapping[str, Tensor], *, assign: bool = False) -> None:
    """Load weights into a plain model, adding the adapters that they contain.

    Args:
        assign: whether the model uses the tensors themselves instead of copies, except tensors whose data type has to
            be converted.

    Raises:
        RuntimeError: the weights do not fit the model.
    """
    make_room(model, {name: weights[f"{name}.{NAME}"].shape[1] for name in names_in(weights)})
    if not assign:
        model.load_state_dict(weights)
        return
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: value.to(dtypes.get(name)) for name, value in weights.items()}, assign=True)
