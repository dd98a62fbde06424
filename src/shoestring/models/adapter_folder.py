"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, as PEFT 0.21 writes and reads them.

A fused layer of `GPT` corresponds to several layers in Llama's layout (query, key and value). The adapter of a fused
layer is stored as several adapters, which share A and have the corresponding rows of B. The file also contains modules
that were trained in full (`modules_to_save`); a tied weight appears under each of its names, because PEFT unties them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoestring._torch import content_of, is_fake
from shoestring.core.errors import CheckpointError
from shoestring.models import llama
from shoestring.models.adapter_config import LONGEST, AdapterConfig, adapter_fields
from shoestring.models.adapters import LowRank, matrix, row_norms, shape_of
from shoestring.models.blocks import is_transposed
from shoestring.models.gpt import GPT
from shoestring.models.nf4 import NF4Linear
from shoestring.models.quantized import Quantized, QuantizedLinear
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FOLDER = "adapter"
"""Subfolder of a model folder that holds the trained adapter."""
_BASE = "shoestring.base"
"""Key in the header of the safetensors file, under which a hash of the adapted layers' base weights is stored."""
_PREFIX = "base_model.model."
_SUFFIXES = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}


class LayerPart(NamedTuple):
    """A layer or parameter in PEFT's layout: its name, and its rows in the model's own layer or parameter."""

    name: str
    rows: slice


class SavedAdapter(NamedTuple):
    """The contents of an adapter folder as float32 tensors, by the model's own names of layers and parameters."""

    layers: dict[str, LowRank]
    """Adapters by layer name."""
    parameters: dict[str, Tensor]
    """Parameters that were trained in full, by name."""


def find(path: Path | str) -> Path | None:
    """Find the folder of an adapter: `path` itself, or an adapter folder inside the model folder or run folder
    `path`."""
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
    """Write the adapters of a model's layers; each file is written atomically, the configuration last.

    Args:
        base: name or folder of the base model, as transformers opens it; empty if there is none.
        fingerprint: hash of the base weights of the adapted layers, from `fingerprint_of`.
        trained: the model's own parameters that were trained in full, by name.
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
    # The most common rank and scale become the defaults; layers with other values are listed as patterns.
    exceptions = {name: pair for name, pair in named.items() if pair != (rank, scale)}
    last_parts = {name.rpartition(".")[2] for name in named}
    theirs = {part.name for parts in every.values() for part in parts}
    theirs |= set() if isinstance(model, GPT) else {name for name, _ in model.named_modules()}
    by_last_part = {name for name in theirs if name.rpartition(".")[2] in last_parts}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": {re.escape(name): own_rank for name, (own_rank, _) in exceptions.items()},
        "alpha_pattern": {re.escape(name): own_rank * factor for name, (own_rank, factor) in exceptions.items()},
        # Short names such as "q_proj", as PEFT's users write them, if these names select exactly the adapted layers.
        "target_modules": sorted(last_parts if by_last_part == set(named) else named),
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
    """Map the name of each parameter of a model to the parameters that hold its rows in transformers' layout."""
    if isinstance(model, GPT):
        parameters: dict[str, list[LayerPart]] = {}
        for ours, tensors in llama.layout(model.config):
            parameters[ours], start = [], 0
            for tensor in tensors:
                parameters[ours].append(LayerPart(tensor.name, slice(start, start + tensor.shape[0])))
                start += tensor.shape[0]
        if model.config.tied:
            (embedding,) = parameters["embed.weight"]
            parameters["embed.weight"].append(LayerPart("lm_head.weight", embedding.rows))
        return parameters
    every = model.named_parameters(remove_duplicate=False)
    return {name: [LayerPart(name, slice(None))] for name, _ in every}


def parts_of(model: nn.Module) -> dict[str, list[LayerPart]]:
    """Map the name of each linear layer of a model to the layers that hold its rows in transformers' layout."""
    if isinstance(model, GPT):
        layers = {}
        for ours, tensors in llama.layout(model.config):
            layer, start = ours.removesuffix(".weight"), 0
            if isinstance(model.get_submodule(layer), nn.Linear | QuantizedLinear | NF4Linear):
                layers[layer] = []
                for tensor in tensors:
                    layers[layer].append(
                        LayerPart(tensor.name.removesuffix(".weight"), slice(start, start + tensor.shape[0]))
                    )
                    start += tensor.shape[0]
        return layers
    return {
        name: [LayerPart(name, slice(None))]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear | NF4Linear) or is_transposed(module)
    }


def fingerprint_of(model: nn.Module, layers: Mapping[str, Any]) -> str:
    """A hash of the first row of each layer in `layers`; does not depend on the layout and data type of the weights.

    The rows are rounded to bfloat16 first, because most models are stored in bfloat16.
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
    """Name or folder of an adapter's base model, as transformers opens it; empty if the file does not state it."""
    return adapter_fields(folder / CONFIG).text("base_model_name_or_path", "")


