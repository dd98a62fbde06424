"""Writes a `GPT` as a folder (`config.json` and safetensors) that transformers' LlamaForCausalLM loads, and reads it
back.

A `GPT` is a Llama whose query/key/value and gate/up projections are fused into one matrix each. The rows of these
matrices are split on export and concatenated on import. Nothing is unpickled: a folder with only `.bin` files is
refused.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.storage import foreign
from shoestring.storage.fields import Fields
from shoestring.storage.whole import write_atomic, write_by

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Data types of weights, by their names in the header of a safetensors file."""
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class LlamaTensor:
    """Name and shape of one tensor of the Llama layout."""

    name: str
    shape: tuple[int, ...]


def layout(config: GPTConfig) -> Iterator[tuple[str, list[LlamaTensor]]]:
    """Iterate over the parameters of `GPT`, each with the tensors of the Llama layout that make up its rows, in
    order."""
    dim, hidden, query = config.dim, config.hidden, config.heads * config.head_dim
    shared = config.kv_heads * config.head_dim
    yield "embed.weight", [LlamaTensor("model.embed_tokens.weight", (config.vocab_size, dim))]
    for layer in range(config.layers):
        ours, llama = f"blocks.{layer}.", f"model.layers.{layer}."
        rows = {"q": query, "k": shared, "v": shared}
        parts = [LlamaTensor(f"{llama}self_attn.{name}_proj.weight", (count, dim)) for name, count in rows.items()]
        yield f"{ours}attention_norm.weight", [LlamaTensor(f"{llama}input_layernorm.weight", (dim,))]
        yield f"{ours}attention.qkv.weight", parts
        yield f"{ours}attention.out.weight", [LlamaTensor(f"{llama}self_attn.o_proj.weight", (dim, query))]
        yield f"{ours}mlp_norm.weight", [LlamaTensor(f"{llama}post_attention_layernorm.weight", (dim,))]
        parts = [LlamaTensor(f"{llama}mlp.{name}_proj.weight", (hidden, dim)) for name in ("gate", "up")]
        yield f"{ours}mlp.gate_up.weight", parts
        yield f"{ours}mlp.down.weight", [LlamaTensor(f"{llama}mlp.down_proj.weight", (dim, hidden))]
    yield "norm.weight", [LlamaTensor("model.norm.weight", (dim,))]
    if not config.tied:
        yield "head.weight", [LlamaTensor("lm_head.weight", (config.vocab_size, dim))]


def save_pretrained(model: GPT, folder: Path, *, max_shard_bytes: int = 2 * 2**30) -> None:
    """Write `model` to `folder` in the Llama layout; see `save_state`."""
    save_state(model.config, model.state_dict(), folder, max_shard_bytes=max_shard_bytes)


