"""Models, opened: from `package.module:callable`, from the folder of a run or a model, and from Hugging Face."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from torch import nn

from shoestring.core.errors import CheckpointError, ConfigError, nearest
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.models import adapter_folder, gguf, hf, llama, packed24, quantized, slorb
from shoestring.models.adapters import merge
from shoestring.models.gpt import GPT
from shoestring.models.saving import MARKER, model_folder
from shoestring.naming import resolve


def open_model(
    source: str, arguments: Mapping[str, Any] | None = None, from_data: Mapping[str, Any] | None = None, seed: int = 0
) -> nn.Module:
    """A model in evaluation mode, by the name that a user gives: of a teacher, a drafter, a base of adapters.

    Args:
        source: `hf:NAME`, the folder of a run or of a model, or `package.module:callable`, whose weights are drawn
            from `seed`; random numbers elsewhere stay as they are.
        arguments: of the callable, or entries of config.json of an `hf:` model; a folder takes none.
        from_data: what the data needs, `vocab_size` and `context`.

    Raises:
        ConfigError: there is no such callable or `hf:` model, or it does not take these arguments.
        CheckpointError: a folder holds no model, or its weights do not fit.
    """
    if ":" in source:
        with torch.random.fork_rng(devices=[]):
            return build_model(source, arguments or {}, from_data or {}, seed).eval()
    if arguments:
        raise ConfigError(f"the model in `{source}` takes no arguments, got {', '.join(arguments)}")
    return load_model(source)[0]


def outline(source: str) -> nn.Module | None:
    """The model that `open_model` opens, on the meta device: its shape without its weights, which are not read.

    None for `package.module:callable`, which may do anything besides.

    Raises:
        ConfigError, CheckpointError: as `open_model` does.
    """
    if ":" in source and not source.startswith(hf.PREFIX):
        return None
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        if source.startswith(hf.PREFIX):
            return build_model(source, {}, {})
        folder = model_folder(source) or Path(source)
        config = _config(folder)
        form, mark = _format(config, folder), config.get(MARKER)
        own: dict[str, Any] = {**(mark if isinstance(mark, dict) else {}), "format": form}
        return _unfilled(own.get("of", own), config, folder)  # packed, quantized and adapted layers count as plain ones


def build_model(
    target: str, arguments: Mapping[str, Any], from_data: Mapping[str, Any], seed: int = 0, *, weights: bool = True
) -> nn.Module:
    """Call `run.model` with [model]'s arguments, and with those of `from_data` (vocab_size, context) that it takes.

    Args:
        target: `package.module:callable`, `hf:NAME`, or the folder of a run or of a model to start from.
        weights: False where a state is loaded afterwards: the files of a model are then not read.

    Raises:
        ConfigError: an argument it does not take (with the nearest one), or it does not return a trainable module.
        CheckpointError: the weights of a folder are missing or damaged.
    """
    torch.manual_seed(seed)
    if target.startswith(hf.PREFIX):
        return hf.build(target.removeprefix(hf.PREFIX), arguments, from_data, weights=weights)
    if ":" not in target and (folder := model_folder(target)) is not None:
        return _start_from(folder, arguments, from_data, weights=weights)
    build = resolve(target, "run.model")
    accepted = _accepted(build)
    given = {name: value for name, value in from_data.items() if accepted is None or name in accepted} | dict(arguments)
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


def load_model(path: Path | str) -> tuple[nn.Module, Tokenizer | None]:
    """A model and its tokenizer from a run folder, a model folder, a .gguf file, `hf:NAME`, or the folder of an adapter
    in PEFT's format, which is merged into the model that it names.

    Raises:
        CheckpointError: there is no model, its format is unknown, or its weights do not fit.
    """
    if str(path).startswith(hf.PREFIX):
        return _from_hub(str(path).removeprefix(hf.PREFIX))
    if gguf.is_file(path):
        return gguf.load(Path(path))
    folder = model_folder(path)
    if folder is None and (adapter := adapter_folder.find(path)) is not None:
        return _with_adapter(adapter)
    folder = folder or Path(path)
    built = READERS[_format(_config(folder), folder)](folder)
    tokenizer = folder / "tokenizer.json"
    return built.eval(), load_tokenizer(tokenizer) if tokenizer.is_file() else None


def _with_adapter(folder: Path) -> tuple[nn.Module, Tokenizer | None]:
    """The model that an adapter names, with the adapter merged into it, and a tokenizer, the adapter's own if any."""
    base = adapter_folder.base_of(folder)
    if not base:
        hint = "add the path of that model's folder as `base_model_name_or_path` to its adapter_config.json"
        raise CheckpointError(f"the adapter in `{folder}` does not say which model it belongs to", hint=hint)
    built, tokenizer = load_model(base if Path(base).is_dir() else f"{hf.PREFIX}{base}")
    adapter = adapter_folder.read(folder, built)
    merge(built, adapter.layers)
    adapter_folder.fill(built, adapter.parameters)
    own = folder / "tokenizer.json"
    return built, load_tokenizer(own) if own.is_file() else tokenizer


