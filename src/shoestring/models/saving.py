"""Writes model folders: weights as safetensors, a config.json that names their reader, and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors.torch import save_model as save_weights
from torch import nn

from shoestring import naming
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.data.tokenizer import Tokenizer
from shoestring.models import adapter_folder, gguf, hf, llama, packed24, quantized, slorb
from shoestring.models.beside import NOTHING, Beside, complete, copy_beside_weights
from shoestring.models.gpt import GPT
from shoestring.naming import USER, Trust, names_in
from shoestring.storage import foreign
from shoestring.storage.whole import recover, replaced_folder, share_as_folder, write_atomic, write_by

MARKER = "shoestring"
"""Key in config.json under which shoestring's own entries are stored; their `format` selects one of
`loading.READERS`."""
TRANSFORMERS = {MARKER: {"format": "transformers"}}
PRETRAINED = "pretrained"
"""Subfolder of a run folder that holds all files except the weights of the `hf:` model or model folder that the run
started from."""


def save_model(
    built: nn.Module,
    tokenizer: Tokenizer | None,
    folder: Path,
    origin: Mapping[str, Any],
    trust: Trust = USER,
    write_beside: Callable[[Path], None] | None = None,
    beside: Beside = NOTHING,
) -> None:
    """Write a model as safetensors and config.json: in the format of its class if the class has one, otherwise with
    `origin` in config.json.

    The new model replaces an earlier model in the folder atomically; other files stay.

    Args:
        origin: entries of config.json that are needed to build the model again; see `loading.origin_of`.
        trust: trust in the code that `origin` names; if the user trusts it, the new folder is trusted, too.
        write_beside: function that writes further files of the model, such as its adapters, into the new folder.
        beside: what the folder contains besides the weights.
    """
    with replaced_folder(folder, _is_no_weights) as new:
        _write(built, new, config_of(origin))
        if tokenizer is not None:
            save_tokenizer(tokenizer, new, origin, beside)
        else:
            complete(new, beside.source)
        if write_beside is not None:
            write_beside(new)
    pass_on(trust, folder)


def save_in_place_of_model(
    folder: Path,
    write: Callable[[Path], None],
    tokenizer: Tokenizer | None,
    origin: Mapping[str, Any],
    beside: Beside = NOTHING,
) -> None:
    """Write an export that contains no model, such as adapters alone; an earlier model in the folder is removed.

    If adapters are written, their folder also gets the tokenizer and the other files of their base model.
    """
    with replaced_folder(folder, lambda name: _is_no_weights(name) and name != "config.json") as new:
        write(new)
        if (adapters := adapter_folder.find(new)) is not None and tokenizer is not None:
            save_tokenizer(tokenizer, adapters, origin, beside)


def save_like(built: nn.Module, source: Path, folder: Path) -> None:
    """Write a model in the format of the folder `source` that it was opened from, and copy that folder's other files.

    The new model replaces an earlier one in the folder atomically. If the user trusts the code that `source` names, the
    new folder is trusted, too. From a .gguf file, only the tokenizer and the end-of-text tokens are taken over.
    """
    if source.is_file():  # a .gguf file
        tokenizer, ends = gguf.tokenizer_of(source), gguf.ends_of(source)
        config: Any = built.config
        with replaced_folder(folder, _is_no_weights) as new:
            _write(built, new, {})
            if tokenizer is not None:
                context = config.context if isinstance(built, GPT) else config.max_position_embeddings
                tokenizer.save_pretrained(new, context)
                write_atomic(new / "generation_config.json", json.dumps({"eos_token_id": ends}).encode())
        return
    try:
        config = foreign.read_json_object(source / "config.json", within=source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read `{source / 'config.json'}`: {error}") from error
    with replaced_folder(folder, _is_no_weights) as new:
        _write(built, new, config)
        complete(new, source)
    pass_on(trust_of(source, config), folder)


def _write(built: nn.Module, new: Path, config: Mapping[str, Any]) -> None:
    """Write the model's files in the format of its class; `config` is the content of config.json for classes without
    their own format."""
    own_format = getattr(built, "save_pretrained", None)
    if slorb.adapted(built) or packed24.packed(built) or quantized.quantized(built):
        if isinstance(built, GPT):
            dtype = next(built.parameters()).dtype
            config = llama.to_llama_config(built.config, dtype) | {MARKER: {"format": "gpt"}}
        elif hf.is_pretrained(built):
            config = hf.config_of(built, TRANSFORMERS)
        adapted, bits = slorb.adapted(built), quantized.quantized(built)
        packed = [*packed24.packed(built), *quantized.packed(built)]
        plain = config.get(MARKER, {"format": "gpt" if isinstance(built, GPT) else "transformers"})
        floats = (tensor.dtype for tensor in built.state_dict().values() if tensor.is_floating_point())
        # If all layers are quantised, no stored tensor is floating-point; then the layers' outputs give the data type.
        rounded = (like.dtype for name, like in built.named_buffers() if name.endswith(".like"))
        dtype = next(chain(floats, rounded))
        mark = {
            "format": "quantized" if bits else "packed" if packed else "adapted",
            "of": plain.get("of", plain),
            "dtype": str(dtype).removeprefix("torch."),
            "layers": {"2:4": packed} | ({slorb.NAME: adapted} if adapted else {}) | ({"bits": bits} if bits else {}),
        }
        _save_weights(built, new / "model.safetensors")
        write_atomic(new / "config.json", json.dumps({**config, MARKER: mark}, indent=2).encode())
    elif isinstance(built, GPT):
        llama.save_pretrained(built, new)
    elif hf.is_pretrained(built):
        hf.save(built, new, TRANSFORMERS)
        for path in new.glob("*.safetensors"):
            share_as_folder(path)
    elif callable(own_format):
        own_format(new)
    else:
        _save_weights(built, new / "model.safetensors")
        write_atomic(new / "config.json", json.dumps(config, indent=2).encode())


def save_packed(built: nn.Module, source: Path, folder: Path) -> list[str]:
    """Write a model with its 2:4 weights packed; the result is opened like any model folder.

    Args:
        built: the model of the folder `source`, whose config.json, tokenizer and other files are copied. In `built`,
            packed layers replace the linear layers with unshared 2:4 weights.

    Returns:
        The names of the packed layers.

    Raises:
        ConfigError: no layer can be packed; in this case nothing is written.
    """
    names = packed24.pack_layers(built)
    if not names:
        raise ConfigError(f"no linear layer of `{source}` is 2:4", hint="prune the model before packing it")
    save_like(built, source, folder)
    return names


def _is_no_weights(name: str) -> bool:
    """Whether a file of this name contains no weights; such a file stays when the model in its folder is replaced."""
    return not name.endswith((".safetensors", ".safetensors.index.json"))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, origin: Mapping[str, Any], beside: Beside = NOTHING) -> None:
    """Write a model's tokenizer to its folder, and complete the folder with the source model's other files and the
    learnt end-of-text tokens."""
    tokenizer.save_pretrained(folder, origin["offered"]["context"])
    complete(folder, beside.source, learnt=beside.learnt, end_of_text=tokenizer.end)


def config_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json for a model that a callable builds."""
    return {MARKER: {"format": "module", **origin}}


