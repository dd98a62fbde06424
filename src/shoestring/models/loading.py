"""Opens models from `package.module:callable`, from the folder of a run or of a model, and from Hugging Face."""

from __future__ import annotations

import inspect
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model as load_weights
from torch import nn

from shoestring.core.errors import CheckpointError, ConfigError, ShoestringError, nearest, nearest_path
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.models import adapter_folder, gguf, hf, llama, packed24, plausible, quantized, slorb
from shoestring.models.adapters import merge
from shoestring.models.gpt import GPT
from shoestring.models.saving import MARKER, model_folder, trust_of
from shoestring.naming import USER, Trust, TrustError, is_name, lies_in, resolve
from shoestring.storage import foreign
from shoestring.storage.fields import Fields

_ADAPTERS = 16
"""Maximum number of adapters in a chain in which each is the base of the next."""


def open_model(
    source: str,
    arguments: Mapping[str, Any] | None = None,
    from_data: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    trust: bool = False,
) -> nn.Module:
    """Open a model that a user names, such as a teacher or a drafter; the model is in evaluation mode.

    Args:
        source: `hf:NAME`, the folder of a run or of a model, or `package.module:callable`, whose weights are drawn from
            `seed` without disturbing the global generator.
        arguments: arguments of the callable, or entries of config.json of an `hf:` model; a folder takes none.
        from_data: sizes that the data requires: `vocab_size` and `context`.
        trust: whether the code that a folder names is trusted in this call; `shoestring trust` trusts it permanently.

    Raises:
        ConfigError: there is no such callable or `hf:` model, or the model does not take these arguments.
        CheckpointError: a folder holds no model, or its weights do not fit.
        TrustError: a folder names code that the user does not trust.
    """
    if ":" in source:
        with torch.random.fork_rng(devices=[]):
            return build_model(source, arguments or {}, from_data or {}, seed).eval()
    if arguments:
        raise ConfigError(f"the model in `{source}` takes no arguments, got {', '.join(arguments)}")
    return load_model(source, trust=trust)[0]


def outline(source: str, *, weights: bool = False) -> nn.Module | None:
    """The model that `open_model` opens, on the meta device, without reading its weights.

    The result is None for `package.module:callable`, which may have side effects, for .gguf files and for adapters.

    Args:
        weights: whether the headers of the weight files are checked as well, as `open_model` does.

    Raises:
        ConfigError, CheckpointError: as for `open_model`.
    """
    if ":" in source and not source.startswith(hf.PREFIX):
        return None
    if gguf.is_file(source) or (model_folder(source) is None and adapter_folder.find(source) is not None):
        return None
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        if source.startswith(hf.PREFIX):
            return build_model(source, {}, {}, weights=weights)
        folder = model_folder(source) or Path(source)
        with opening(folder):
            config = _config(folder)
            if weights:
                form = _format(config, folder)
                return hf.build(str(folder), {}, {}) if form == "transformers" else READERS[form](folder, False)
            mark = _mark(config, folder)
            # If layers were replaced, the marker's entry `of` describes the model without replaced layers.
            if mark.text("format") in ("packed", "quantized", "adapted"):
                mark = _mark(config, folder, mark.table("of"))
            return _unfilled(mark, config, folder, trust_of(folder, config))


def build_model(
    target: str,
    arguments: Mapping[str, Any],
    from_data: Mapping[str, Any],
    seed: int = 0,
    *,
    weights: bool = True,
    trust: Trust = USER,
) -> nn.Module:
    """Build the model `run.model` with the arguments in [model] and the entries of `from_data` (vocab_size, context)
    that the model accepts.

    If the default device is `meta`, the weight files of a folder are compared with the model, but no values are read.

    Args:
        target: `package.module:callable`, `hf:NAME`, or the folder of a run or of a model to start from.
        weights: whether the weights of a model folder are read; False if a state is loaded afterwards.
        trust: trust in `target` if it is a callable; for a folder, the user's trust in this folder is used instead.

    Raises:
        TrustError: `target` names code that the user does not trust.
        ConfigError: the callable or model does not accept an argument, or the result is not a trainable module.
        CheckpointError: the weights of a folder are missing or damaged.
    """
    torch.manual_seed(seed)
    if target.startswith(hf.PREFIX):
        return hf.build(target.removeprefix(hf.PREFIX), arguments, from_data, weights=weights)
    if ":" not in target and (folder := model_folder(target)) is not None:
        return _start_from(folder, arguments, from_data, weights=weights)
    build = resolve(target, "run.model", trust)
    accepted = _accepted(build)
    offered = {name: value for name, value in from_data.items() if accepted is None or name in accepted}
    merged = offered | dict(arguments)
    if accepted is not None:
        for name in merged:
            if name not in accepted:
                raise ConfigError(f"`{target}` takes no argument `{name}`", hint=nearest(name, accepted))
    try:
        built = build(**merged)
    except TypeError as error:
        raise ConfigError(f"`{target}` cannot be called with {merged}: {error}") from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"`{target}` returned a {type(built).__name__}, not an nn.Module")
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise ConfigError(f"`{target}` has no trainable parameters")
    return built