def save_state(
    config: GPTConfig, state: Mapping[str, Tensor], folder: Path, *, max_shard_bytes: int = 2 * 2**30
) -> None:
    """Write the whole (gathered) `state` of a `GPT` to `folder`; the dtype is not changed.

    A file holds at most `max_shard_bytes` of tensors, or a single larger tensor; if there are several files, an index
    is written. Each file is written atomically. `config.json` is removed first and written last, so that an interrupted
    write over an earlier model leaves a folder without a model, never a mixture of two models.

    Raises:
        CheckpointError: `state` lacks a parameter of the model.
        OSError: writing failed.
    """
    missing = [ours for ours, _ in layout(config) if ours not in state]
    if missing:
        raise CheckpointError(f"the state to save lacks {', '.join(missing)}")
    tensors: dict[str, Tensor] = {}
    for ours, parts in layout(config):
        rows = state[ours].detach().cpu().split([part.shape[0] for part in parts])
        tensors |= {part.name: piece for part, piece in zip(parts, rows, strict=True)}
    # Each shard has at most `max_shard_bytes` bytes of tensors, or a single larger tensor.
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    (folder / CONFIG).unlink(missing_ok=True)
    total = len(shards)
    files = [SINGLE] if total == 1 else [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
    for file, names in zip(files, shards, strict=True):
        pieces = {name: tensors[name].contiguous() for name in names}
        # `safetensors.torch.save` would copy all weights twice in memory.
        write_by(folder / file, partial(safetensors.torch.save_file, pieces, metadata={"format": "pt"}))
    current = {*files, INDEX} if total > 1 else set(files)
    for path in [*folder.glob("model*.safetensors"), folder / INDEX]:  # files of an earlier model with more shards
        if path.name not in current:
            path.unlink(missing_ok=True)
    if total > 1:
        index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        size = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    marker = {"shoestring": {"format": "gpt"}}  # selects this reader in `loading.READERS`
    _write_json(folder / CONFIG, to_llama_config(config, next(iter(tensors.values())).dtype) | marker)


def load_pretrained(folder: Path) -> GPT:
    """Load the model in `folder`, on the CPU and in the dtype of its files. If the default device is `meta`, only the
    headers of the files are read, to check names and shapes.

    Raises:
        ConfigError: `config.json` describes a model that `GPT` does not support.
        CheckpointError: files are missing or damaged, or tensors are missing, unexpected or of the wrong shape.
    """
    config = from_llama_config(_read_json(folder / CONFIG), str(folder / CONFIG))
    files = {name: file for file in weight_files(folder) for name in _names(file)}
    if config.layers > len(files):
        raise CheckpointError(
            f"{folder}: {CONFIG} asks for {config.layers} layers, but there are only {len(files)} tensors"
        )
    expected = {part.name: part for _, parts in layout(config) for part in parts}
    # Early versions of the layout also stored the rotary frequencies, and some stored a copy of the tied embedding.
    spare = {name for name in files if name.endswith("rotary_emb.inv_freq")}
    if config.tied and "lm_head.weight" in files and not expected.keys() - files.keys():
        embed = expected["model.embed_tokens.weight"]
        head = LlamaTensor("lm_head.weight", embed.shape)
        if torch.equal(_read(files[head.name], head), _read(files[embed.name], embed)):
            spare.add(head.name)
    for problem, names in (
        ("missing", expected.keys() - files.keys()),
        ("unexpected", files.keys() - expected.keys() - spare),
    ):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(f"{folder}: {problem} tensors: {listed}")
    read = _outline if torch.get_default_device().type == "meta" else _read
    with torch.device("meta"):
        model = GPT(config)
    state = {
        ours: torch.cat([read(files[part.name], part) for part in parts])
        if len(parts) > 1
        else read(files[parts[0].name], parts[0])
        for ours, parts in layout(config)
    }
    model.load_state_dict(state, assign=True)
    return model


def to_llama_config(config: GPTConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of the `config.json` for a `GPT`, which transformers 4 (with rope_theta and torch_dtype) and 5 can
    read."""
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": name,
        "torch_dtype": name,
    }


def from_llama_config(content: Mapping[str, Any], where: str) -> GPTConfig:
    """The `GPTConfig` for the content of a Llama `config.json`; missing entries get transformers' defaults.

    Raises:
        ConfigError: a required entry is missing, or `GPT` does not support the model; the message begins with `where`,
            the file's name.
    """
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in required if name not in content]
    supported = {
        "model_type": ("llama",),
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "quantization_config": (None,),
    }
    defaults = {"model_type": "missing", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, values in supported.items():
        value = content.get(name, defaults.get(name))
        if not any(value is allowed or value == allowed for allowed in values):
            text = reprlib.repr(value)
            raise ConfigError(f"{where}: {name} is {text}", hint=f"only {values[0]!r} is supported")
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    fields, heads = Fields(content, where, ConfigError), content["num_attention_heads"]
    config = GPTConfig(  # its constructor checks the types of counts
        vocab_size=content["vocab_size"],
        dim=content["hidden_size"],
        hidden=content["intermediate_size"],
        layers=content["num_hidden_layers"],
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        context=content.get("max_position_embeddings", 2048),
        tied=fields.flag("tie_word_embeddings", False),
        rope_theta=float(_rope(fields, where)),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        init_std=fields.number("initializer_range", 0.02),
    )
    if (head_dim := fields.count("head_dim", config.head_dim)) != config.head_dim:
        raise ConfigError(
            f"{where}: head_dim = {head_dim} is not supported",
            hint=f"only hidden_size / num_attention_heads = {config.head_dim} is",
        )
    return config


def supports(content: Mapping[str, Any]) -> bool:
    """Whether `GPT` supports the model that the content of a `config.json` describes."""
    try:
        from_llama_config(content, CONFIG)
    except ConfigError:
        return False
    return True


def _rope(fields: Fields, where: str) -> float:
    """Base of the rotary frequencies, from `rope_parameters` (transformers 5) or `rope_theta` (earlier versions)."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.entries(name)
        kind = rope.text("rope_type", rope.text("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"{where}: {name} is of type {kind!r}", hint="only unscaled rotary positions are supported"
            )
        if rope.number("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"{where}: {name} rotates only part of a head", hint="partial_rotary_factor must be 1")
    return fields.entries("rope_parameters").number("rope_theta", fields.number("rope_theta", 10_000.0))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder: a single file, or the files that the folder's index names.

    Raises:
        CheckpointError: the folder has no such files, or the index names something other than files in the folder.
    """
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        table = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise CheckpointError(f"{folder / INDEX} has no table `weight_map` of file names")
        files = sorted(set(table.values()))
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                text = reprlib.repr(file)
                raise CheckpointError(f"{folder / INDEX} names {text}, not a .safetensors file beside it")
        return [folder / file for file in files]
    pickled = any(folder.glob("*.bin"))
    raise CheckpointError(
        f"{folder} has no {SINGLE}",
        hint="its .bin files are pickles, which are not loaded: save it again with transformers, as safetensors"
        if pickled
        else "",
    )


def count_tensors(file: Path) -> int:
    """The number of tensors in a safetensors file of a model's folder.

    Raises:
        CheckpointError: the file cannot be read.
    """
    return len(_names(file))


def _names(file: Path) -> list[str]:
    try:
        with foreign.open_safetensors(file, within=file.parent) as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _read(file: Path, part: LlamaTensor) -> Tensor:
    try:
        with foreign.open_safetensors(file, within=file.parent) as opened:
            shape = tuple(opened.get_slice(part.name).get_shape())
            if shape == part.shape:
                tensor = opened.get_tensor(part.name)
                if tensor.is_floating_point():
                    return tensor
                raise CheckpointError(f"{file}: {part.name} holds {tensor.dtype}, not floating point")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    raise CheckpointError(f"{file}: {part.name} has shape {shape}, not {part.shape} as {CONFIG} says")


def _outline(file: Path, part: LlamaTensor) -> Tensor:
    """Like `_read`, but on the meta device, from the header of the file alone."""
    try:
        with foreign.open_safetensors(file, within=file.parent) as opened:
            header = opened.get_slice(part.name)
            if header.get_dtype() in FLOATS and tuple(header.get_shape()) == part.shape:
                return torch.empty(part.shape, dtype=FLOATS[header.get_dtype()], device="meta")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return _read(file, part).to("meta")  # `_read` reports what is wrong with the file


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = foreign.read_json(path, within=path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
