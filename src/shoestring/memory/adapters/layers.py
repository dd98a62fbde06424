"""Which linear layers of a model get adapters, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from shoestring.core.errors import ConfigError, nearest
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


def choose(model: nn.Module, patterns: Sequence[str], trained: Sequence[str] = ()) -> AdaptedLayers:
    """The linear layers whose names match a pattern, or all those of the blocks where there are no patterns.

    Args:
        trained: patterns of the modules whose own weights are trained, which need no adapters.
    """
    choice = AdaptedLayers()
    whole = parameters_of(model, trained_modules(model, trained))
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    readers = read_by_others(model)
    for name, layer in model.named_modules():
        if (not isinstance(layer, nn.Linear) and not is_transposed(layer)) or id(layer.weight) in whole:
            continue
        asked = any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else is_in_block(name)
        if not asked:
            choice.rest.append(name)
        elif why := readers.get(layer, "") or _why_not(layer, uses[id(layer.weight)]):
            choice.left[name] = why
        else:
            choice.adapted[name] = layer
    return choice


def trained_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of the outermost modules that match a pattern.

    Raises:
        ConfigError: one matches none, or none with weights.
    """
    found: list[str] = []
    for pattern in patterns:
        own = [name for name, module in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not any(True for name in own for _ in model.get_submodule(name).parameters()):
            names = [name for name, module in model.named_modules() if [*module.parameters(False)]]
            said = f"`memory.lora.modules_to_train`: `{pattern}` matches no module with weights"
            raise ConfigError(said, hint=nearest(pattern, names))
        found += own
    return sorted({name for name in found if not any(name.startswith(f"{other}.") for other in found)})


def parameters_of(model: nn.Module, modules: Iterable[str]) -> dict[int, list[str]]:
    """The parameters of these modules, by identity, each with all names that the model has for it."""
    wanted = {id(parameter) for name in modules for parameter in model.get_submodule(name).parameters()}
    found: dict[int, list[str]] = {each: [] for each in wanted}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in wanted:
            found[id(parameter)].append(name)
    return found


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


def sizes(
    model: nn.Module, patterns: Sequence[str], rank: int, *, dora: bool, modules: Sequence[str] = ()
) -> dict[str, float]:
    """How many layers would be adapted, and how many parameters be trained and frozen."""
    adapted = choose(model, patterns, modules).adapted
    trained = sum(rank * sum(layer.get_parameter("weight").shape) for layer in adapted.values())
    if dora:  # the length of each row
        trained += sum(layer.get_parameter("weight").shape[is_transposed(layer)] for layer in adapted.values())
    whole = sum(
        model.get_parameter(names[0]).numel()
        for names in parameters_of(model, trained_modules(model, modules)).values()
    )
    frozen = sum(parameter.numel() for parameter in model.parameters()) - whole
    return {"adapted_layers": len(adapted), "adapter_parameters": trained + whole, "frozen_parameters": frozen}
