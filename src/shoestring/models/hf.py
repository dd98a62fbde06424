"""Causal language models of transformers: loaded by name or from a folder, and saved in transformers' format.

`hf:NAME` is a folder with config.json and safetensors files, or a name that `from_pretrained` knows. Nothing is
unpickled and no code of the folder is run: .bin weights and models that bring their own code are refused.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from shoestring.core.errors import CheckpointError, ConfigError, ShoestringError, nearest, nearest_path
from shoestring.data.tokenizer import COMPANIONS
from shoestring.models import plausible
from shoestring.naming import TrustError, installed
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

log = logging.getLogger("shoestring")

T = TypeVar("T")

PREFIX = "hf:"
CONFIG = "config.json"
_DTYPES = ("float32", "bfloat16", "float16")
_SWITCHES = "_shoestring_switches"
"""Attribute of a model that stores the original values of the `use_…` entries of its config.json. Training switches
`use_cache` off, and in their first call some models switch off features that this machine lacks (Jamba's
`use_mamba_kernels`).
"""
_CONTEXTS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "context_length",
    "seq_length",
    "model_max_length",
)
"""Configuration entries that give a model's context length, under the names that different model families use."""
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_HUB_SECONDS = 10.0
"""Time limit, in seconds, for asking the hub whether it has a model."""
_OPENED = (".json", ".safetensors", ".jinja")
"""Suffixes of the files that transformers opens in a model's folder."""


def build(name: str, arguments: Mapping[str, Any], from_data: Mapping[str, Any], *, weights: bool = True) -> nn.Module:
    """Build the model with its weights, in float32 unless `arguments` has another `dtype`.

    Args:
        name: name without `hf:`.
        arguments: entries of config.json to change, and also `dtype` and `attn_implementation`.
        from_data: sizes that the data requires: `vocab_size` and `context`.
        weights: whether the weights are read; if False, they are initialised at random. If the default device is
            `meta`, no values are read, and the weight files of a folder are only compared with the model.

    Raises:
        ConfigError: there is no such model, its configuration lacks one of the arguments, or its vocabulary or context
            is too small for the data.
        CheckpointError: the weights are missing or damaged, or do not fit the configuration.
    """
    transformers, config = _transformers(), _config(name, arguments)
    dtype = arguments.get("dtype", "float32")
    if dtype not in _DTYPES:
        raise ConfigError(f"`model.dtype` is {dtype!r}", hint=f"give one of {', '.join(_DTYPES)}")
    on_meta = torch.get_default_device().type == "meta"
    switches = {key: value for key, value in config.to_dict().items() if key[:4] == "use_" and isinstance(value, bool)}
    # Training needs no cache: recomputation would append to the cache, and packed chats would not be isolated.
    config.use_cache = False
    attention = {name: value for name, value in arguments.items() if name == "attn_implementation"}
    if weights and not on_meta:
        model = _loaded(name, config=config, dtype=dtype, **attention)
    else:
        make = transformers.AutoModelForCausalLM.from_config
        if not on_meta:
            _check_size(name, config)
        elif weights and Path(name).is_dir():  # checks only local folders, so that no weights are downloaded
            _check_weights(name, config, dtype)
        model = _named(name, lambda: make(config, dtype=getattr(torch, dtype), **attention))
    setattr(model, _SWITCHES, switches)
    _read_as_text(model)
    text = config.get_text_config()
    vocabulary, context = getattr(text, "vocab_size", None), context_of(text)
    if vocabulary and from_data.get("vocab_size", 0) > vocabulary:
        raise ConfigError(
            f"`hf:{name}` has a vocabulary of {vocabulary}, but the data needs {from_data['vocab_size']}",
            hint="use the tokenizer that the model was trained with",
        )
    if context and from_data.get("context", 0) > context:
        raise ConfigError(
            f"`hf:{name}` reads {context} tokens, fewer than the {from_data['context']} of a sample",
            hint=f"set data.sequence = {context}, or less",
        )
    return model


