"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, as its release 0.21 writes and reads
them. A layer of `GPT` that is several layers in Llama's layout (query, key and value) is several there: they share A,
and each has its rows of B. Modules that were trained beside them (`modules_to_save`) are there, too, a tied weight by
each of its names, because PEFT unties them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoestring._torch import content_of, is_fake
from shoestring.core.errors import CheckpointError
from shoestring.models import llama
from shoestring.models.adapters import LowRank, matrix, row_norms
from shoestring.models.blocks import is_transposed
from shoestring.models.gpt import GPT
from shoestring.models.nf4 import NF4Linear
from shoestring.models.quantized import QuantizedLinear
from shoestring.storage.whole import write_atomic

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FOLDER = "adapter"
"""The folder in a model's folder that holds the adapter which was trained."""
_BASE = "shoestring.base"
"""Key in the header of the weights under which a hash of the adapted layers' own weights stands."""
_PREFIX = "base_model.model."
_SUFFIXES = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}


class LayerPart(NamedTuple):
    """A layer as PEFT names it, and the rows of ours that it has."""

    name: str
    rows: slice


class SavedAdapter(NamedTuple):
    """What a folder holds for a model: by the names of its layers, and by those of its parameters, in float32."""

    layers: dict[str, LowRank]
    parameters: dict[str, Tensor]
    """That were trained beside the layers' adapters."""


def find(path: Path | str) -> Path | None:
    """The folder of an adapter: `path` itself, the one in a model's folder, or that of a run; None where none is."""
    for folder in (Path(path), Path(path) / FOLDER, Path(path) / "model" / FOLDER):
        if (folder / CONFIG).is_file():
            return folder
    return None


# -- writing -----------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    model: nn.Module,
    adapters: Mapping[str, LowRank],
    *,
    base: str,
    fingerprint: str,
    dropout: float = 0,
    trained: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the adapters of a model's layers, each file whole or not at all, the configuration last.

    Args:
        base: what transformers opens the model without adapters by; may be empty.
        fingerprint: of those layers, as `fingerprint_of` gives it.
        trained: parameters of the model's own that were trained, too, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every, named = parts_of(model), {}
    tensors: dict[str, Tensor] = {}
    for layer, adapter in adapters.items():
        for part in every[layer]:
            named[part.name] = (len(adapter.a), adapter.scale)
            start = _PREFIX + part.name
            tensors[start + _SUFFIXES["a"]] = adapter.a.detach().cpu().clone()
            tensors[start + _SUFFIXES["b"]] = adapter.b[part.rows].detach().cpu().clone()
            if adapter.magnitude is not None:
                tensors[start + _SUFFIXES["magnitude"]] = adapter.magnitude[part.rows].detach().cpu().clone()
    beside = {
        part.name: (value.detach()[part.rows] if value.dim() else value.detach()).cpu().clone()
        for name, value in (trained or {}).items()
        for part in _parameters_of(model)[name]
    }
    tensors |= {_PREFIX + name: value for name, value in beside.items()}
    rank, scale = Counter(named.values()).most_common(1)[0][0]
    apart = {name: each for name, each in named.items() if each != (rank, scale)}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": {re.escape(name): its for name, (its, _) in apart.items()},
        "alpha_pattern": {re.escape(name): its * factor for name, (its, factor) in apart.items()},
        "target_modules": _shortened(set(named), {part.name for parts in every.values() for part in parts}),
        "lora_dropout": dropout,
        "use_dora": any(adapter.magnitude is not None for adapter in adapters.values()),
        "use_rslora": False,
        "fan_in_fan_out": any(is_transposed(model.get_submodule(layer)) for layer in adapters),
        "bias": "none",
        "modules_to_save": sorted({name.rpartition(".")[0] for name in beside}) or None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    header = {"format": "pt", _BASE: fingerprint}
    (folder / CONFIG).unlink(missing_ok=True)
    write_atomic(folder / WEIGHTS, safetensors.torch.save(tensors, header))
    write_atomic(folder / CONFIG, (json.dumps(content, indent=2) + "\n").encode())


