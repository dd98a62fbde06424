"""Selects the linear layers of a model that get adapters, and gives the reasons why other layers get none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from shoestring.core.errors import ConfigError, nearest
from shoestring.models import quantized
from shoestring.models.blocks import is_in_block, is_transposed, read_by_others, routers
from shoestring.models.plain_layers import is_product

_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Layer names that PEFT 0.21 takes for experts if a mixture of experts stores its experts in one tensor
`gate_up_proj`."""


@dataclass
class AdaptedLayers:
    """The linear layers of a model, by name: layers that get adapters, and layers that do not."""

    adapted: dict[str, nn.Module] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Layers that match a pattern but cannot have an adapter, with the reason."""
    rest: list[str] = field(default_factory=list)
    """Names of the layers that match no pattern."""

    @property
    def examples(self) -> str:
        names = [*self.adapted, *self.left, *self.rest]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def choose(model: nn.Module, patterns: Sequence[str], trained: Sequence[str] = ()) -> AdaptedLayers:
    """Select the linear layers whose names match a pattern; if there are no patterns, all linear layers of the blocks.

    Args:
        trained: patterns of the modules whose own weights are trained; these modules get no adapters.
    """
    choice = AdaptedLayers()
    whole = parameters_of(model, trained_modules(model, trained))
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    readers, choosing = read_by_others(model), routers(model)
    mixture = any(name.endswith(".gate_up_proj") and value.dim() == 3 for name, value in model.named_parameters())
    for name, layer in model.named_modules():
        if (not isinstance(layer, nn.Linear) and not is_transposed(layer)) or id(layer.weight) in whole:
            continue
        of_block = is_in_block(name) and layer not in choosing
        matches = any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else of_block
        if not matches:
            choice.rest.append(name)
        elif reason := readers.get(layer, ""):
            choice.left[name] = reason
        elif uses[id(layer.weight)] > 1:
            choice.left[name] = "another layer has the same weight"
        elif isinstance(layer, nn.Linear) and not is_product(layer):
            choice.left[name] = f"{type(layer).__name__} has a forward pass of its own"
        elif mixture and not patterns and name.rpartition(".")[2] in _OF_EXPERTS:
            choice.left[name] = "PEFT takes its name for that of the experts"
        else:
            choice.adapted[name] = layer
    return choice


def trained_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of the outermost modules that match a pattern.

    Raises:
        ConfigError: a pattern matches no module with weights.
    """
    matching: list[str] = []
    for pattern in patterns:
        own = [name for name, module in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not any(True for name in own for _ in model.get_submodule(name).parameters()):
            names = [name for name, module in model.named_modules() if [*module.parameters(False)]]
            message = f"`memory.lora.modules_to_train`: `{pattern}` matches no module with weights"
            raise ConfigError(message, hint=nearest(pattern, names))
        matching += own
    return sorted({name for name in matching if not any(name.startswith(f"{other}.") for other in matching)})


def parameters_of(model: nn.Module, modules: Iterable[str]) -> dict[int, list[str]]:
    """Map the id of each parameter in `modules` to all of its names; tied parameters have several names."""
    wanted = {id(parameter) for name in modules for parameter in model.get_submodule(name).parameters()}
    names: dict[int, list[str]] = {identity: [] for identity in wanted}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in wanted:
            names[id(parameter)].append(name)
    return names


def unmatched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The patterns that do not match the name of any linear layer."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) or is_transposed(layer)]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def layers_to_round(model: nn.Module, bits: int, whole: Container[int]) -> dict[str, quantized.Bits]:
    """Map the names of the linear layers to quantise, all in blocks, to their bits; empty unless `bits` is 8 or 4.

    Args:
        whole: ids of the parameters that are trained; these parameters are not quantised.
    """
    if bits not in (8, 4):
        return {}
    chosen, _ = quantized.choose(model, 8 if bits == 8 else 4)
    layers = {name: layer for name, layer in model.named_modules() if name in chosen and is_in_block(name)}
    fit = {
        name for name, layer in layers.items() if not isinstance(layer, nn.Embedding) and id(layer.weight) not in whole
    }
    return {name: width for name, width in chosen.items() if name in fit}


def sizes(
    model: nn.Module, patterns: Sequence[str], rank: int, *, dora: bool, modules: Sequence[str] = (), bits: int = 0
) -> dict[str, float]:
    """Count the adapted layers and the trained, frozen and quantised parameters of a run with LoRA."""
    adapted = choose(model, patterns, modules).adapted
    trained = sum(rank * sum(layer.get_parameter("weight").shape) for layer in adapted.values())
    if dora:  # DoRA also trains the norm of each row
        trained += sum(layer.get_parameter("weight").shape[is_transposed(layer)] for layer in adapted.values())
    named = parameters_of(model, trained_modules(model, modules))
    whole = sum(model.get_parameter(names[0]).numel() for names in named.values())
    frozen = sum(parameter.numel() for parameter in model.parameters()) - whole
    inside = [model.get_submodule(name) for name in layers_to_round(model, bits, named)]
    rounded = {id(parameter): parameter.numel() for layer in inside for parameter in layer.parameters()}
    facts: dict[str, float] = {
        "adapted_layers": len(adapted),
        "adapter_parameters": trained + whole,
        "frozen_parameters": frozen,
    }
    return facts | {"rounded_parameters": sum(rounded.values())}