def load(name: str) -> nn.Module:
    """Load the model in the data type of its files.

    Raises:
        ConfigError: the model is not a causal language model. CheckpointError: its weights are missing or damaged.
    """
    return _loaded(name, config=_config(name, {}), dtype="auto")


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is a transformers model; the check does not import transformers."""
    return any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)


def context_of(config: Any) -> int | None:
    """Maximum context length of a model in tokens, from its configuration; None if the configuration sets no limit.

    Recurrent models have no limit; for models with relative positions, the configuration gives the length used in
    training.
    """
    text = config.get_text_config()
    values = (getattr(text, name, None) for name in _CONTEXTS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def save(model: nn.Module, folder: Path, marker: Mapping[str, Any]) -> None:
    """Write the model in transformers' format, with `marker` added to config.json.

    New files are written aside and then replace the old ones. config.json is removed first and written last, so an
    interrupted write leaves a folder without a model, never a mixture of two models.

    Raises:
        OSError: writing failed; the folder is unchanged if the old files had not yet been replaced.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".model-", suffix=".tmp") as aside, quiet_transformers():
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
    content = json.loads(config.to_json_string()) | getattr(model, _SWITCHES, {})
    return content | {"architectures": [type(model).__name__]} | dict(marker)


def remember(name: str, folder: Path) -> None:
    """Copy the model's configuration to `folder`, so that the architecture can be rebuilt without the original
    model."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (CONFIG, "generation_config.json"):
        path = file_of(name, file)
        if path is not None and path.resolve() != (folder / file).resolve():
            try:
                content = foreign.read_bytes(path, within=path.parent)
            except OSError as error:
                raise CheckpointError(f"cannot copy `{path}`: {error.strerror}") from error
            write_atomic(folder / file, content)


@cache
def _find(name: str) -> None:
    """Ask the hub once whether it has a model; without this, transformers asks for every file, for 20 s if it gets no
    answer.

    Raises:
        ConfigError: the hub has no such model; or the hub cannot be reached, and the model is not in the local cache.
    """
    hub = import_module("huggingface_hub")
    if hub.constants.HF_HUB_OFFLINE:
        return
    try:
        hub.HfApi().model_info(name, timeout=_HUB_SECONDS)
    except hub.errors.GatedRepoError:
        return  # the error of transformers says how to get access
    except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError) as error:
        message = f"`hf:{name}`: there is no such folder here, and the hub has no model of this name that you may read"
        raise ConfigError(message, hint=_similar(name)) from error
    except hub.errors.HfHubHTTPError:
        return  # a mirror of the hub may serve files without this API
    except Exception as error:  # network errors have no base class that is common to all releases
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if not isinstance(hub.try_to_load_from_cache(name, CONFIG), str):
            message = f"`hf:{name}`: there is no such folder here, and the hub cannot be reached ({reason})"
            raise ConfigError(message, hint=_similar(name)) from error
        log.warning("the hub cannot be reached (%s): hf:%s is read from its cache", reason, name)
        hub.constants.HF_HUB_OFFLINE = True


def _similar(name: str) -> str:
    """Hint for the error that there is no such model; suggests the local folder with the most similar name."""
    path = Path(name).expanduser()
    if path.is_dir():
        return f"the shell does not expand ~ here: hf:{path}"
    if close := nearest_path(path, folders=True):
        return f"did you mean `hf:{close}`?"
    return f"give the folder of a model, or its name on the hub; the working folder is {Path.cwd()}"


def tokenizer_hint(name: str) -> str:
    """Hint for the error about a model without tokenizer.json, which may have a SentencePiece tokenizer instead."""
    write = f"AutoTokenizer.from_pretrained('{name}').save_pretrained(FOLDER)"
    if any(file_of(name, file) for file in _SENTENCEPIECE):
        return f"it has one of SentencePiece, which transformers converts: {write}, with sentencepiece installed"
    return f"copy the model's tokenizer.json there, or write one by transformers: {write}"


def file_of(name: str, file: str) -> Path | None:
    """The path of a file of the model, in its folder or in the cache of the hub; None if it is missing."""
    if Path(name).is_dir():
        return path if (path := Path(name) / file).is_file() else None
    _find(name)
    try:
        cached = _transformers("utils.hub").cached_file(name, file)
    except OSError:  # transformers raises OSError if the file is missing
        return None
    return Path(cached) if cached else None


def tokenizer_of(name: str) -> Path | None:
    """The path of the model's tokenizer.json; the other tokenizer files are in the same folder, also in the cache of
    the hub."""
    for companion in COMPANIONS:
        file_of(name, companion)
    return file_of(name, "tokenizer.json")


# -- calls of transformers ---------------------------------------------------------------------------------------------


def _transformers(module: str = "") -> ModuleType:
    """The package transformers or a module of it, imported by name so that type checkers do not analyse it."""
    try:
        if not installed("transformers"):
            raise ImportError("No module named 'transformers'")
        return import_module(f"transformers.{module}" if module else "transformers")
    except ImportError as error:
        raise ConfigError("`hf:` models need transformers", hint="pip install shoestring[hf]") from error


def _config(name: str, arguments: Mapping[str, Any]) -> Any:
    """The configuration of a model, with the entries in `arguments` changed."""
    if not name or (not Path(name).is_dir() and (name.count("/") > 1 or name[0] in "./~")):
        raise ConfigError(f"`hf:{name}`: there is no such folder", hint=_similar(name))
    transformers = _transformers()
    if not Path(name).is_dir():
        _find(name)
    _check_folder(name)
    with quiet_transformers():
        config = _named(
            name, lambda: transformers.AutoConfig.from_pretrained(name, trust_remote_code=False), ConfigError
        )
    # A configuration may name a repository of the hub as its attention or experts implementation. Compiled code from
    # there would run, so it is refused; the user may name such a repository in `model.attn_implementation`.
    for part in [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]:
        for key in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(part, key, None) or ""):
                raise TrustError(
                    f"the configuration of `hf:{name}` names code to run, `{getattr(part, key)}`",
                    hint=f"remove it from {CONFIG}, or set model.attn_implementation yourself",
                )
    _refuse_other_kinds(name, config)
    changes = {key: value for key, value in arguments.items() if key not in ("dtype", "attn_implementation")}
    known = config.to_dict()
    for key, value in changes.items():
        if key not in known:
            raise ConfigError(f"`hf:{name}` has no setting `{key}`", hint=nearest(key, known))
        setattr(config, key, value)
    return config


def _refuse_other_kinds(name: str, config: Any) -> None:
    """Refuse a model that is not a causal language model, judged by the names of its family and its architecture."""
    kinds, family = _transformers("models.auto.modeling_auto"), config.model_type
    hint = "name a causal language model, such as Llama, Qwen, Gemma or Mistral"
    if getattr(config, "is_encoder_decoder", False):
        what = "which reads with an encoder and writes with a decoder"
    elif family in kinds.MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is False:
        what = "each of whose tokens sees those behind it"
    elif type(config) in kinds.MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    elif family in kinds.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        what = "a model of text and images"
        hint = "save its language model alone with transformers, as a model of its own, and name that folder"
    else:
        what = "no language model"
    raise ConfigError(f"`hf:{name}` is a `{family}`, {what}: only causal language models are supported", hint=hint)


def _read_as_text(model: nn.Module) -> None:
    """Let a model of text and images train on text alone: pass `token_type_ids` of 0, which some such models require in
    training."""
    kinds = _transformers("models.auto.modeling_auto").MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if cast(Any, model).config.model_type not in kinds:
        return
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        return

    def add_types(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        tokens = args[0] if args else named.get("input_ids")
        if not module.training or tokens is None or named.get("token_type_ids") is not None:
            return None
        return args, named | {"token_type_ids": torch.zeros_like(tokens)}

    model.register_forward_pre_hook(add_types, with_kwargs=True)


def _check_folder(name: str) -> None:
    """Check that the files that transformers would open are regular files in the folder, and that the counts in
    config.json fit the weights.

    Raises:
        ConfigError: config.json is missing or damaged.
        CheckpointError: a file is not a regular file in the folder, or the counts in config.json exceed the weights.
    """
    if (path := file_of(name, CONFIG)) is None:
        if Path(name).is_dir():
            raise ConfigError(f"cannot load `hf:{name}`: there is no {CONFIG}", hint="name the folder of a model")
        return  # transformers reports errors of the name or the network
    folder = path.parent
    try:
        config = foreign.read_json_object(path, within=folder)
        for file in folder.iterdir():
            if file.suffix in _OPENED:
                foreign.open_file(file, folder).close()
        plausible.check_config(config, plausible.stored_in(folder), path)
    except (OSError, ValueError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{path}: {error}"
        raise ConfigError(f"cannot load `hf:{name}`: {reason}", hint="check the folder") from error
    except CheckpointError as error:
        raise CheckpointError(f"cannot load `hf:{name}`: {error.parts()[1]}", hint=error.hint) from error


def _check_size(name: str, config: Any) -> None:
    """Raise CheckpointError if the model has more parameters than its weights can fill; see `plausible`."""
    path = file_of(name, CONFIG)
    if path is not None:
        make = _transformers().AutoModelForCausalLM.from_config
        stored = plausible.stored_in(path.parent)
        plausible.check_size(lambda: _named(name, lambda: make(config)), stored, path)


def _loaded(name: str, **arguments: Any) -> nn.Module:
    """Load the model with its weights; every weight must be present and have the right shape."""
    load = _transformers().AutoModelForCausalLM.from_pretrained
    _check_size(name, arguments["config"])
    arguments |= {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    with quiet_transformers():
        model, report = _named(name, lambda: load(name, **arguments))
    for problem in ("missing", "mismatched"):
        keys = sorted(str(key) for key in report[f"{problem}_keys"])
        if keys:
            raise CheckpointError(f"`hf:{name}`: {problem} tensor {_first_of(keys)}")
    if keys := sorted(map(str, report["unexpected_keys"])):
        log.warning("hf:%s: tensors that the model does not have: %s", name, _first_of(keys))
    if model.dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped matrix products do not support float64
    return model


def _check_weights(name: str, config: Any, dtype: str) -> None:
    """Refuse a folder whose weights `_loaded` would refuse, without reading the weights.

    If accelerate is installed, transformers compares the weights with the model; otherwise only the headers of the
    files are checked.
    """
    with torch.device("cpu"):
        if installed("accelerate"):
            _loaded(name, config=copy.deepcopy(config), dtype=dtype, device_map="meta")
            return
        _check_size(name, config)

        def open_headers() -> None:
            for file in Path(name).glob("*.safetensors"):
                with foreign.open_safetensors(file, within=file.parent):
                    pass

        _named(name, open_headers)


def _first_of(keys: list[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


def _named(name: str, act: Callable[[], T], kind: type[ShoestringError] = CheckpointError) -> T:
    """Call `act`; any error of transformers is replaced by a one-line error that names the model."""
    try:
        return act()
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, ImportError, …: no common base
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "check the folder, or the name and the network"
        raise kind(f"cannot load `hf:{name}`: {reason}", hint=hint) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off the progress bars and reports of transformers, which print unescaped names from the files."""
    its_logging = _transformers("utils.logging")
    bars, verbosity = its_logging.is_progress_bar_enabled(), its_logging.get_verbosity()
    its_logging.disable_progress_bar()
    its_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        its_logging.set_verbosity(verbosity)
        if bars:
            its_logging.enable_progress_bar()