def _parameters_of(model: nn.Module) -> dict[str, list[LayerPart]]:
    """As `parts_of`, of all parameters, by their whole names."""
    if isinstance(model, GPT):
        found: dict[str, list[LayerPart]] = {}
        for ours, tensors in llama.layout(model.config):
            found[ours], start = [], 0
            for tensor in tensors:
                found[ours].append(LayerPart(tensor.name, slice(start, start + tensor.shape[0])))
                start += tensor.shape[0]
        if model.config.tied:
            (embedding,) = found["embed.weight"]
            found["embed.weight"].append(LayerPart("lm_head.weight", embedding.rows))
        return found
    every = model.named_parameters(remove_duplicate=False)
    return {name: [LayerPart(name, slice(None))] for name, _ in every}


def parts_of(model: nn.Module) -> dict[str, list[LayerPart]]:
    """The linear layers of a model, each with its parts in the layout that transformers opens."""
    if isinstance(model, GPT):
        found = {}
        for ours, tensors in llama.layout(model.config):
            layer, start = ours.removesuffix(".weight"), 0
            if isinstance(model.get_submodule(layer), nn.Linear | QuantizedLinear | NF4Linear):
                found[layer] = []
                for tensor in tensors:
                    found[layer].append(
                        LayerPart(tensor.name.removesuffix(".weight"), slice(start, start + tensor.shape[0]))
                    )
                    start += tensor.shape[0]
        return found
    return {
        name: [LayerPart(name, slice(None))]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear | NF4Linear) or is_transposed(module)
    }


def _shortened(adapted: set[str], every: set[str]) -> list[str]:
    """`target_modules`: the last parts of names where they say the same, which PEFT's users know, or else the names."""
    last = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in every if name.rpartition(".")[2] in last}
    return sorted(last if meant == adapted else adapted)


def fingerprint_of(model: nn.Module, layers: Mapping[str, Any]) -> str:
    """A hash of the beginnings of these layers' weights, the same in every layout and type that a model is opened in.

    They are rounded to bfloat16 for it, as models are stored.
    """
    every, total = parts_of(model), hashlib.sha256()
    rows = ((part, model.get_submodule(layer)) for layer in layers for part in every[layer])
    for part, module in sorted(rows, key=lambda pair: pair[0].name):
        first = matrix(module)[part.rows][0].detach().to("cpu", torch.bfloat16)
        total.update(part.name.encode())
        total.update(content_of(first))
    return total.hexdigest()


# -- reading -----------------------------------------------------------------------------------------------------------


def base_of(folder: Path) -> str:
    """The model that an adapter belongs to, as transformers takes it; empty where it does not say."""
    return str(_read_config(folder).get("base_model_name_or_path") or "")


def read(folder: Path, model: nn.Module) -> SavedAdapter:
    """The adapter in a folder, for this model; without numbers where the model has none.

    Raises:
        CheckpointError: there is none, it is of a kind that is not supported, or belongs to another model.
    """
    config = _read_config(folder)
    _check_supported(config, folder)
    first = next(model.parameters())
    imagined = first.device if first.is_meta or is_fake(first) else None
    tensors, fingerprint = _read_weights(folder, imagined)
    whole = {name: value for name, value in tensors.items() if _is_of_module(name, config)}
    for module in config.get("modules_to_save") or []:
        if not any(_is_of_module(name, {"modules_to_save": [module]}) for name in whole):
            raise CheckpointError(f"`{folder / CONFIG}`: modules_to_save has {module!r}, and the weights are not there")
    layers = _layers({name: value for name, value in tensors.items() if name not in whole}, config, model, folder)
    if imagined is None and fingerprint and fingerprint != fingerprint_of(model, layers):
        base = config.get("base_model_name_or_path") or "another one"
        raise CheckpointError(
            f"`{folder}` was trained on other weights than this model has", hint=f"its model is {base}"
        )
    given = {name.removeprefix(_PREFIX): value for name, value in whole.items()}
    return SavedAdapter(layers, _parameters(given, config, model, folder))


