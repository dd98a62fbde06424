"""Reads and writes models in GGUF, llama.cpp's file format, for the architectures of `gguf_architectures`.

A file holds the shape of the model (`gguf_keys`), its tokenizer (`gguf_tokenizer`) and its weights. llama.cpp's types
Q8_0 and Q4_0 equal the 8-bit and 4-bit formats of `rounding`, so that such weights are read and written without being
rounded again. A Llama is read as `GPT` if `GPT` supports its configuration; all other models are read as transformers
models.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import nn

from shoestring.core.errors import CheckpointError, ConfigError, ShoestringError
from shoestring.data.tokenizer import Tokenizer
from shoestring.models import gguf_file, gguf_tokenizer, hf, llama, plausible, quantized
from shoestring.models.gguf_architectures import Architecture
from shoestring.models.gguf_file import StoredTensor
from shoestring.models.gguf_keys import architecture_of, config_of, keys_of, normal
from shoestring.models.gguf_rope import FACTORS
from shoestring.models.gguf_weights import (
    Kind,
    TensorSource,
    dense_of,
    gguf_library,
    own_parameters,
    parts_of,
    state_of,
    tensors_of,
)
from shoestring.models.gpt import GPT
from shoestring.storage.whole import put_aside

log = logging.getLogger("shoestring")

KINDS: Mapping[int, Kind] = {32: "f32", 16: "f16", 8: "q8_0", 4: "q4_0"}
"""Maps the number of bits per weight to the type of tensors in the file."""
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_file(path: Path | str) -> bool:
    """Whether a path names an existing GGUF file."""
    return str(path).endswith(".gguf") and Path(path).exists() and not Path(path).is_dir()


# -- reading -----------------------------------------------------------------------------------------------------------


def load(path: Path, *, dense: bool = False) -> tuple[nn.Module, Tokenizer | None]:
    """Load the model and the tokenizer in a file; 8-bit and 4-bit layers stay quantised, all other weights are in
    float32.

    Weights of other quantised types are rounded to 8 bits, with a log message. The tokenizer is None if it cannot be
    built.

    Args:
        dense: whether all layers are converted to float32, so that the model can be trained.

    Raises:
        CheckpointError: the file is not a GGUF file or is damaged, or tensors are missing or have the wrong shape.
        ConfigError: the model's architecture is not supported, or the file has unknown keys or tensors.
    """
    values, tensors = _open(path)
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    factors = {name: dense_of(tensors[name], path).numpy() for name in FACTORS if name in tensors}
    architecture, config = config_of(values, shapes, str(path), factors)
    stored = plausible.StoredWeights(len(tensors), sum(tensor.data.nbytes for tensor in tensors.values()))
    plausible.check_config(config, stored, path)
    model = _empty(architecture, config, stored, path)
    parts = list(parts_of(model, architecture, config))
    known = {
        f"{part.stem}.{suffix}" for part in parts for suffix, _ in own_parameters(model.get_submodule(part.module))
    }
    if others := sorted(tensors.keys() - known - factors.keys()):
        raise ConfigError(f"{path} has unknown tensors: {', '.join(others[:5])}")
    state = state_of(model, parts, TensorSource(tensors, architecture, normal(architecture, config), path, dense))
    model.load_state_dict(state, assign=True, strict=isinstance(model, GPT))
    for module in model.modules():
        if isinstance(module, quantized.QuantizedEmbedding):
            module.like = torch.empty(0)  # this buffer is not stored, so it is still on `meta`
    if not isinstance(model, GPT):
        cast(Any, model).tie_weights()
    return model.eval(), gguf_tokenizer.read(values, path, config["vocab_size"])


def tokenizer_of(path: Path) -> Tokenizer | None:
    """The tokenizer of a file; None if the file has no tokenizer, or one that cannot be built.

    Raises:
        CheckpointError: the file is not a GGUF file or is damaged. DataError: the tokenizer is damaged.
    """
    values, tensors = _open(path)
    embedding = tensors.get("token_embd.weight")
    return gguf_tokenizer.read(values, path, int(embedding.shape[-1]) if embedding else 0)


def ends_of(path: Path) -> list[int]:
    """Ids of the tokens that end a text, from the keys of a file.

    Raises:
        CheckpointError: the file is not a GGUF file or is damaged.
    """
    values = _open(path)[0]
    ids = (values.get(f"tokenizer.ggml.{name}_token_id") for name in gguf_tokenizer.ENDS)
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))


def _open(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        return gguf_file.read(path, gguf_library())
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"`{path}` is not a readable GGUF file: {error}") from error


def _empty(
    architecture: Architecture, config: Mapping[str, Any], stored: plausible.StoredWeights, path: Path
) -> nn.Module:
    """Build a model from its configuration on the meta device; only buffers that the file does not store have
    values."""
    content: dict[str, Any] = {**config, "model_type": architecture.model_types[0], **dict.fromkeys(_IDS)}
    if architecture.name == "llama" and llama.supports(content):
        with torch.device("meta"):
            return GPT(llama.from_llama_config(content, str(path)))
    with torch.device("meta"):
        model = _built(content, path)
    numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if numbers > stored.numbers:
        raise CheckpointError(f"`{path}` describes a model of {numbers:,} numbers, and its tensors hold fewer")
    # Rotary frequencies and masks are computed when a model is built. To save memory, a model with few blocks and
    # narrow weights is built, and these buffers are copied from it.
    blocks = min(normal(architecture, config)["num_hidden_layers"], architecture.period or 1)
    small = {"num_hidden_layers": blocks, "vocab_size": 8, "intermediate_size": 8}
    content |= {architecture.entry(name): value for name, value in small.items()}
    if "layer_types" in content:
        content["layer_types"] = content["layer_types"][:blocks]
    with torch.random.fork_rng(devices=[]):
        computed = dict(_built(content, path).named_buffers())
    for name, buffer in list(model.named_buffers()):
        value = computed.get(re.sub(r"\.\d+\.", ".0.", name, count=1), computed.get(name))
        if value is None or value.shape != buffer.shape:
            raise CheckpointError(f"`{path}`: the buffer {name} of its model has no known value")
        module, _, own = name.rpartition(".")
        model.get_submodule(module).register_buffer(own, value, persistent=False)
    return model


def _built(content: Mapping[str, Any], path: Path) -> nn.Module:
    """Build transformers' model from the content of a config.json; no weights are loaded."""
    with TemporaryDirectory() as folder:
        (Path(folder) / hf.CONFIG).write_text(json.dumps(content))
        try:
            return hf.build(folder, {}, {}, weights=False)
        except ShoestringError as error:
            reason = error.parts()[1].replace(f"`hf:{folder}`", "its model")
            raise CheckpointError(f"cannot load `{path}`: {reason}") from error


