"""Which linear layers of a model get adapters, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from shoestring.models.blocks import is_in_block, is_transposed, read_by_others


@dataclass
class AdaptedLayers:
    """The linear layers of a model, by name."""

    adapted: dict[str, nn.Module] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # those that were asked for -> why they have no adapter
    rest: list[str] = field(default_factory=list)  # those that were not asked for

    @property
    def examples(self) -> str:
        names = [*self.adapted, *self.left, *self.rest]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def choose(model: nn.Module, patterns: Sequence[str]) -> AdaptedLayers:
    """The linear layers whose names match a pattern, or all those of the blocks where there are no patterns."""
    choice = AdaptedLayers()
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    readers = read_by_others(model)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) and not is_transposed(layer):
            continue
        asked = any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else is_in_block(name)
        if not asked:
            choice.rest.append(name)
        elif why := readers.get(layer, "") or _why_not(layer, uses[id(layer.weight)]):
            choice.left[name] = why
        else:
            choice.adapted[name] = layer
    return choice


def _why_not(layer: nn.Module, uses: int) -> str:
    if uses > 1:
        return "another layer has the same weight"
    if isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
        return f"{type(layer).__name__} has a forward pass of its own"
    return ""


def unmatched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Patterns that no linear layer's name matches."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) or is_transposed(layer)]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def sizes(model: nn.Module, patterns: Sequence[str], rank: int, *, dora: bool) -> dict[str, float]:
    """How many layers would be adapted, and how many parameters be trained and frozen."""
    adapted = choose(model, patterns).adapted
    trained = sum(rank * sum(layer.get_parameter("weight").shape) for layer in adapted.values())
    if dora:  # the length of each row
        trained += sum(layer.get_parameter("weight").shape[is_transposed(layer)] for layer in adapted.values())
    frozen = sum(parameter.numel() for parameter in model.parameters())
    return {"adapted_layers": len(adapted), "adapter_parameters": trained, "frozen_parameters": frozen}