def _layers(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], model: nn.Module, folder: Path
) -> dict[str, LowRank]:
    given = {
        name: LowRank(**_tensors_of(tensors, name, folder), scale=_scale(config, name, tensors))
        for name in _names(tensors)
    }
    _check_known(tensors, given, folder)
    adapters: dict[str, LowRank] = {}
    taken: set[str] = set()
    for layer, parts in parts_of(model).items():
        theirs = {part.name: given[part.name] for part in parts if part.name in given}
        if theirs:
            taken |= set(theirs)
            module = model.get_submodule(layer)
            _check_shapes(parts, theirs, module)
            adapters[layer] = _joined(parts, theirs, module)
    if left := sorted(set(given) - taken):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        said = f"`{folder}` adapts `{left[0]}`{more}, which {type(model).__name__} does not have"
        raise CheckpointError(said, hint="the adapter belongs to another model")
    return adapters


def _parameters(
    given: Mapping[str, Tensor], config: Mapping[str, Any], model: nn.Module, folder: Path
) -> dict[str, Tensor]:
    """One value for each that was trained whole, tied ones too.

    Raises:
        CheckpointError: there is none for some part of it, of another shape, or not one for a weight that is tied.
    """
    named: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(value), []).append(name)
    every, found, left = _parameters_of(model), dict[str, Tensor](), set(given)
    for names in named.values():
        shape, rows = model.get_parameter(names[0]).shape, dict[tuple[int | None, int | None], Tensor]()
        parts = [part for name in names for part in every.get(name, ())]
        theirs = [part for part in parts if part.name in given]
        if not theirs:
            continue
        for part in theirs:
            value = given[part.name].float()
            left.discard(part.name)
            if not _equal(rows.setdefault((part.rows.start, part.rows.stop), value), value):
                raise CheckpointError(f"`{folder}` has another `{part.name}`, which this model ties to another weight")
        whole = torch.cat(list(rows.values())) if len(rows) > 1 else next(iter(rows.values()))
        tied = len(theirs) == len(parts) or config.get("ensure_weight_tying")
        if whole.shape != shape or not tied:
            missing = next((part.name for part in parts if part.name not in given), parts[0].name)
            said = f"`{folder}` has no `{missing}` that fits the rest of what it trains there"
            raise CheckpointError(said, hint="the adapter belongs to another model, or trains a tied weight apart")
        found[names[0]] = whole
    if left:
        raise CheckpointError(f"`{folder}` holds `{min(left)}`, which {type(model).__name__} does not have")
    return found


@torch.no_grad()
def fill(model: nn.Module, trained: Mapping[str, Tensor]) -> list[str]:
    """Put parameters that were trained beside adapters into a model; the names of their modules."""
    for name, value in trained.items():
        model.get_parameter(name).copy_(value)
    return sorted({name.rpartition(".")[0] for name in trained})