def read(folder: Path, model: nn.Module) -> SavedAdapter:
    """Read the adapter in a folder for a model; the adapter's tensors are on the meta or fake device if the model is.

    Raises:
        CheckpointError: the folder holds no adapter, or one that is of an unsupported kind or belongs to another model.
    """
    config = AdapterConfig.read(folder / CONFIG)
    first = next(model.parameters())
    device_without_data = first.device if first.is_meta or is_fake(first) else None
    tensors, fingerprint = _read_weights(folder, device_without_data)
    whole = {name: value for name, value in tensors.items() if _is_of_module(name, config.modules_to_save)}
    for module in config.modules_to_save:
        if not any(_is_of_module(name, [module]) for name in whole):
            raise CheckpointError(
                f"`{folder / CONFIG}`: modules_to_save has {module!r}, but the file has no weights of this module"
            )
    layers = _layers({name: value for name, value in tensors.items() if name not in whole}, config, model, folder)
    # The stored hash is of the weights before quantisation, so it cannot be compared with the hash of quantised layers.
    rounded = any(isinstance(model.get_submodule(name), Quantized | NF4Linear) for name in layers)
    comparable = fingerprint and not rounded and device_without_data is None
    if comparable and fingerprint != fingerprint_of(model, layers):
        base = config.base or "another one"
        raise CheckpointError(
            f"`{folder}` was trained on other weights than this model has", hint=f"its model is {base}"
        )
    stored = {name.removeprefix(_PREFIX): value for name, value in whole.items()}
    return SavedAdapter(layers, _parameters(stored, config, model, folder))


def _layers(tensors: Mapping[str, Tensor], config: AdapterConfig, model: nn.Module, folder: Path) -> dict[str, LowRank]:
    """Convert adapters from PEFT's layout to adapters of the model's layers, by layer name."""
    end = _SUFFIXES["a"]
    names = [key.removesuffix(end).removeprefix(_PREFIX) for key in tensors if key.endswith(end)]
    stored = {
        name: LowRank(**_tensors_of(tensors, name, folder), scale=_scale(config, name, tensors)) for name in names
    }
    known = {f"{_PREFIX}{name}{suffix}" for name in stored for suffix in _SUFFIXES.values()}
    if left := sorted(set(tensors) - known):
        more = f" and {len(left) - 1} more tensors" if len(left) > 1 else ""
        raise CheckpointError(
            f"`{folder / WEIGHTS}` holds `{left[0]}`{more}, which belong to no adapter of a linear layer",
            hint="adapters of embeddings are not supported",
        )
    if not stored:
        raise CheckpointError(f"`{folder / WEIGHTS}` holds no adapter")
    adapters: dict[str, LowRank] = {}
    taken: set[str] = set()
    for layer, parts in parts_of(model).items():
        of_layer = {part.name: stored[part.name] for part in parts if part.name in stored}
        if of_layer:
            taken |= set(of_layer)
            module = model.get_submodule(layer)
            rows, columns = shape_of(module)
            for part in (part for part in parts if part.name in of_layer):
                adapter = of_layer[part.name]
                shape, wanted = (len(adapter.b), adapter.a.shape[1]), (len(range(*part.rows.indices(rows))), columns)
                if shape != wanted:
                    raise CheckpointError(
                        f"the adapter of `{part.name}` is for a weight of shape {shape}, but this model's has {wanted}",
                        hint="the adapter belongs to another model",
                    )
            adapters[layer] = _joined(parts, of_layer, module)
    if left := sorted(set(stored) - taken):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise CheckpointError(
            f"`{folder}` adapts `{left[0]}`{more}, which {type(model).__name__} does not have",
            hint="the adapter belongs to another model",
        )
    return adapters


def _parameters(
    stored: Mapping[str, Tensor], config: AdapterConfig, model: nn.Module, folder: Path
) -> dict[str, Tensor]:
    """The parameters that were trained in full; a tied parameter appears only under its first name.

    Raises:
        CheckpointError: a part of a parameter is missing or has another shape, or a tied weight has different values
            under its names.
    """
    named: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(value), []).append(name)
    every, parameters, left = _parameters_of(model), dict[str, Tensor](), set(stored)
    for names in named.values():
        shape, rows = model.get_parameter(names[0]).shape, dict[tuple[int | None, int | None], Tensor]()
        parts = [part for name in names for part in every.get(name, ())]
        present = [part for part in parts if part.name in stored]
        if not present:
            continue
        for part in present:
            value = stored[part.name].float()
            left.discard(part.name)
            if not _equal(rows.setdefault((part.rows.start, part.rows.stop), value), value):
                raise CheckpointError(
                    f"`{folder}` has a `{part.name}` that differs from a weight that this model ties it to"
                )
        whole = torch.cat(list(rows.values())) if len(rows) > 1 else next(iter(rows.values()))
        complete = len(present) == len(parts) or config.ties
        if whole.shape != shape or not complete:
            missing = next((part.name for part in parts if part.name not in stored), parts[0].name)
            raise CheckpointError(
                f"`{folder}` lacks `{missing}` in the shape that the model's parameter needs",
                hint="the adapter belongs to another model, or was trained with a tied weight untied",
            )
        parameters[names[0]] = whole
    if left:
        raise CheckpointError(f"`{folder}` holds `{min(left)}`, which {type(model).__name__} does not have")
    return parameters


