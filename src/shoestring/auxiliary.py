"""Auxiliary losses that a model returns beside its logits, such as the load-balancing loss of a mixture of experts.

This module adds auxiliary losses to the built-in cross-entropy, with the factors that the model's own loss uses. An
auxiliary loss without a known factor raises an error rather than being ignored. A custom loss function must read
auxiliary losses from the output by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_HINT = "write a loss function that reads it: run.loss, or Job(loss=…)"
_FACTORS = {
    "aux_loss": ("router_aux_loss_coef", "aux_loss_coef"),
    "auxiliary_loss": ("auxiliary_loss_weight",),
    "z_loss": ("router_z_loss_coef",),
}
"""Maps the name of an auxiliary loss in the output to the possible names of its factor in the model or its
configuration, as the library transformers names them."""


def with_auxiliary(
    total: Tensor, count: Tensor, output: Any, module: nn.Module, error: Callable[..., Exception]
) -> Tensor:
    """Add the auxiliary losses in a model's output to `total`, the summed loss of a micro-batch; returns the sum.

    An auxiliary loss is a mean over tokens. This function multiplies an auxiliary loss by the number of targets, so
    that micro-batches and ranks are weighted by their tokens, as in the mean of the cross-entropy.

    Args:
        count: number of targets of the micro-batch.
        error: function (message, hint=) -> the error to raise if the factor of an auxiliary loss is unknown.
    """
    if hasattr(output, "logits"):
        for name, value in _fields_of(output).items():
            # The model's own `loss` is left out: it already includes the auxiliary losses.
            if name == "loss" or not any(tensor.requires_grad for tensor in _tensors(value)):
                continue
            if isinstance(value, Tensor) and value.numel() == 1:
                total = total + _factor(module, name, error) * value.to(total).reshape(()) * count
            elif "loss" in name:
                kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"as a {type(value).__name__}"
                raise error(f"{type(module).__name__} returns `{name}` {kind}, which is not one number", hint=_HINT)
    return total


def _fields_of(output: Any) -> dict[str, Any]:
    """Map the names in a model's output to their values; the output may be a mapping, a named tuple or any object."""
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, tuple):
        return output._asdict() if hasattr(output, "_asdict") else {}
    slots = (name for kind in type(output).__mro__ for name in getattr(kind, "__slots__", ()))
    return {name: getattr(output, name) for name in slots if hasattr(output, name)} | getattr(output, "__dict__", {})


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        yield from (item for item in value if isinstance(item, Tensor))


def _factor(module: nn.Module, name: str, error: Callable[..., Exception]) -> float:
    config = getattr(module, "config", None)
    places = module, config, getattr(config, "text_config", None)
    for factor in _FACTORS.get(name, ()):
        for place in places:
            if isinstance(value := getattr(place, factor, None), int | float):
                return value
    hint = f"set `{_FACTORS[name][0]}` on the model, or {_HINT}" if name in _FACTORS else _HINT
    raise error(
        f"{type(module).__name__} returns `{name}` beside its logits, and its factor in the loss is not known",
        hint=hint,
    )
