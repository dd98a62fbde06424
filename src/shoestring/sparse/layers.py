"""Chooses which linear layers of a model become sparse, and records why others stay dense."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from shoestring.models.blocks import is_in_block, is_transposed, read_by_others, routers
from shoestring.models.plain_layers import is_product

_FEED_FORWARD = re.compile(
    r"mlp|ffn?|feed_?forward|(gate_?)?(up|gate|down)(_?proj)?|gate_up(_proj)?|w[123]|(c_)?fc[12]?|c_proj|lin(ear)?[12]"
    r"|intermediate|output|wi(_[01])?|wo|dense_h_to_4h|dense_4h_to_h|experts?|DenseReluDense"
)
_ATTENTION = re.compile(r".*(attn|attention).*", re.IGNORECASE)


@dataclass
class LinearLayers:
    """The linear layers of a model, by name."""

    sparse: dict[str, nn.Linear] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)  # selected layers that stay dense -> reason
    rest: dict[str, nn.Linear] = field(default_factory=dict)  # layers that were not selected
    weights: int = 0  # number of weights in all linear layers

    @property
    def share(self) -> float:
        """Fraction of the weights of all linear layers that belongs to sparse layers; also the fraction of
        multiplications per token."""
        return self.sparse_weights / max(self.weights, 1)

    @property
    def sparse_weights(self) -> int:
        return sum(layer.weight.numel() for layer in self.sparse.values())

    @property
    def examples(self) -> str:
        """Some layer names, for messages."""
        names = [*self.sparse, *self.dense, *self.rest]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def is_feed_forward(name: str) -> bool:
    """Whether the name belongs to a feed-forward layer in a transformer block."""
    parts = name.split(".")
    return (
        is_in_block(name)
        and not any(_ATTENTION.fullmatch(part) for part in parts)
        and any(_FEED_FORWARD.fullmatch(part) for part in parts)
    )


def choose(
    model: nn.Module,
    patterns: Sequence[str],
    *,
    rows_too: bool,
    default: Callable[[str], bool] = is_feed_forward,
) -> LinearLayers:
    """Select linear layers by name patterns, and divide them into layers that can be 2:4 and layers that cannot.

    Args:
        rows_too: whether the number of rows, not only of columns, must be a multiple of four.
        default: predicate on layer names, which selects layers if there are no patterns.
    """
    choice = LinearLayers()
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    readers = read_by_others(model) | dict.fromkeys(routers(model), "it chooses experts")
    for name, layer in model.named_modules():
        selected = any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else default(name)
        if isinstance(layer, nn.Linear):
            choice.weights += layer.weight.numel()
        elif selected and is_transposed(layer):
            choice.dense[name] = "it is a Conv1D, whose weight is transposed; only nn.Linear can be 2:4"
            continue
        else:
            continue
        rows, columns = layer.weight.shape
        if not selected:
            choice.rest[name] = layer
        elif columns % 4 or (rows_too and rows % 4):
            choice.dense[name] = f"{rows} x {columns} does not divide into groups of four"
        elif not layer.weight.requires_grad:
            choice.dense[name] = "it is not trained"
        elif uses[id(layer.weight)] > 1:
            choice.dense[name] = "another layer has the same weight"
        elif "forward" in vars(layer):
            choice.dense[name] = "another feature replaces its forward pass"
        elif not is_product(layer):
            choice.dense[name] = f"{type(layer).__name__} has a forward pass of its own"
        elif why := readers.get(layer, ""):
            choice.dense[name] = why
        else:
            choice.sparse[name] = layer
    return choice


def leave_frozen(choice: LinearLayers) -> LinearLayers:
    """Move layers with frozen weights from `sparse` to `dense`, in place: their masks would never change."""
    for name in [name for name, layer in choice.sparse.items() if not layer.weight.requires_grad]:
        del choice.sparse[name]
        choice.dense[name] = "its weight is frozen"
    return choice