@torch.no_grad()
def fill(model: nn.Module, trained: Mapping[str, Tensor]) -> list[str]:
    """Copy parameters that were trained in full into a model; returns the names of their modules."""
    for name, value in trained.items():
        model.get_parameter(name).copy_(value)
    return sorted({name.rpartition(".")[0] for name in trained})


def _is_of_module(name: str, modules: Sequence[str]) -> bool:
    """Whether a tensor of an adapter's file belongs to one of the modules that were trained in full."""
    module = name.removeprefix(_PREFIX).rpartition(".")[0]
    return ".lora_" not in name and any(module.endswith(whole) or f"{whole}." in module for whole in modules)


def _joined(parts: list[LayerPart], adapters: Mapping[str, LowRank], layer: nn.Module) -> LowRank:
    """Join the adapters of a fused layer's parts (such as query, key and value) into one adapter of the fused layer.

    If the parts share their factor A, the joined adapter uses that A. Otherwise the factors A are stacked, and the rank
    is the sum of the parts' ranks.
    """
    if len(parts) == 1:
        return next(iter(adapters.values()))
    first = next(iter(adapters.values()))
    alike = all(adapter.scale == first.scale and _equal(adapter.a, first.a) for adapter in adapters.values())
    total = len(first.a) if alike else sum(len(adapter.a) for adapter in adapters.values())
    dora = any(adapter.magnitude is not None for adapter in adapters.values())
    # These are DoRA's initial magnitudes; the rows of parts without an adapter keep them.
    lengths = row_norms(matrix(layer), first.a.dtype) if dora else None
    a = first.a if alike else torch.cat([adapter.a * adapter.scale for adapter in adapters.values()])
    b, start = a.new_zeros(shape_of(layer)[0], total), 0
    for part in parts:
        if (adapter := adapters.get(part.name)) is None:
            continue
        b[part.rows, start : start + len(adapter.a)] = adapter.b
        start += 0 if alike else len(adapter.a)
        if lengths is not None and adapter.magnitude is not None:
            lengths[part.rows] = adapter.magnitude
    return LowRank(a, b, first.scale if alike else 1.0, lengths)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal; for meta and fake tensors, only the shapes are compared."""
    if first.is_meta or is_fake(first):
        return first.shape == second.shape
    return torch.equal(first, second)


def _read_weights(folder: Path, device_without_data: torch.device | None) -> tuple[dict[str, Tensor], str]:
    """Read an adapter's tensors by name and its base weights' hash; on a meta or fake device, only shapes are read."""
    try:
        with foreign.open_safetensors(folder / WEIGHTS, within=folder) as file:
            fingerprint = (file.metadata() or {}).get(_BASE, "")
            names = list(file.keys())
            if device_without_data is not None:
                shapes = {name: file.get_slice(name).get_shape() for name in names}
                return {n: torch.empty(shape, device=device_without_data) for n, shape in shapes.items()}, fingerprint
            return {name: file.get_tensor(name) for name in names}, fingerprint
    except (OSError, SafetensorError) as error:
        hint = "adapter_model.bin is a pickle, which is not loaded: save the adapter again with PEFT, as safetensors"
        raise CheckpointError(f"cannot load `{folder / WEIGHTS}`: {error}", hint=hint) from error


def _tensors_of(tensors: Mapping[str, Tensor], name: str, folder: Path) -> dict[str, Any]:
    """The factors and the magnitude of one adapter in float32, as arguments of `LowRank`."""
    a, b, magnitude = (tensors.get(f"{_PREFIX}{name}{_SUFFIXES[kind]}") for kind in ("a", "b", "magnitude"))
    if a is None or b is None or a.dim() != 2 or b.dim() != 2 or b.shape[1] != len(a):
        raise CheckpointError(f"`{folder / WEIGHTS}` has no pair of factors for `{name}`")
    return {"a": a.float(), "b": b.float(), "magnitude": None if magnitude is None else magnitude.float()}


def _scale(config: AdapterConfig, name: str, tensors: Mapping[str, Tensor]) -> float:
    """The factor s of the product B A x, computed from alpha and the rank as PEFT does."""
    rank = max(1, len(tensors[f"{_PREFIX}{name}{_SUFFIXES['a']}"]))
    own = (value for pattern, value in config.alphas.items() if pattern.match(name[:LONGEST]))
    alpha = next(own, config.alpha)
    return alpha / (rank**0.5 if config.root else rank)