def _from_hub(name: str) -> tuple[nn.Module, Tokenizer | None]:
    built, tokenizer = hf.load(name), hf.file_of(name, "tokenizer.json")
    return built.eval(), load_tokenizer(tokenizer) if tokenizer else None


def _from_module(folder: Path) -> nn.Module:
    origin = json.loads((folder / "config.json").read_text())[MARKER]
    built = build_model(origin["model"], origin["arguments"], origin["offered"])
    try:
        load_weights(built, str(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"cannot load `{folder / 'model.safetensors'}`: {error}") from error
    return built


def _from_replaced(folder: Path) -> nn.Module:
    """A model with layers that are packed, quantised or adapted: built as its own format has it, then changed."""
    config = _config(folder)
    mark = config[MARKER]
    try:
        built = _unfilled(mark["of"], config, folder).to(getattr(torch, mark["dtype"]))
        slorb.make_room(built, mark["layers"].get(slorb.NAME, {}))
        packed24.replace(built, mark["layers"]["2:4"])
        quantized.replace(built, mark["layers"].get("bits", {}))
        load_weights(built, str(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"cannot load the {mark['format']} model in `{folder}`: {error}") from error
    return built


def _unfilled(mark: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> nn.Module:
    """The model of a folder in its plain form, with weights of its own."""
    if mark["format"] == "gpt":
        return GPT(llama.from_llama_config(config, str(folder / "config.json")))
    if mark["format"] == "transformers":
        return hf.build(str(folder), {}, {}, weights=False)
    return build_model(mark["model"], mark["arguments"], mark["offered"])


READERS: dict[str, Callable[[Path], nn.Module]] = {
    "gpt": llama.load_pretrained,
    "module": _from_module,
    "packed": _from_replaced,
    "adapted": _from_replaced,
    "quantized": _from_replaced,
    "transformers": lambda folder: hf.load(str(folder)),
}
"""What opens a model folder, by the format that it is marked with."""


def _start_from(
    folder: Path, arguments: Mapping[str, Any], from_data: Mapping[str, Any], *, weights: bool
) -> nn.Module:
    """The model of a folder to train further, in float32; see `build_model`."""
    config = _config(folder)
    form = _format(config, folder)
    if form == "transformers":
        return hf.build(str(folder), arguments, from_data, weights=weights)
    if READERS[form] is _from_replaced:
        raise ConfigError(f"the model in `{folder}` is {form} and cannot be trained", hint="start from the dense model")
    if arguments:
        raise ConfigError(f"the model in `{folder}` takes no arguments, got {', '.join(arguments)}")
    if weights and torch.get_default_device().type != "meta":
        built = READERS[form](folder).float()
    else:
        mark = config.get(MARKER)
        built = _unfilled({**(mark if isinstance(mark, dict) else {}), "format": form}, config, folder)
    for name in ("vocab_size", "context"):
        has, wants = getattr(getattr(built, "config", None), name, None), from_data.get(name, 0)
        if isinstance(has, int) and has < wants:
            hint = 'set data.tokenizer = "model"' if name == "vocab_size" else "lower data.sequence"
            raise ConfigError(f"the model in `{folder}` has a {name} of {has}, and the data needs {wants}", hint=hint)
    return built


def origin_of(target: str, arguments: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """What builds a run's model again, for config.json; the folder that it began from is resolved to what is in it."""
    folder = model_folder(target) if ":" not in target else None
    if folder is None:
        return {"model": target, "arguments": dict(arguments), "offered": dict(offered)}
    config = _config(folder)
    form = _format(config, folder)
    if form == "transformers":
        return {"model": f"{hf.PREFIX}{folder}", "arguments": dict(arguments), "offered": dict(offered)}
    if form == "gpt":
        shape = asdict(llama.from_llama_config(config, str(folder / "config.json")))
        return {"model": "shoestring.models.gpt:tiny", "arguments": shape, "offered": dict(offered)}
    return {name: config[MARKER][name] for name in ("model", "arguments", "offered")}


def _config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"`{folder}` holds no model: {error}", hint="name a run folder or a model folder"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"`{folder / 'config.json'}` is not a JSON object")
    return config


def _format(config: Mapping[str, Any], folder: Path) -> str:
    """By the marker; without one, our GPT opens the Llamas that it computes, and transformers all else."""
    if MARKER not in config:
        return "gpt" if llama.supports(config) else "transformers"
    mark = config[MARKER]
    form = mark.get("format", "module") if isinstance(mark, dict) else mark  # the first version wrote no format
    if form not in READERS:
        raise CheckpointError(
            f"`{folder}` has the format {form!r}, this version reads {', '.join(READERS)}",
            hint="install a newer version of shoestring",
        )
    return form