def _accepted(build: Callable[..., Any]) -> list[str] | None:
    """Names of the arguments that a callable takes; None if it accepts any argument, or has no signature (a
    builtin)."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]


def load_model(path: Path | str, *, trust: bool = False) -> tuple[nn.Module, Tokenizer | None]:
    """Load a model and its tokenizer from the folder of a run, a model or an adapter, a .gguf file or `hf:NAME`.

    An adapter in PEFT's format is merged into the base model that it names.

    Args:
        trust: whether the code that a folder names is trusted in this call; `shoestring trust` trusts it permanently.

    Raises:
        CheckpointError: there is no model, its format is unknown, or its weights do not fit.
        TrustError: the folder names code that the user does not trust.
    """
    if str(path).startswith(hf.PREFIX):
        name = str(path).removeprefix(hf.PREFIX)
        built, file = hf.load(name), hf.tokenizer_of(name)
        return built.eval(), load_tokenizer(file) if file else None
    if gguf.is_file(path):
        with opening(Path(path)):
            return gguf.load(Path(path))
    folder = model_folder(path)
    if folder is None and (adapter := adapter_folder.find(path)) is not None:
        return _with_adapter(adapter, trust)
    folder = folder or Path(path)
    with opening(folder):
        built = READERS[_format(_config(folder), folder)](folder, trust)
    tokenizer = folder / "tokenizer.json"
    return built.eval(), load_tokenizer(tokenizer) if tokenizer.exists() else None


def _with_adapter(folder: Path, trust: bool) -> tuple[nn.Module, Tokenizer | None]:
    """Load the base model of an adapter and merge the adapter into it; also returns the tokenizer of the adapter, or
    else of the base model."""
    base = adapter_folder.base_of(folder)
    if not base:
        hint = "add the path of that model's folder as `base_model_name_or_path` to its adapter_config.json"
        raise CheckpointError(f"the adapter in `{folder}` does not say which model it belongs to", hint=hint)
    # Refuse a chain of bases (an adapter of an adapter, and so on) that does not end in a model.
    above = [folder.resolve()]
    while (next_base := adapter_folder.base_of(above[-1])) and Path(next_base).is_dir():
        if model_folder(next_base) is not None or (below := adapter_folder.find(next_base)) is None:
            break
        if below.resolve() in above or len(above) == _ADAPTERS:
            hint = "`base_model_name_or_path` in its adapter_config.json must lead to a model"
            raise CheckpointError(
                f"the adapter in `{folder}` belongs to other adapters, whose bases do not lead to a model", hint=hint
            )
        above.append(below.resolve())
    built, tokenizer = load_model(base if Path(base).is_dir() else f"{hf.PREFIX}{base}", trust=trust)
    with opening(folder):
        adapter = adapter_folder.read(folder, built)
        merge(built, adapter.layers)
        adapter_folder.fill(built, adapter.parameters)
    own = folder / "tokenizer.json"
    return built, load_tokenizer(own) if own.exists() else tokenizer


@contextmanager
def opening(folder: Path, what: str = "what is in", also: type[ShoestringError] | None = None) -> Iterator[None]:
    """Turn errors that a model's constructor or parser raises into a CheckpointError that names the model's folder.

    Every Exception is caught, because an untrusted configuration may make a constructor or parser fail anywhere.

    Args:
        what: words before the folder's name in the message. also: a subclass of ShoestringError that is converted too;
            other ShoestringErrors pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ShoestringError):
            if also is None or isinstance(error, TrustError) or not isinstance(error, also):
                raise
            _, reason, hint = error.parts()
        else:
            line = next((line for line in str(error).splitlines() if line.strip()), "")
            reason, hint = f"{type(error).__name__}: {line[:300]}", "it is damaged, or was made for another version"
        raise CheckpointError(f"cannot load {what} `{folder}`: {reason}", hint=hint) from error


