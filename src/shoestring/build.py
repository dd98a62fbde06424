"""Objects from the names in a run file: models, losses and data sets; and models from the folders that runs leave."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import nn

from shoestring.core.errors import CheckpointError, ConfigError, nearest
from shoestring.core.files import write_atomic
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.models import llama
from shoestring.models.gpt import GPT

MARKER = "shoestring"  # the key in config.json of models that no other library reads


def resolve(target: str, key: str) -> Callable[..., Any]:
    """The callable named `package.module:callable` by the run file's `key`.

    Raises:
        ConfigError: no such module or name in it, or importing it fails.
    """
    module_name, _, name = target.partition(":")
    if not name:
        raise ConfigError(f"`{key}` is {target!r}, not of the form `package.module:callable`")
    try:
        module = import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"`{key}`: cannot import `{module_name}`: {reason}") from error
    found = getattr(module, name, None)
    if not callable(found):
        public = [each for each in dir(module) if not each.startswith("_") and callable(getattr(module, each))]
        raise ConfigError(f"`{key}`: `{module_name}` has no callable `{name}`", hint=nearest(name, public))
    return found


def model(target: str, arguments: Mapping[str, Any], offered: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """Call `run.model` with [model]'s arguments, and with those of `offered` (vocab_size, context) that it takes.

    Raises:
        ConfigError: an argument it does not take (with the nearest one), or it does not return a trainable module.
    """
    build = resolve(target, "run.model")
    accepted = _accepted(build)
    given = {name: value for name, value in offered.items() if accepted is None or name in accepted} | dict(arguments)
    if accepted is not None:
        for name in given:
            if name not in accepted:
                raise ConfigError(f"`{target}` takes no argument `{name}`", hint=nearest(name, accepted))
    torch.manual_seed(seed)
    try:
        built = build(**given)
    except TypeError as error:
        raise ConfigError(f"`{target}` cannot be called with {dict(given)}: {error}") from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"`{target}` returned a {type(built).__name__}, not an nn.Module")
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise ConfigError(f"`{target}` has no trainable parameters")
    return built


def _accepted(build: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments it takes; None where it takes any, or where nobody knows (a builtin)."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]


def save_model(built: nn.Module, tokenizer: Tokenizer | None, folder: Path, made_by: Mapping[str, Any]) -> None:
    """Write a model as safetensors and config.json: in Llama's layout where it has one, marked as ours elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    own_format = getattr(built, "save_pretrained", None)
    if isinstance(built, GPT):
        llama.save_pretrained(built, folder)
    elif callable(own_format):
        own_format(folder)
    else:
        _save_weights(built, folder / "model.safetensors")
        write_atomic(folder / "config.json", json.dumps({MARKER: dict(made_by)}, indent=2).encode())
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")


def _save_weights(built: nn.Module, path: Path) -> None:
    """As safetensors, whole or not at all; weights under several names are written once."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        save_weights(built, str(aside))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def load_model(path: Path) -> tuple[nn.Module, Tokenizer | None]:
    """A model and its tokenizer from a run folder or a model folder, by what its config.json says.

    Raises:
        CheckpointError: there is no model, or its weights do not fit.
    """
    folder = path / "model" if (path / "model" / "config.json").is_file() else path
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"`{path}` holds no model: {error}", hint="name a run folder or a model folder"
        ) from error
    built = _marked(folder, config[MARKER]) if MARKER in config else llama.load_pretrained(folder)
    tokenizer = folder / "tokenizer.json"
    return built.eval(), load_tokenizer(tokenizer) if tokenizer.is_file() else None


def _marked(folder: Path, made_by: Mapping[str, Any]) -> nn.Module:
    built = model(made_by["model"], made_by["arguments"], made_by["offered"])
    try:
        load_weights(built, str(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"cannot load `{folder / 'model.safetensors'}`: {error}") from error
    return built
