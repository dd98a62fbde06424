"""Causal language models of transformers: built from a name or a folder, and written so that transformers loads them.

`hf:NAME` is a folder with config.json and safetensors files, or a name that `from_pretrained` knows. Nothing is
unpickled and no code of the folder is run: weights in .bin files and models with code of their own are refused.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from shoestring.core.errors import CheckpointError, ConfigError, ShoestringError, nearest
from shoestring.storage.whole import write_atomic

T = TypeVar("T")

PREFIX = "hf:"
CONFIG = "config.json"
_DTYPES = ("float32", "bfloat16", "float16")
_CACHING = "_shoestring_use_cache"


def build(name: str, arguments: Mapping[str, Any], from_data: Mapping[str, Any], *, weights: bool = True) -> nn.Module:
    """The model with its weights, in float32 unless `arguments` has another `dtype`.

    Args:
        name: without `hf:`. arguments: entries of config.json to change, `dtype` and `attn_implementation`.
        from_data: what the data needs, `vocab_size` and `context`.
        weights: False draws them, as does a default device of `meta`, where there are none.

    Raises:
        ConfigError: no such model, an argument that it does not take, or it is too small for the data.
        CheckpointError: its weights are missing, damaged, or do not fit its configuration.
    """
    transformers, config = _transformers(), _config(name, arguments)
    dtype = arguments.get("dtype", "float32")
    if dtype not in _DTYPES:
        raise ConfigError(f"`model.dtype` is {dtype!r}", hint=f"give one of {', '.join(_DTYPES)}")
    on_meta = torch.get_default_device().type == "meta"
    caching = getattr(config, "use_cache", None)
    if not on_meta:
        config.use_cache = False  # training has no use for keys and values, and recomputing a layer adds them twice
    attention = {name: value for name, value in arguments.items() if name == "attn_implementation"}
    if weights and not on_meta:
        model = _loaded(name, config=config, dtype=dtype, **attention)
    else:
        make = transformers.AutoModelForCausalLM.from_config
        model = _named(name, lambda: make(config, dtype=getattr(torch, dtype), **attention))
    setattr(model, _CACHING, caching)
    if not on_meta:
        _check_fits(name, config.get_text_config(), from_data)
    return model


def load(name: str) -> nn.Module:
    """The model in the data type of its files.

    Raises:
        ConfigError: it is no causal language model. CheckpointError: its weights are missing or damaged.
    """
    return _loaded(name, config=_config(name, {}), dtype="auto")


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a model of transformers; without importing that."""
    return any(each.__module__ == "transformers.modeling_utils" for each in type(model).__mro__)


def save(model: nn.Module, folder: Path, marker: Mapping[str, Any]) -> None:
    """Write the model as transformers does, with `marker` added to config.json.

    Files are written beside the earlier ones first; config.json goes first and comes last, so an interrupted exchange
    leaves a folder without a model, never a mixture.

    Raises:
        OSError: the disk; before the exchange nothing has changed.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".model-", suffix=".tmp") as aside, _quiet():
        cast(Any, model).save_pretrained(aside)
        fresh = sorted(path for path in Path(aside).iterdir() if path.name != CONFIG)
        (folder / CONFIG).unlink(missing_ok=True)
        for path in folder.glob("model*.safetensors*"):
            path.unlink()
        for path in fresh:
            path.replace(folder / path.name)
    save_config(model, folder, marker)


def save_config(model: nn.Module, folder: Path, marker: Mapping[str, Any]) -> None:
    """Write config.json alone, with `marker` added to it."""
    write_atomic(folder / CONFIG, json.dumps(config_of(model, marker), indent=2, sort_keys=True).encode())


def config_of(model: nn.Module, marker: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, with `marker` added to it."""
    config: Any = model.config
    content = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]} | dict(marker)
    if (caching := getattr(model, _CACHING, None)) is not None:
        content["use_cache"] = caching
    return content


def remember(name: str, folder: Path) -> None:
    """Copy the model's configuration to `folder`, from where it can be built again without its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in (CONFIG, "generation_config.json"):
        found = file_of(name, each)
        if found is not None and found.resolve() != (folder / each).resolve():
            shutil.copyfile(found, folder / each)


def file_of(name: str, file: str) -> Path | None:
    """The path of a file of the model, in its folder or in the cache of the hub; None where it has none."""
    if Path(name).is_dir():
        return found if (found := Path(name) / file).is_file() else None
    try:
        found = _transformers("utils.hub").cached_file(name, file)
    except OSError:  # transformers has no other answer to a file that is not there
        return None
    return Path(found) if found else None


# -- what transformers does --------------------------------------------------------------------------------------------


def _transformers(module: str = "") -> ModuleType:
    """The package, or a module of it: by name, because an import statement has type checkers read all of its models."""
    try:
        return import_module(f"transformers.{module}" if module else "transformers")
    except ImportError as error:
        raise ConfigError("`hf:` models need transformers", hint="pip install shoestring[hf]") from error


def _config(name: str, arguments: Mapping[str, Any]) -> Any:
    if not name or (not Path(name).is_dir() and (name.count("/") > 1 or name[0] in "./~")):
        raise ConfigError(f"`hf:{name}`: there is no such folder", hint=f"the working folder is {Path.cwd()}")
    transformers = _transformers()
    config = _named(name, lambda: transformers.AutoConfig.from_pretrained(name, trust_remote_code=False), ConfigError)
    changes = {key: value for key, value in arguments.items() if key not in ("dtype", "attn_implementation")}
    known = config.to_dict()
    for key, value in changes.items():
        if key not in known:
            raise ConfigError(f"`hf:{name}` has no setting `{key}`", hint=nearest(key, known))
        setattr(config, key, value)
    return config


def _loaded(name: str, **arguments: Any) -> nn.Module:
    load = _transformers().AutoModelForCausalLM.from_pretrained
    arguments |= {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    with _quiet():
        model, found = _named(name, lambda: load(name, **arguments))
    for problem in ("missing", "mismatched"):
        keys = sorted(str(key) for key in found[f"{problem}_keys"])
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise CheckpointError(f"`hf:{name}`: {problem} tensor {keys[0]}{more}")
    return model


def _check_fits(name: str, config: Any, from_data: Mapping[str, Any]) -> None:
    vocabulary, context = (getattr(config, key, None) for key in ("vocab_size", "max_position_embeddings"))
    if vocabulary and from_data.get("vocab_size", 0) > vocabulary:
        raise ConfigError(
            f"`hf:{name}` knows {vocabulary} tokens, fewer than the {from_data['vocab_size']} of the data",
            hint="use the tokenizer that the model was made with",
        )
    if context and from_data.get("context", 0) > context:
        raise ConfigError(
            f"`hf:{name}` reads {context} tokens, fewer than the {from_data['context']} of a sample",
            hint=f"set data.sequence to at most {context}",
        )


def _named(name: str, act: Callable[[], T], kind: type[ShoestringError] = CheckpointError) -> T:
    """What `act` returns; what transformers raises becomes one line that names the model."""
    try:
        return act()
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, ImportError, … without a common base
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "check the folder, or the name and the network"
        raise kind(f"cannot load `hf:{name}`: {reason}", hint=hint) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers."""
    logging = _transformers("utils.logging")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
