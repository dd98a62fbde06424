"""What is learned: how a model is called on a batch, and the loss of what it returns, in the forms that users bring.

Other forms are refused in one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoestring.core.errors import ConfigError

Batch = Any  # what the loader yields: a mapping or tuple of tensors
Output = Any  # what the model returns: a tensor, or an object with `.logits`
Params = list[nn.Parameter]
Forward = Callable[[nn.Module, Batch], Output]
Loss = Callable[[Output, Batch], tuple[Tensor, Tensor]]

IGNORED = -100
"""Target that no loss counts; torch's `ignore_index`."""
_OPTIONAL = ("attention_mask", "position_ids")
_HINT = "for batches of another form, give Job(forward=…, loss=…)"


def call_model(model: nn.Module, batch: Batch) -> Output:
    """The model's output on the batch's inputs.

    A tuple gives its first item. A mapping gives `inputs`; or, as the collators of transformers name them, `input_ids`
    with `attention_mask` and `position_ids` where the batch has them.

    Raises:
        ConfigError: the batch has no inputs, or the model takes no mask.
    """
    inputs = _entry(batch, 0, "inputs", "input_ids")
    if not isinstance(batch, Mapping) or "inputs" in batch:
        return model(inputs)
    optional = {name: batch[name] for name in _OPTIONAL if name in batch}
    for name in optional:
        _check_takes(model, name)
    return model(inputs, **optional)


def cross_entropy(output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
    """(sum of the negative log-likelihoods in nats, number of targets); targets of -100 do not count.

    Shapes: logits (..., V) as the output itself or its `.logits`; targets (...) integers, the second item of a tuple
    or the entry `targets` of a mapping. The entry `labels` (transformers' name) of shape (B, T) holds the inputs
    themselves: position t is scored against label t + 1.

    Raises:
        ConfigError: the output has no logits, the batch no targets, or their shapes differ.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        raise ConfigError(
            f"the model returned a {type(output).__name__}, neither logits nor an object with `.logits`", hint=_HINT
        )
    targets = _entry(batch, 1, "targets", "labels")
    if isinstance(batch, Mapping) and "targets" not in batch and targets.ndim > 1:
        targets = F.pad(targets, (0, 1), value=IGNORED)[..., 1:]  # so that the logits are not copied to be cut
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"logits of shape {tuple(logits.shape)} do not fit targets of shape {tuple(targets.shape)}",
            hint="logits have one dimension more than targets, the vocabulary, and it is the last",
        )
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def sum_and_count(returned: Any) -> tuple[Tensor, Tensor]:
    """What a loss returned, as two 0-d tensors.

    Raises:
        ConfigError: it is not a sum and a count.
    """
    match returned:
        case (Tensor(ndim=0) as total, Tensor(ndim=0) as count):
            return total, count
        case (Tensor(ndim=0) as total, int() | float() as count):
            return total, torch.tensor(count, device=total.device)
        case (Tensor() as total, Tensor() | int() | float()) if total.ndim:
            found = f"a total of shape {tuple(total.shape)}"
        case Tensor():
            found = f"a Tensor of shape {tuple(returned.shape)}"
        case tuple():
            found = "a tuple of " + " and ".join(type(item).__name__ for item in returned)
        case _:
            found = f"a {type(returned).__name__}"
    raise ConfigError(
        f"the loss returned {found}, not (sum, count)",
        hint="return the sum over all targets and the number of targets; for a mean, multiply it by that number",
    )


def _entry(batch: Batch, position: int, name: str, other: str) -> Tensor:
    """The tensor at `position` of a tuple, or under one of two names of a mapping."""
    if isinstance(batch, Mapping):
        found = name if name in batch else other
        if found not in batch:
            raise ConfigError(f"the batch has neither `{name}` nor `{other}`, only {', '.join(batch)}", hint=_HINT)
        what, value = f"`{found}` of the batch", batch[found]
    elif isinstance(batch, list | tuple) and len(batch) > position:
        what, value = f"item {position} of the batch", batch[position]
    else:
        raise ConfigError(f"the batch is a {type(batch).__name__}, neither a mapping nor a pair", hint=_HINT)
    if not isinstance(value, Tensor):
        hint = 'a data set gives tensors after with_format("torch")'
        raise ConfigError(f"{what} is a {type(value).__name__}, not a tensor", hint=hint)
    return value


def _check_takes(model: nn.Module, name: str) -> None:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = inspect.signature(inner.forward).parameters
    if name not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        hint = "remove it from the batch: a causal model does not see padding on the right; its labels are -100"
        raise ConfigError(f"`{type(inner).__name__}` takes no `{name}`, which the batch has", hint=hint)