# -- trust ------------------------------------------------------------------------------------------------------------


def trust_of(folder: Path, config: Mapping[str, Any], *, granted: bool = False) -> Trust:
    """The trust in the code that a model folder names.

    Args:
        config: the content of the folder's config.json. granted: whether the user trusts the code for the duration of
            this program.
    """
    mark = mark_of(config)
    plain = mark.get("of")
    plain = plain if isinstance(plain, dict) else {}
    project = mark.get("project") or plain.get("project")
    names = naming.foreign(names_in([mark.get("model"), plain.get("model")]))
    return Trust(folder, config, names, granted, project if isinstance(project, str) else "")


def mark_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Shoestring's entries in a config.json; empty for folders of the first version, which wrote only the format."""
    mark = config.get(MARKER)
    return mark if isinstance(mark, dict) else {}


def pass_on(trust: Trust, folder: Path) -> None:
    """Trust a model folder that this program has just written, if the user trusts the code of the model it was made
    from."""
    new = trust_of(folder, _config(folder))
    if trust.allows(*new.names):
        new.remember()


def _config(folder: Path) -> dict[str, Any]:
    """The content of config.json; empty if there is none, as in folders that a model wrote in its own format."""
    try:
        return foreign.read_json_object(folder / "config.json")
    except (OSError, ValueError):
        return {}


# -- folders ----------------------------------------------------------------------------------------------------------


def remember(target: str, folder: Path) -> None:
    """Copy the files of the model that a run starts from, except the weights, to the run's folder, so that the run's
    checkpoints can be opened and exported without that model.
    """
    if target.startswith(hf.PREFIX):
        hf.remember(target.removeprefix(hf.PREFIX), folder / PRETRAINED)
    elif (source := model_folder(target)) is not None:
        hf.remember(str(source), folder / PRETRAINED)
        pass_on(trust_of(source, _config(source)), folder / PRETRAINED)
    if (source := source_folder(target) if ":" not in target or target.startswith(hf.PREFIX) else None) is not None:
        copy_beside_weights(source, folder / PRETRAINED)


def model_folder(target: Path | str) -> Path | None:
    """The folder with a model's config.json: the subfolder `model` of `target`, as in run folders, or else `target`
    itself; None if neither has one."""
    for folder in (Path(target) / "model", Path(target)):
        recover(folder)
        if (folder / "config.json").exists():
            return folder
    return None


def base_name(target: str) -> str:
    """The name by which transformers opens the model that a run starts from; empty for a callable."""
    if target.startswith(hf.PREFIX):
        name = target.removeprefix(hf.PREFIX)
        return str(Path(name).resolve()) if Path(name).is_dir() else name
    folder = None if ":" in target else model_folder(target)
    return str(folder.resolve()) if folder else ""


def source_folder(target: str) -> Path | None:
    """The local folder of a model that a user names: `hf:NAME`, or the folder of a run or of a model."""
    if target.startswith(hf.PREFIX):
        config = hf.file_of(target.removeprefix(hf.PREFIX), hf.CONFIG)
        return config.parent if config else None
    return model_folder(target)


def _save_weights(built: nn.Module, path: Path) -> None:
    """Write weights as safetensors, atomically; shared weights are written once."""
    write_by(path, lambda new: save_weights(built, str(new)))