def _from_module(folder: Path, trust: bool) -> nn.Module:
    """Load a model that a callable builds, or the `hf:` model that a run started from, with the weights of the
    folder."""
    config = _config(folder)
    mark, user = _mark(config, folder), trust_of(folder, config, granted=trust)
    _callable_of(mark)
    user.require()  # first, because an error in the weights would hide this error
    return _filled(lambda: _built_by(mark, user), folder, any_builder=True)


def _callable_of(mark: Fields) -> str:
    """The name of the callable or of the `hf:` model in a folder's marker, from which the model is built."""
    target = mark.text("model")
    if not (is_name(target) or target.startswith(hf.PREFIX)):
        raise CheckpointError(f"{mark.where} names no model: {target!r} is not of the form `package.module:callable`")
    return target


def _built_by(mark: Fields, trust: Trust) -> nn.Module:
    return build_model(_callable_of(mark), mark.table("arguments"), mark.table("offered"), trust=trust)


def _filled(build: Callable[[], nn.Module], folder: Path, *, any_builder: bool = False) -> nn.Module:
    """The model that `build` returns, with the weights of the folder loaded.

    Args:
        any_builder: whether `build` may be the user's code, which may not work on the meta device; the model's size is
            then not checked.
    """
    file = folder / llama.SINGLE
    try:
        foreign.open_file(file, folder).close()
    except OSError as error:
        raise CheckpointError(f"cannot load `{file}`: {error.strerror}") from error
    try:
        plausible.check_size(build, plausible.stored_in(folder), folder / llama.CONFIG)
    except ShoestringError:
        raise
    except Exception:
        if not any_builder:
            raise
    built = build()
    with warnings.catch_warnings():  # warnings about the meta device: only names and shapes are compared
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        load_weights(built, str(file))  # own file: checked above
    return built


def _from_replaced(folder: Path, trust: bool) -> nn.Module:
    """Load a model with packed, quantised or adapted layers: build its plain form, then replace layers and load the
    weights."""
    config = _config(folder)
    mark = _mark(config, folder)
    user = trust_of(folder, config, granted=trust)
    user.require()
    with opening(folder, f"the {mark.text('format')} model in", also=ShoestringError):
        plain, layers = _mark(config, folder, mark.table("of")), mark.entries("layers")
        dtype = mark.text("dtype")
        if dtype not in ("float32", "float64", "bfloat16", "float16"):
            raise CheckpointError(f"{mark.where}: dtype is {reprlib.repr(dtype)}, not a data type of weights")
        bits: dict[str, Any] = {name: layers.entries("bits").count(name) for name in layers.table("bits", {})}
        adapted = {name: layers.entries(slorb.NAME).count(name) for name in layers.table(slorb.NAME, {})}
        if wrong := set(bits.values()) - {4, 8}:
            raise CheckpointError(f"{mark.where}: layers of {min(wrong)} bits", hint="only 4 and 8 are supported")

        def build() -> nn.Module:
            built = _unfilled(plain, config, folder, user).to(getattr(torch, dtype))
            slorb.make_room(built, adapted)
            packed24.replace(built, layers.texts("2:4"))
            quantized.replace(built, bits)
            return built

        return _filled(build, folder)


def _unfilled(mark: Fields, config: Mapping[str, Any], folder: Path, trust: Trust) -> nn.Module:
    """Build the plain form of a folder's model (without packed, quantised or adapted layers), with initial weights."""
    form = mark.text("format")
    if form == "gpt":
        return GPT(llama.from_llama_config(config, str(folder / "config.json")))
    if form == "transformers":
        return hf.build(str(folder), {}, {}, weights=False)
    return _built_by(mark, trust)


READERS: dict[str, Callable[[Path, bool], nn.Module]] = {
    "gpt": lambda folder, _: llama.load_pretrained(folder),
    "module": _from_module,
    "packed": _from_replaced,
    "adapted": _from_replaced,
    "quantized": _from_replaced,
    "transformers": lambda folder, _: hf.load(str(folder)),
}
"""Readers of model folders by format; a reader is called with the folder and with whether the user trusts its code."""
PLAIN = ("gpt", "module", "transformers")
"""Formats whose layers are not packed, quantised or adapted."""


