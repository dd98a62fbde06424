"""Modules that a job uses without training them: without gradients, in evaluation mode, and saved as a reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring._torch import content_of
from shoestring.core.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Reference:
    """The state of a frozen module: where it comes from and a hash of its tensors, in place of these."""

    source: str
    digest: str
    within_model: tuple[str, ...]
    """The names of those tensors that are the job's own model's: what the model's state leaves out."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise ConfigError(f"a frozen module has the source {self.source!r}", hint="give what `open_model` takes")

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare; there is nothing to load.

        Raises:
            CheckpointError: what was saved refers to other tensors.
        """
        if state_dict["digest"] != self.digest:
            raise CheckpointError(
                f"`{self.source}` has other weights than `{state_dict['source']}` had when the checkpoint was written"
            )


def digest(module: nn.Module) -> str:
    """SHA-256 of the names, types, shapes and bytes of a module's state."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        tensor = value if isinstance(value, Tensor) else torch.tensor(list(repr(value).encode()), dtype=torch.uint8)
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(content_of(tensor))
    return total.hexdigest()


def shared_names(module: nn.Module, model: nn.Module, label: str) -> tuple[str, ...]:
    """The names in the model's state of the tensors that it shares with `module`.

    Raises:
        ConfigError: a parameter that the model trains is used by `module` and elsewhere.
    """
    tensors = {id(value) for value in module.state_dict(keep_vars=True).values()}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad} & tensors
    common = set(model.modules()) & set(module.modules())
    apart = {*model.modules(), *module.modules()} - common
    if model in common or any(id(parameter) in trained for each in apart for parameter in each.parameters(False)):
        raise ConfigError(f"{label} shares parameters that the model trains", hint="freeze a copy of it")
    return tuple(name for name, value in model.state_dict(keep_vars=True).items() if id(value) in tensors)


def freeze(module: nn.Module) -> Callable[[], None]:
    """Take gradients from all parameters and hold all submodules in evaluation mode; what undoes that."""
    modes = {each: each.training for each in module.modules()}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.eval().requires_grad_(False)
    for each in modes:  # the `train()` of a model around it asks every module below for its own
        vars(each)["train"] = lambda mode=True, each=each: each

    def undo() -> None:
        for each, training in modes.items():
            vars(each).pop("train", None)
            each.training = training
        for parameter in trained:
            parameter.requires_grad_(True)

    return undo