# -- writing -----------------------------------------------------------------------------------------------------------


def save(model: nn.Module, tokenizer: Tokenizer | None, path: Path, kind: Kind, ends: Sequence[int] = ()) -> None:
    """Write a model and its tokenizer for llama.cpp; the file is written atomically.

    Args:
        kind: type of the weights. Norms, biases and position embeddings are always written in f32. With q4_0,
            embeddings and the head are written in q8_0. A weight whose number of inputs is not a multiple of 32 is
            written in f16. Layers that are already quantised to this type are not rounded again.
        ends: ids of the tokens that end a text, the most usual first; by default the tokenizer's.

    Raises:
        ConfigError: llama.cpp does not support the model, or a weight cannot be quantised.
    """
    library = gguf_library()
    if isinstance(model, GPT):
        config = usual = llama.to_llama_config(model.config, torch.float32)
    elif hf.is_pretrained(model):
        text = cast(Any, model).config.get_text_config()
        config, usual = text.to_dict(), type(text)().to_dict()  # `usual`: the default configuration of the model type
    else:
        raise ConfigError(f"a {type(model).__name__} cannot be written as GGUF", hint="only language models can")
    architecture = architecture_of(config)
    described = keys_of(architecture, config, usual)
    keys: dict[str, Any] = {f"{architecture.name}.{key}": value for key, value in described.keys.items()}
    if tokenizer is not None:
        keys |= gguf_tokenizer.keys_of(tokenizer, config["vocab_size"], ends)
    parts = list(parts_of(model, architecture, config))
    with put_aside(path) as file:
        writer = library.GGUFWriter(file.name, architecture.name)
        writer.add_file_type(library.LlamaFileType[_FILE_TYPES[kind]])
        writer.add_quantization_version(2)
        for key, value in keys.items():
            _add(writer, key, value)
        for name, factors in described.tensors.items():
            writer.add_tensor(name, factors)
        for part in parts:
            for suffix, data, raw in tensors_of(model, part, architecture, normal(architecture, config), kind):
                raw_type = None if raw is None else library.GGMLQuantizationType[raw]
                writer.add_tensor(f"{part.stem}.{suffix}", data, raw_dtype=raw_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
