"""Model folders, written: weights as safetensors, a config.json that says what opens them, and the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_model as save_weights
from torch import nn

from shoestring.core.errors import ConfigError
from shoestring.data.tokenizer import Tokenizer
from shoestring.models import hf, llama, packed24, quantized, slorb
from shoestring.models.gpt import GPT
from shoestring.storage.whole import replaced_folder, write_atomic

MARKER = "shoestring"
"""The key in config.json under which a model folder says its `format`: which of `READERS` opens it."""
TRANSFORMERS = {MARKER: {"format": "transformers"}}
PRETRAINED = "pretrained"
"""The folder in a run's folder that holds the configuration of the `hf:` model or the model folder it began with."""
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


def save_model(built: nn.Module, tokenizer: Tokenizer | None, folder: Path, origin: Mapping[str, Any]) -> None:
    """Write a model as safetensors and config.json: as transformers reads it where it can, else as `origin` says.

    An earlier model in the folder stays whole until this one is; what else is there stays.
    """
    with replaced_folder(folder) as new:
        _write(built, new, config_of(origin))
        if tokenizer is not None:
            save_tokenizer(tokenizer, new, origin)
        _carry_over(folder, new)


def save_like(built: nn.Module, source: Path, folder: Path) -> None:
    """Write a model in the format of the folder `source` that it was opened from, with the files beside its weights.

    An earlier model in the folder stays whole until this one is.
    """
    with replaced_folder(folder) as new:
        _write(built, new, json.loads((source / "config.json").read_text()))
        _copy_beside_weights(source, new)


def _write(built: nn.Module, new: Path, config: Mapping[str, Any]) -> None:
    """The model's files; with `config` as config.json where its class has no format of its own."""
    own_format = getattr(built, "save_pretrained", None)
    if slorb.adapted(built) or packed24.packed(built) or quantized.quantized(built):
        dtype = next(built.parameters()).dtype
        if isinstance(built, GPT):
            config = llama.to_llama_config(built.config, dtype) | {MARKER: {"format": "gpt"}}
        elif hf.is_pretrained(built):
            config = hf.config_of(built, TRANSFORMERS)
        _save_replaced(built, new, config)
    elif isinstance(built, GPT):
        llama.save_pretrained(built, new)
    elif hf.is_pretrained(built):
        hf.save(built, new, TRANSFORMERS)
    elif callable(own_format):
        own_format(new)
    else:
        _save_weights(built, new / "model.safetensors")
        write_atomic(new / "config.json", json.dumps(config, indent=2).encode())


def _save_replaced(built: nn.Module, new: Path, config: Mapping[str, Any]) -> None:
    """A model with layers that are packed, quantised or adapted, with what its plain form has in config.json."""
    adapted, bits = slorb.adapted(built), quantized.quantized(built)
    packed = [*packed24.packed(built), *quantized.packed(built)]
    of = config.get(MARKER, {"format": "gpt" if isinstance(built, GPT) else "transformers"})
    dtype = next(tensor.dtype for tensor in built.state_dict().values() if tensor.is_floating_point())
    mark = {
        "format": "quantized" if bits else "packed" if packed else "adapted",
        "of": of.get("of", of),
        "dtype": str(dtype).removeprefix("torch."),
        "layers": {"2:4": packed} | ({slorb.NAME: adapted} if adapted else {}) | ({"bits": bits} if bits else {}),
    }
    _save_weights(built, new / "model.safetensors")
    write_atomic(new / "config.json", json.dumps({**config, MARKER: mark}, indent=2).encode())


def save_packed(built: nn.Module, source: Path, folder: Path) -> list[str]:
    """Write a model whose weights are 2:4 with these packed; what opens a model folder opens it again.

    Args:
        built: the model in the folder `source`, whose config.json, tokenizer and other files beside the weights are
            copied. Its linear layers are replaced by packed ones where their weight is 2:4 and nothing else shares it.

    Returns:
        The names of the layers that were packed.

    Raises:
        ConfigError: there is none: nothing has been written.
    """
    names = packed24.pack_layers(built)
    if not names:
        raise ConfigError(f"no linear layer of `{source}` is 2:4", hint="prune the model before packing it")
    save_like(built, source, folder)
    return names


def _carry_over(former: Path, new: Path) -> None:
    """Keep what is in a model's folder besides the model: a user's notes."""
    for path in former.iterdir() if former.is_dir() else ():
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and not (new / path.name).exists():
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, new / path.name, symlinks=True)
            else:
                shutil.copy2(path, new / path.name, follow_symlinks=False)


def _copy_beside_weights(source: Path, new: Path) -> None:
    """Copy the tokenizer, the licence and the like of the model that `new` is made from, as files.

    In the cache of Hugging Face they are links. Weights in other formats are those of the former model, and stay there.
    """
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS) and not (new / path.name).exists():
            shutil.copyfile(path, new / path.name)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, origin: Mapping[str, Any]) -> None:
    """Write a model's tokenizer to its folder; generation with transformers ends where a document does."""
    tokenizer.save_pretrained(folder, origin["offered"]["context"])
    if not (folder / "generation_config.json").exists():
        write_atomic(folder / "generation_config.json", json.dumps({"eos_token_id": tokenizer.end_of_text}).encode())


def config_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model that its own module builds."""
    return {MARKER: {"format": "module", **origin}}


def remember(target: str, folder: Path) -> None:
    """Write to a run's `folder` what its checkpoints need to become a model again wherever the folder is."""
    if target.startswith(hf.PREFIX):
        hf.remember(target.removeprefix(hf.PREFIX), folder / PRETRAINED)
    elif (source := model_folder(target)) is not None:
        hf.remember(str(source), folder / PRETRAINED)


def model_folder(target: Path | str) -> Path | None:
    """The folder with a model's config.json: `target`, or the folder `model` of a run; None where there is none."""
    for folder in (Path(target) / "model", Path(target)):
        if (folder / "config.json").is_file():
            return folder
    return None


def base_name(target: str) -> str:
    """What transformers opens the model by that a run starts from; empty where it is built by a callable."""
    if target.startswith(hf.PREFIX):
        name = target.removeprefix(hf.PREFIX)
        return str(Path(name).resolve()) if Path(name).is_dir() else name
    folder = None if ":" in target else model_folder(target)
    return str(folder.resolve()) if folder else ""


def source_folder(target: str) -> Path | None:
    """The folder of the model that a user names, on this machine: `hf:NAME`, or the folder of a run or of a model."""
    if target.startswith(hf.PREFIX):
        config = hf.file_of(target.removeprefix(hf.PREFIX), hf.CONFIG)
        return config.parent if config else None
    return model_folder(target)


def _save_weights(built: nn.Module, path: Path) -> None:
    """As safetensors, whole or not at all; weights under several names are written once."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        save_weights(built, str(aside))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
