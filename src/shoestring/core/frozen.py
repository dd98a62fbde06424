"""Modules that a job uses without training them; checkpoints hold the source and a hash of their weights."""

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
    """What a checkpoint holds for a frozen module: its source and a hash of its tensors, instead of the tensors."""

    source: str
    digest: str
    within_model: tuple[str, ...]
    """Names of tensors that the job's model shares with the module; `ModelState` leaves them out of checkpoints."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise ConfigError(
                f"a frozen module has the source {self.source!r}", hint="give a name or path that `open_model` accepts"
            )

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare this module's hash with the checkpoint's; a `Reference` has no tensors to load.

        Raises:
            CheckpointError: the checkpoint was written with other tensors.
        """
        if state_dict["digest"] != self.digest:
            raise CheckpointError(
                f"`{self.source}` has other weights than `{state_dict['source']}` had when the checkpoint was written"
            )


def digest(module: nn.Module) -> str:
    """SHA-256 of the names, data types, shapes and bytes of all entries of a module's state dict."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        tensor = value if isinstance(value, Tensor) else torch.tensor(list(repr(value).encode()), dtype=torch.uint8)
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(content_of(tensor))
    return total.hexdigest()


def shared_names(module: nn.Module, model: nn.Module, label: str) -> tuple[str, ...]:
    """Names, in the model's state dict, of the tensors that the model shares with `module`.

    Raises:
        ConfigError: freezing `module` would freeze a parameter that the model trains in another layer.
    """
    tensors = {id(value) for value in module.state_dict(keep_vars=True).values()}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad} & tensors
    common = set(model.modules()) & set(module.modules())
    apart = {*model.modules(), *module.modules()} - common
    if model in common or any(id(parameter) in trained for part in apart for parameter in part.parameters(False)):
        raise ConfigError(f"{label} shares parameters that the model trains", hint="freeze a copy of it")
    return tuple(name for name, value in model.state_dict(keep_vars=True).items() if id(value) in tensors)


def freeze(module: nn.Module) -> Callable[[], None]:
    """Turn off gradients of all parameters, and keep all submodules in evaluation mode.

    Returns:
        A function that restores gradients and modes.
    """
    modes = {submodule: submodule.training for submodule in module.modules()}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.eval().requires_grad_(False)
    for submodule in modes:  # `train()` of an enclosing model would call `train()` of every submodule
        vars(submodule)["train"] = lambda mode=True, submodule=submodule: submodule

    def undo() -> None:
        for submodule, training in modes.items():
            vars(submodule).pop("train", None)
            submodule.training = training
        for parameter in trained:
            parameter.requires_grad_(True)

    return undo
