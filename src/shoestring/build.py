"""Objects from the names in a run file: models, losses and data sets; and models from the folders that runs leave."""

from __future__ import annotations

import inspect
import json
import shutil
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
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.models import hf, llama
from shoestring.models.gpt import GPT
from shoestring.storage.whole import replaced_folder, write_atomic

MARKER = "shoestring"
"""The key in config.json under which a model folder says its `format`: which of `READERS` opens it."""
TRANSFORMERS = {MARKER: {"format": "transformers"}}
PRETRAINED = "pretrained"
"""The folder in a run's folder that holds the configuration of the `hf:` model it began with."""


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


def model(
    target: str, arguments: Mapping[str, Any], offered: Mapping[str, Any], seed: int = 0, *, weights: bool = True
) -> nn.Module:
    """Call `run.model` with [model]'s arguments, and with those of `offered` (vocab_size, context) that it takes.

    Args:
        weights: False where a state is loaded afterwards: the files of an `hf:` model are then not read.

    Raises:
        ConfigError: an argument it does not take (with the nearest one), or it does not return a trainable module.
    """
    torch.manual_seed(seed)
    if target.startswith(hf.PREFIX):
        return hf.build(target.removeprefix(hf.PREFIX), arguments, offered, weights=weights)
    build = resolve(target, "run.model")
    accepted = _accepted(build)
    given = {name: value for name, value in offered.items() if accepted is None or name in accepted} | dict(arguments)
    if accepted is not None:
        for name in given:
            if name not in accepted:
                raise ConfigError(f"`{target}` takes no argument `{name}`", hint=nearest(name, accepted))
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
    """Write a model as safetensors and config.json: as transformers reads it where it can, else as `made_by` says.

    An earlier model in the folder stays whole until this one is; what else is there stays.
    """
    with replaced_folder(folder) as new:
        own_format = getattr(built, "save_pretrained", None)
        if isinstance(built, GPT):
            llama.save_pretrained(built, new)
        elif hf.is_pretrained(built):
            hf.save(built, new, TRANSFORMERS)
        elif callable(own_format):
            own_format(new)
        else:
            _save_weights(built, new / "model.safetensors")
            write_atomic(new / "config.json", json.dumps(marked(made_by), indent=2).encode())
        if tokenizer is not None:
            save_tokenizer(tokenizer, new, made_by)
        _carry_over(folder, new)


def _carry_over(former: Path, new: Path) -> None:
    """Keep what is in a model's folder besides the model: a user's notes."""
    for path in former.iterdir() if former.is_dir() else ():
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and not (new / path.name).exists():
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, new / path.name, symlinks=True)
            else:
                shutil.copy2(path, new / path.name, follow_symlinks=False)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, made_by: Mapping[str, Any]) -> None:
    """Write a model's tokenizer to its folder; generation with transformers ends where a document does."""
    tokenizer.save_pretrained(folder, made_by["offered"]["context"])
    if not (folder / "generation_config.json").exists():
        write_atomic(folder / "generation_config.json", json.dumps({"eos_token_id": tokenizer.end_of_text}).encode())


def marked(made_by: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model that its own module builds."""
    return {MARKER: {"format": "module", **made_by}}


def remember(target: str, folder: Path) -> None:
    """Write to a run's `folder` what its saves need to become a model again wherever the folder is."""
    if target.startswith(hf.PREFIX):
        hf.remember(target.removeprefix(hf.PREFIX), folder / PRETRAINED)


def _save_weights(built: nn.Module, path: Path) -> None:
    """As safetensors, whole or not at all; weights under several names are written once."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        save_weights(built, str(aside))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def load_model(path: Path) -> tuple[nn.Module, Tokenizer | None]:
    """A model and its tokenizer from a run folder, a model folder or one of transformers, by what config.json says.

    Raises:
        CheckpointError: there is no model, its format is unknown, or its weights do not fit.
    """
    if str(path).startswith(hf.PREFIX):
        return _from_hub(str(path).removeprefix(hf.PREFIX))
    folder = path / "model" if (path / "model" / "config.json").is_file() else path
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"`{path}` holds no model: {error}", hint="name a run folder or a model folder"
        ) from error
    built = _reader(config, folder)(folder)
    tokenizer = folder / "tokenizer.json"
    return built.eval(), load_tokenizer(tokenizer) if tokenizer.is_file() else None


def _from_hub(name: str) -> tuple[nn.Module, Tokenizer | None]:
    built, tokenizer = hf.load(name), hf.file_of(name, "tokenizer.json")
    return built.eval(), load_tokenizer(tokenizer) if tokenizer else None


def _from_module(folder: Path) -> nn.Module:
    made_by = json.loads((folder / "config.json").read_text())[MARKER]
    built = model(made_by["model"], made_by["arguments"], made_by["offered"])
    try:
        load_weights(built, str(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"cannot load `{folder / 'model.safetensors'}`: {error}") from error
    return built


READERS: dict[str, Callable[[Path], nn.Module]] = {
    "gpt": llama.load_pretrained,
    "module": _from_module,
    "transformers": lambda folder: hf.load(str(folder)),
}
"""What opens a model folder, by the format that it is marked with."""


def _reader(config: Any, folder: Path) -> Callable[[Path], nn.Module]:
    """By the marker; without one, our GPT opens the Llamas that it computes, and transformers all else."""
    if not isinstance(config, dict):
        raise CheckpointError(f"`{folder / 'config.json'}` is not a JSON object")
    if MARKER not in config:
        return READERS["gpt" if llama.supports(config) else "transformers"]
    mark = config[MARKER]
    form = mark.get("format", "module") if isinstance(mark, dict) else mark  # the first version wrote no format
    if form not in READERS:
        raise CheckpointError(
            f"`{folder}` has the format {form!r}, this version reads {', '.join(READERS)}",
            hint="install a newer version of shoestring",
        )
    return READERS[form]