def _start_from(
    folder: Path, arguments: Mapping[str, Any], from_data: Mapping[str, Any], *, weights: bool
) -> nn.Module:
    """Open the model of a folder to start training from it, in float32; see `build_model`."""
    config = _config(folder)
    form = _format(config, folder)
    if form == "transformers":
        return hf.build(str(folder), arguments, from_data, weights=weights)
    if READERS[form] is _from_replaced:
        raise ConfigError(f"the model in `{folder}` is {form} and cannot be trained", hint="start from the dense model")
    if arguments:
        raise ConfigError(f"the model in `{folder}` takes no arguments, got {', '.join(arguments)}")
    with opening(folder):
        if weights:
            built = READERS[form](folder, False).float()
        else:
            built = _unfilled(_mark(config, folder), config, folder, trust_of(folder, config))
    for name in ("vocab_size", "context"):
        size, needed = getattr(getattr(built, "config", None), name, None), from_data.get(name, 0)
        if isinstance(size, int) and size < needed:
            hint = 'set data.tokenizer = "model"' if name == "vocab_size" else "lower data.sequence"
            raise ConfigError(f"the model in `{folder}` has a {name} of {size}, and the data needs {needed}", hint=hint)
    return built


def origin_of(
    target: str, arguments: Mapping[str, Any], offered: Mapping[str, Any], project: str = ""
) -> dict[str, Any]:
    """The entries of config.json that are needed to build a run's model again.

    If `target` is a model folder, these entries state how the model in this folder was built. The folder itself is
    therefore needed later only if it is in transformers' format.

    Args:
        project: folder that may hold the code that `target` names; empty for none.
    """
    folder = model_folder(target) if ":" not in target else None
    if folder is None:
        beside = {"project": project} if project and is_name(target) and lies_in(target, Path(project)) else {}
        return {"model": target, "arguments": dict(arguments), "offered": dict(offered), **beside}
    config = _config(folder)
    form = _format(config, folder)
    if form == "transformers":
        return {"model": f"{hf.PREFIX}{folder}", "arguments": dict(arguments), "offered": dict(offered)}
    if form == "gpt":
        shape = asdict(llama.from_llama_config(config, str(folder / "config.json")))
        return {"model": "shoestring.models.gpt:tiny", "arguments": shape, "offered": dict(offered)}
    mark = _mark(config, folder)
    beside = {"project": mark.text("project")} if "project" in mark else {}
    arguments, offered = mark.table("arguments"), mark.table("offered")
    return {"model": mark.text("model"), "arguments": arguments, "offered": offered, **beside}


def origin_trust(target: str, trust: Trust = USER) -> Trust:
    """The trust in the code that `origin_of` names: the trust in the model folder `target`, or `trust` if `target` is
    no folder."""
    folder = model_folder(target) if ":" not in target else None
    return trust if folder is None else trust_of(folder, _config(folder))


def _config(folder: Path) -> dict[str, Any]:
    """The content of a model folder's config.json, after checking its counts against the weights."""
    path = folder / llama.CONFIG
    try:
        config = foreign.read_json_object(path, within=folder)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"`{path}`: {error}"
        close = "" if folder.exists() else nearest_path(folder, folders=True)
        hint = f"did you mean `{close}`?" if close else "name a run folder or a model folder"
        if isinstance(error, FileNotFoundError):
            reason = f"there is no {llama.CONFIG} in it" if folder.exists() else f"it does not exist in {Path.cwd()}"
        if inner := sorted(path.parent.name for path in folder.glob("*/run.toml"))[:3]:
            hint = f"it contains runs: name one, such as {folder / inner[-1]}"
        raise CheckpointError(f"`{folder}` holds no model: {reason}", hint=hint) from error
    plausible.check_config(config, plausible.stored_in(folder), path)
    return config


def _mark(config: Mapping[str, Any], folder: Path, table: Mapping[str, Any] | None = None) -> Fields:
    """The marker of shoestring in a config.json, with its format filled in. If `table` is not None, `table` itself is
    the marker: the entry `of`, which describes the model without replaced layers."""
    if table is None:
        form, mark = _format(config, folder), config.get(MARKER)
        table = {**(mark if isinstance(mark, dict) else {}), "format": form}
    elif table.get("format") not in PLAIN:
        raise CheckpointError(
            f"`{folder}` is derived from a model of the unknown format {reprlib.repr(table.get('format'))}"
        )
    return Fields(table, f"{folder / llama.CONFIG}: {MARKER}", CheckpointError)


def _format(config: Mapping[str, Any], folder: Path) -> str:
    """The format of a model folder, from its marker.

    A folder without a marker is opened as `GPT` if it holds a Llama that `GPT` supports, otherwise by transformers.
    """
    if MARKER not in config:
        return "gpt" if llama.supports(config) else "transformers"
    mark = config[MARKER]
    form = mark.get("format", "module") if isinstance(mark, dict) else mark  # the first version wrote no format
    if not isinstance(form, str) or form not in READERS:
        raise CheckpointError(
            f"`{folder}` has the format {reprlib.repr(form)}; this version reads {', '.join(READERS)}",
            hint="install a newer version of shoestring",
        )
    return form