def _is_of_module(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor of an adapter's file is of a module that was trained whole."""
    modules = config.get("modules_to_save") or []
    module = name.removeprefix(_PREFIX).rpartition(".")[0]
    return ".lora_" not in name and any(module.endswith(each) or f"{each}." in module for each in modules)


def _check_shapes(parts: list[LayerPart], given: Mapping[str, LowRank], layer: nn.Module) -> None:
    rows, columns = matrix(layer).shape
    for part in parts:
        if (each := given.get(part.name)) is not None:
            shape, wanted = (len(each.b), each.a.shape[1]), (len(range(*part.rows.indices(rows))), columns)
            if shape != wanted:
                said = f"the adapter of `{part.name}` is for a weight of {shape}, and this one is {wanted}"
                raise CheckpointError(said, hint="the adapter belongs to another model")


def _joined(parts: list[LayerPart], given: Mapping[str, LowRank], layer: nn.Module) -> LowRank:
    """The adapters of a layer's parts as one: side by side where they differ, which adds up their ranks."""
    if len(parts) == 1:
        return next(iter(given.values()))
    first = next(iter(given.values()))
    alike = all(each.scale == first.scale and _equal(each.a, first.a) for each in given.values())
    total = len(first.a) if alike else sum(len(each.a) for each in given.values())
    lengths = row_norms(matrix(layer), first.a.dtype)  # DoRA's, of rows that no adapter changes
    a = first.a if alike else torch.cat([each.a * each.scale for each in given.values()])
    b, start = a.new_zeros(len(lengths), total), 0
    for part in parts:
        if (each := given.get(part.name)) is None:
            continue
        b[part.rows, start : start + len(each.a)] = each.b
        start += 0 if alike else len(each.a)
        if each.magnitude is not None:
            lengths[part.rows] = each.magnitude
    dora = any(each.magnitude is not None for each in given.values())
    return LowRank(a, b, first.scale if alike else 1.0, lengths if dora else None)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Of tensors without numbers, whether they can be."""
    if one.is_meta or is_fake(one):
        return one.shape == other.shape
    return torch.equal(one, other)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"`{folder}` holds no adapter: {error}", hint="name a folder that PEFT wrote") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"`{folder / CONFIG}` is not a JSON object")
    return config


def _check_supported(config: Mapping[str, Any], folder: Path) -> None:
    plain = {"peft_type": ("LORA",), "bias": ("none", None), "lora_bias": (False, None)}
    plain |= dict.fromkeys(("layer_replication", "target_parameters", "trainable_token_indices"), (None, [], {}))
    plain |= dict.fromkeys(("use_qalora", "use_bdlora"), (False, None))
    for name, values in plain.items():
        if config.get(name) not in values and name in config:
            hint = "LoRA and DoRA of linear layers are supported, without trained biases"
            raise CheckpointError(f"`{folder / CONFIG}`: {name} is {config[name]!r}", hint=hint)


def _read_weights(folder: Path, imagined: torch.device | None) -> tuple[dict[str, Tensor], str]:
    """The tensors and the hash of the layers that they are of; tensors without numbers on the `imagined` device."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            fingerprint = (file.metadata() or {}).get(_BASE, "")
            names = list(file.keys())
            if imagined is not None:
                shapes = {name: file.get_slice(name).get_shape() for name in names}
                return {name: torch.empty(shape, device=imagined) for name, shape in shapes.items()}, fingerprint
            return {name: file.get_tensor(name) for name in names}, fingerprint
    except (OSError, SafetensorError) as error:
        hint = "adapter_model.bin is a pickle, which is not loaded: save the adapter again with PEFT, as safetensors"
        raise CheckpointError(f"cannot load `{folder / WEIGHTS}`: {error}", hint=hint) from error


def _names(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    end = _SUFFIXES["a"]
    return (key.removesuffix(end).removeprefix(_PREFIX) for key in tensors if key.endswith(end))


def _tensors_of(tensors: Mapping[str, Tensor], name: str, folder: Path) -> dict[str, Any]:
    found = {kind: tensors.get(f"{_PREFIX}{name}{suffix}") for kind, suffix in _SUFFIXES.items()}
    a, b, magnitude = found["a"], found["b"], found["magnitude"]
    if a is None or b is None or a.dim() != 2 or b.dim() != 2 or b.shape[1] != len(a):
        raise CheckpointError(f"`{folder / WEIGHTS}` has no pair of factors for `{name}`")
    return {"a": a.float(), "b": b.float(), "magnitude": None if magnitude is None else magnitude.float()}


def _scale(config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> float:
    rank = len(tensors[f"{_PREFIX}{name}{_SUFFIXES['a']}"])
    patterns = config.get("alpha_pattern") or {}
    own = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name))
    alpha = next(own, config.get("lora_alpha", 8))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _check_known(tensors: Mapping[str, Tensor], given: Mapping[str, LowRank], folder: Path) -> None:
    known = {f"{_PREFIX}{name}{suffix}" for name in given for suffix in _SUFFIXES.values()}
    if left := sorted(set(tensors) - known):
        more = f" and {len(left) - 1} more tensors" if len(left) > 1 else ""
        raise CheckpointError(
            f"`{folder / WEIGHTS}` holds `{left[0]}`{more}, which belong to no adapter of a linear layer",
            hint="adapters of embeddings are not supported",
        )
    if not given:
        raise CheckpointError(f"`{folder / WEIGHTS}` holds no adapter")
