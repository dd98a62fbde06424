"""The default forward pass and loss, for the common forms of batches and model outputs; other forms are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.wrapped import unwrap

Batch = Any  # what the loader yields: a mapping or tuple of tensors, or what `run.collate` returns
Output = Any  # what the model returns: a tensor, or an object with `.logits`
Params = list[nn.Parameter]
Forward = Callable[[nn.Module, Batch], Output]
Loss = Callable[[Output, Batch], tuple[Tensor, Tensor]]
Collate = Callable[[list[Any]], Batch]

IGNORED = -100
"""Target value that the loss ignores; the default of torch's `ignore_index`."""
_OPTIONAL = ("attention_mask", "position_ids")
_HINT = "for batches of another form, give Job(forward=…, loss=…), or run.forward and run.loss in a run file"


@dataclass(frozen=True)
class Repeated:
    """A batch for `Job.evaluate` whose loss is not counted, because another rank counts its samples. The model and the
    loss are still called, because they may communicate with other ranks."""

    batch: Batch


def call_model(model: nn.Module, batch: Batch) -> Output:
    """Call the model on the inputs of a batch, and return its output.

    The inputs of a tuple are its first item. The inputs of a mapping are its entry `inputs`, or the entries of
    transformers' collators: `input_ids`, and also `attention_mask` and `position_ids` if the batch has them.

    Raises:
        ConfigError: the batch has no inputs, or it has a mask or positions that the model does not take.
    """
    inputs = _entry(batch, 0, "inputs", "input_ids")
    if not isinstance(batch, Mapping) or "inputs" in batch:
        return model(inputs)
    optional = {name: batch[name] for name in _OPTIONAL if name in batch}
    for name in optional:
        inner = unwrap(model)
        parameters = inspect.signature(inner.forward).parameters
        if name not in parameters and not any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        ):
            hint = "remove it from the batch: a causal model does not see padding on the right; its labels are -100"
            raise ConfigError(f"`{type(inner).__name__}` takes no `{name}`, which the batch has", hint=hint)
    return model(inputs, **optional)


def cross_entropy(output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (sum of the negative log-likelihoods in nats, number of targets); ignore targets of -100.

    The logits, of shape (..., V), are the output itself or its `.logits`. The targets, integers of shape (...), are the
    second item of a tuple or the entry `targets` of a mapping. The entry `labels` (transformers' name) of shape (B, T)
    holds the input tokens, not shifted: the logits at position t are scored against label t + 1.

    Raises:
        ConfigError: the output has no logits, the batch has no targets, their shapes differ, or a target is no valid
            class index.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        raise ConfigError(
            f"the model returned a {type(output).__name__}, neither logits nor an object with `.logits`", hint=_HINT
        )
    targets = _entry(batch, 1, "targets", "labels")
    if isinstance(batch, Mapping) and "targets" not in batch and targets.ndim > 1:
        targets = F.pad(targets, (0, 1), value=IGNORED)[..., 1:]  # shifting the logits instead would copy them
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"logits of shape {tuple(logits.shape)} do not fit targets of shape {tuple(targets.shape)}",
            hint="logits need the shape of the targets, and a last dimension for the classes",
        )
    with known_targets(logits, targets):
        total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


@contextmanager
def known_targets(logits: Tensor, targets: Tensor) -> Iterator[None]:
    """On a CPU, turn torch's error about a target out of range into an error that names the sample."""
    try:
        yield
    except IndexError as error:
        classes = logits.shape[-1]
        strange = (targets != IGNORED) & ((targets < 0) | (targets >= classes))
        if not strange.any():
            raise
        sample, *place = strange.nonzero()[0].tolist()
        where = f"sample {sample} of the batch" + (f", position {place[0]}," if place else "")
        raise ConfigError(
            f"{where} has the target {int(targets[strange][0])}, but the model has only the classes 0 to {classes - 1}",
            hint="give the model as many classes as the data set has, or correct the labels",
        ) from error


def sum_and_count(returned: Any) -> tuple[Tensor, Tensor]:
    """Check that a loss function returned (sum, count), and convert both to 0-d tensors.

    Raises:
        ConfigError: the loss function returned something else.
    """
    match returned:
        case (Tensor(ndim=0) as total, Tensor(ndim=0) | int() | float() as count):
            return total, count if isinstance(count, Tensor) else torch.tensor(count, device=total.device)
        case (Tensor() as total, Tensor() | int() | float()) if total.ndim:
            form = f"a total of shape {tuple(total.shape)}"
        case Tensor():
            form = f"a Tensor of shape {tuple(returned.shape)}"
        case tuple():
            form = "a tuple of " + " and ".join(type(item).__name__ for item in returned)
        case _:
            form = f"a {type(returned).__name__}"
    raise ConfigError(
        f"the loss returned {form}, not (sum, count)",
        hint="return the sum over all targets and the number of targets; multiply a mean by the number of targets",
    )


def _entry(batch: Batch, position: int, name: str, other: str) -> Tensor:
    """The tensor at `position` of a tuple, or under `name` or `other` in a mapping."""
    if isinstance(batch, Mapping):
        key = name if name in batch else other
        if key not in batch:
            raise ConfigError(f"the batch has neither `{name}` nor `{other}`, only {', '.join(batch)}", hint=_HINT)
        what, value = f"`{key}` of the batch", batch[key]
    elif isinstance(batch, list | tuple) and len(batch) > position:
        what, value = f"item {position} of the batch", batch[position]
    else:
        raise ConfigError(f"the batch is a {type(batch).__name__}, neither a mapping nor a pair", hint=_HINT)
    if not isinstance(value, Tensor):
        hint = 'a data set gives tensors after with_format("torch")'
        raise ConfigError(f"{what} is a {type(value).__name__}, not a tensor", hint=hint)
    return value
