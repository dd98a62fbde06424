"""`GPT` weights as a folder that transformers' LlamaForCausalLM loads, and back: `config.json` and safetensors.

A `GPT` is a Llama whose query/key/value and gate/up projections are one matrix each: their rows are split on the way
out and joined on the way in. Nothing is unpickled: a folder that holds only `.bin` files is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.storage.whole import write_atomic

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class LlamaTensor:
    """One tensor of the Llama layout: its name and shape."""

    name: str
    shape: tuple[int, ...]


def layout(config: GPTConfig) -> Iterator[tuple[str, list[LlamaTensor]]]:
    """Each parameter of `GPT` with the tensors of the Llama layout that are its rows, in order."""
    dim, hidden, query = config.dim, config.hidden, config.heads * config.head_dim
    shared = config.kv_heads * config.head_dim
    yield "embed.weight", [LlamaTensor("model.embed_tokens.weight", (config.vocab_size, dim))]
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        rows = {"q": query, "k": shared, "v": shared}
        parts = [LlamaTensor(f"{theirs}self_attn.{name}_proj.weight", (count, dim)) for name, count in rows.items()]
        yield f"{ours}attention_norm.weight", [LlamaTensor(f"{theirs}input_layernorm.weight", (dim,))]
        yield f"{ours}attention.qkv.weight", parts
        yield f"{ours}attention.out.weight", [LlamaTensor(f"{theirs}self_attn.o_proj.weight", (dim, query))]
        yield f"{ours}mlp_norm.weight", [LlamaTensor(f"{theirs}post_attention_layernorm.weight", (dim,))]
        parts = [LlamaTensor(f"{theirs}mlp.{name}_proj.weight", (hidden, dim)) for name in ("gate", "up")]
        yield f"{ours}mlp.gate_up.weight", parts
        yield f"{ours}mlp.down.weight", [LlamaTensor(f"{theirs}mlp.down_proj.weight", (dim, hidden))]
    yield "norm.weight", [LlamaTensor("model.norm.weight", (dim,))]
    if not config.tied:
        yield "head.weight", [LlamaTensor("lm_head.weight", (config.vocab_size, dim))]


def save_pretrained(model: GPT, folder: Path, *, max_shard_bytes: int = 2 * 2**30) -> None:
    """Write `model` to `folder` in the Llama layout; see `save_state`."""
    save_state(model.config, model.state_dict(), folder, max_shard_bytes=max_shard_bytes)


def save_state(
    config: GPTConfig, state: Mapping[str, Tensor], folder: Path, *, max_shard_bytes: int = 2 * 2**30
) -> None:
    """Write the whole (gathered) `state` of a `GPT` to `folder`, in the dtype it has.

    Files of at most `max_shard_bytes` of tensors, or of one tensor that is larger; several get an index. Each file
    appears whole or not at all. `config.json` goes first and comes last, so that an interrupted write over an earlier
    model is a folder without a model, never a mixture.

    Raises:
        CheckpointError: `state` lacks a parameter of the model.
        OSError: the disk.
    """
    tensors = _to_llama(config, state)
    shards = _shards(tensors, max_shard_bytes)
    (folder / CONFIG).unlink(missing_ok=True)
    total = len(shards)
    files = [SINGLE] if total == 1 else [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
    for file, names in zip(files, shards, strict=True):
        data = safetensors.torch.save({name: tensors[name].contiguous() for name in names}, {"format": "pt"})
        write_atomic(folder / file, data)
    _remove_stale(folder, keep={*files, INDEX} if total > 1 else set(files))
    if total > 1:
        index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        size = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    marker = {"shoestring": {"format": "gpt"}}  # so that this reader opens it again, see `loading.READERS`
    _write_json(folder / CONFIG, to_llama_config(config, next(iter(tensors.values())).dtype) | marker)


def load_pretrained(folder: Path) -> GPT:
    """The model in `folder`, on the CPU and in the dtype of its files.

    Raises:
        ConfigError: `config.json` asks for something that `GPT` does not compute.
        CheckpointError: files are missing or damaged, or tensors are missing, unexpected or of the wrong shape.
    """
    config = from_llama_config(_read_json(folder / CONFIG), str(folder / CONFIG))
    with torch.device("meta"):
        model = GPT(config)
    files = {name: file for file in _weight_files(folder) for name in _names(file)}
    _check_names(config, files, folder)
    state = {
        ours: torch.cat([_read(files[part.name], part) for part in parts])
        if len(parts) > 1
        else _read(files[parts[0].name], parts[0])
        for ours, parts in layout(config)
    }
    model.load_state_dict(state, assign=True)
    return model


def to_llama_config(config: GPTConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of transformers for `config`, as its versions 4 (rope_theta, torch_dtype) and 5 read it."""
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


def from_llama_config(given: Mapping[str, Any], where: str) -> GPTConfig:
    """The shape that a Llama `config.json` describes; what is left out has transformers' default.

    Raises:
        ConfigError: a required entry is missing, or one asks for what `GPT` does not compute; `where` names the file.
    """
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in required if name not in given]
    _check_supported(given, where)
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    heads = given["num_attention_heads"]
    config = GPTConfig(
        vocab_size=given["vocab_size"],
        dim=given["hidden_size"],
        hidden=given["intermediate_size"],
        layers=given["num_hidden_layers"],
        heads=heads,
        kv_heads=given.get("num_key_value_heads") or heads,
        context=given.get("max_position_embeddings", 2048),
        tied=given.get("tie_word_embeddings", False),
        rope_theta=float(_rope(given, where)),
        norm_eps=given.get("rms_norm_eps", 1e-6),
        init_std=given.get("initializer_range", 0.02),
    )
    if (given.get("head_dim") or config.head_dim) != config.head_dim:
        raise ConfigError(
            f"{where}: head_dim is {given['head_dim']}",
            hint=f"only hidden_size / heads = {config.head_dim} is supported",
        )
    return config


def supports(given: Mapping[str, Any]) -> bool:
    """Whether `GPT` computes what a `config.json` describes."""
    try:
        from_llama_config(given, CONFIG)
    except ConfigError:
        return False
    return True


def _check_supported(given: Mapping[str, Any], where: str) -> None:
    supported = {
        "model_type": ("llama",),
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "quantization_config": (None,),
    }
    defaults = {"model_type": "missing", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, values in supported.items():
        value = given.get(name, defaults.get(name))
        if value not in values:
            raise ConfigError(f"{where}: {name} is {value!r}", hint=f"only {values[0]!r} is supported")


def _rope(given: Mapping[str, Any], where: str) -> float:
    """Base of the rotary frequencies: `rope_parameters` of transformers 5, or `rope_theta` beside `rope_scaling`."""
    for table in ("rope_parameters", "rope_scaling"):
        rope = given.get(table) or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"{where}: {table} is not a table")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"{where}: {table} is of type {kind!r}", hint="only unscaled rotary positions are supported"
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"{where}: {table} turns only part of a head", hint="partial_rotary_factor must be 1")
    return (given.get("rope_parameters") or {}).get("rope_theta", given.get("rope_theta", 10_000.0))


def _to_llama(config: GPTConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    missing = [ours for ours, _ in layout(config) if ours not in state]
    if missing:
        raise CheckpointError(f"the state to save lacks {', '.join(missing)}")
    tensors: dict[str, Tensor] = {}
    for ours, parts in layout(config):
        rows = state[ours].detach().cpu().split([part.shape[0] for part in parts])
        tensors |= {part.name: piece for part, piece in zip(parts, rows, strict=True)}
    return tensors


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """The names, in order, cut so that each list's tensors take at most `limit` bytes (or are a single one)."""
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def _remove_stale(folder: Path, keep: set[str]) -> None:
    for path in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if path.name not in keep:
            path.unlink(missing_ok=True)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        table = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise CheckpointError(f"{folder / INDEX} has no table `weight_map` of file names")
        files = sorted(set(table.values()))
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{folder / INDEX} names {file!r}, not a .safetensors file beside it")
        return [folder / file for file in files]
    pickled = any(folder.glob("*.bin"))
    raise CheckpointError(
        f"{folder} has no {SINGLE}",
        hint="its .bin files are pickles, which are not loaded: save it again with transformers, as safetensors"
        if pickled
        else "",
    )


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _check_names(config: GPTConfig, files: Mapping[str, Path], folder: Path) -> None:
    expected = {part.name: part for _, parts in layout(config) for part in parts}
    # Early versions of the layout stored the rotary frequencies, and some a copy of the tied embedding.
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


def _read(file: Path, part: LlamaTensor) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            shape = tuple(opened.get_slice(part.name).get_shape())
            if shape == part.shape:
                tensor = opened.get_tensor(part.name)
                if tensor.is_floating_point():
                    return tensor
                raise CheckpointError(f"{file}: {part.name} holds {tensor.dtype}, not floating point")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    raise CheckpointError(f"{file}: {part.name} has shape {shape}, not {part.shape} as {CONFIG} says")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
