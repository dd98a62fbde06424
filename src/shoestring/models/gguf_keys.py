"""Converts a model's configuration between GGUF's keys and transformers' config.json."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.models.gguf_architectures import ARCHITECTURES, WRITTEN, Architecture
from shoestring.models.gguf_rope import RopeKeys, read_rope, write_rope
from shoestring.storage.fields import MOST, REQUIRED, Fields

log = logging.getLogger("shoestring")

_COUNTS = 4096
"""Maximum number of attention heads."""
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
"""Keys that do not affect the generated text."""
_OFF: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.rope_pattern": (1,),
    "attention.indexer.kpool_select_tail": (True,),
    "attn_logit_softcapping": (50.0,),
    "final_logit_softcapping": (30.0,),
    "router_logit_softcapping": (30.0,),
    "activation.situ_beta": (1.0,),
    "expert_group_scale": (0.05,),
    "token_shift_count": (2,),
    "kda.gate_lower_bound": (-math.inf,),
}
"""Values other than those in `_UNSET` that llama.cpp writes for keys that a model does not use."""
_UNSET = (0, -1, 2**32 - 1)
"""Values that llama.cpp writes for any other key that a model does not use."""
_NO_COMPUTATION = frozenset(
    ("vocab_size", "tie_word_embeddings", "rope_parameters", "rope_theta", "rope_scaling", "head_dim", "layer_types",
     "sliding_window", "initializer_range", "use_cache", "dtype", "torch_dtype", "architectures", "model_type",
     "transformers_version", "_name_or_path", "id2label", "label2id", "problem_type", "return_dict",
     "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "shoestring",
     "quantization_config", "query_pre_attn_scalar", "partial_rotary_factor")
)  # fmt: skip
"""Entries of config.json that do not affect the generated text, or that other code here handles."""
_NO_COMPUTATION_ENDS = ("_token_id", "dropout", "pdrop", "dropout_prob", "_init_std")


# -- writing -----------------------------------------------------------------------------------------------------------


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The llama.cpp architecture of a model with this config.json.

    Raises:
        ConfigError: no supported architecture has this model type.
    """
    kind = config.get("model_type")
    if (architecture := WRITTEN.get(str(kind))) is None:
        raise ConfigError(
            f"a model of the type {reprlib.repr(kind)} cannot be written as GGUF",
            hint=f"only {', '.join(sorted(WRITTEN))} can",
        )
    return architecture


def normal(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration entries under the names used in `Key`, with the defaults of transformers filled in."""
    entries = dict(config)
    for name, theirs in architecture.names.items():
        if theirs in entries:
            entries[name] = entries.pop(theirs)
    for name, value in (
        ("intermediate_size", 4 * entries["hidden_size"]),
        ("num_key_value_heads", entries["num_attention_heads"]),
        ("head_dim", entries["hidden_size"] // entries["num_attention_heads"]),
    ):
        if entries.get(name) is None:
            entries[name] = value
    return entries


def keys_of(architecture: Architecture, config: Mapping[str, Any], usual: Mapping[str, Any]) -> RopeKeys:
    """The GGUF keys of a model with this config.json, without the architecture's prefix, and tensors of rotary
    frequency factors.

    Args:
        usual: the default configuration of the model type; entries that are not handled here must have their default
            values.

    Raises:
        ConfigError: llama.cpp does not support such a model.
    """
    entries = normal(architecture, config)
    # Refuse entries and values that llama.cpp does not support.
    known = {architecture.entry(key.entry) for key in architecture.keys}
    known |= {*architecture.fixed, *architecture.ignored, *architecture.present, *_NO_COMPUTATION}
    for name, value in config.items():
        values = architecture.fixed.get(name, (value,))
        if name not in known and not name.endswith(_NO_COMPUTATION_ENDS):
            values = (usual.get(name),)
        if value not in values:
            text = reprlib.repr(value)
            raise ConfigError(f"llama.cpp's {architecture.name} does not compute models with {name} = {text}")
    keys: dict[str, Any] = {"vocab_size": entries["vocab_size"], **architecture.constants}
    for key in architecture.keys:
        value = entries.get(key.entry)
        if value is not None:
            keys[key.gguf] = {"count": int, "number": float, "flag": bool}[key.kind](value)
        elif not key.optional:
            raise ConfigError(f"the model's configuration lacks {architecture.entry(key.entry)}")
    if architecture.query_scale and entries["query_pre_attn_scalar"] != (scalar := query_scalar(architecture, entries)):
        raise ConfigError(f"llama.cpp's {architecture.name} computes this model with query_pre_attn_scalar = {scalar}")
    window, context = entries.get("sliding_window"), keys["context_length"]
    sees_window = entries.get("use_sliding_window", True) and window is not None
    if architecture.period:
        expected = layer_types(architecture.period, entries["num_hidden_layers"])
        if list(entries.get("layer_types") or expected) != expected:
            raise ConfigError(
                f"llama.cpp's {architecture.name} has full attention in every layer of {architecture.period}",
                hint="the layer_types in this model's configuration have another order",
            )
    elif sees_window and window < context:
        log.warning("llama.cpp's %s has no sliding window; the file's context is %d", architecture.name, window)
        keys["context_length"] = window
    keys["attention.key_length"] = keys["attention.value_length"] = entries["head_dim"]
    rope = write_rope(entries) if architecture.rope else RopeKeys({}, {})
    return RopeKeys(keys | rope.keys, rope.tensors)


def query_scalar(architecture: Architecture, entries: Mapping[str, Any]) -> int:
    """For Gemma: the number n in llama.cpp's attention scores q · k / √n."""
    if entries["num_hidden_layers"] == architecture.query_scale:
        return entries["hidden_size"] // entries["num_attention_heads"]
    return entries["head_dim"]


def layer_types(period: int, layers: int) -> list[str]:
    """Attention type of each layer, where the last layer of each `period` has full attention and the others a sliding
    window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


# -- reading -----------------------------------------------------------------------------------------------------------


def config_of(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str, factors: Mapping[str, Any]
) -> tuple[Architecture, dict[str, Any]]:  # fmt: skip
    """The architecture and the content of config.json for the model in a file.

    Args:
        shapes: the tensors' shapes, outermost dimension first. factors: tensors of rotary frequency factors.

    Raises:
        CheckpointError: a key is missing, of another type or out of range.
        ConfigError: such a model is not supported, or the file has an unknown key that may affect the generated text.
    """
    name = values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{where} has the architecture {reprlib.repr(name)}",
            hint=f"only {', '.join(sorted(ARCHITECTURES))} are supported",
        )
    content, parts = values.get("general.type", "model"), values.get("split.count", 1)
    if content != "model":
        raise ConfigError(f"{where} holds no model, but {reprlib.repr(content)}")
    if parts not in (0, 1):
        raise ConfigError(f"{where} is one of {reprlib.repr(parts)} files of a model", hint="merge them with llama.cpp")
    architecture = ARCHITECTURES[name]
    prefix = f"{name}."
    table = {key.removeprefix(prefix): _plain(value) for key, value in values.items() if key.startswith(prefix)}
    fields = Fields(table, f"{where}: {name}", CheckpointError)
    entries = _counts(architecture, fields, len(shapes))
    entries["vocab_size"] = _rows(shapes, "token_embd.weight", where)
    entries["tie_word_embeddings"] = "output.weight" not in shapes
    heads, width = entries["num_attention_heads"], entries["head_dim"]
    known = {*_HARMLESS, *architecture.unused, *(key.gguf for key in architecture.keys)}
    expected: dict[str, Any] = {
        f"attention.{kind}_length{of}": width for kind in ("key", "value") for of in ("", "_swa")
    }
    expected |= {"attention.head_count_kv": entries.get("num_key_value_heads", heads), **architecture.constants}
    if architecture.period:
        entries["layer_types"] = types = layer_types(architecture.period, entries["num_hidden_layers"])
        pattern = table.get("attention.sliding_window_pattern")
        sliding = [kind == "sliding_attention" for kind in types]
        expected["attention.sliding_window_pattern"] = sliding if isinstance(pattern, list) else architecture.period
    if architecture.query_scale:
        entries["query_pre_attn_scalar"] = scalar = query_scalar(architecture, entries)
        expected["attention.scale"] = _plain(scalar**-0.5)
    if architecture.rope:
        entries["rope_parameters"], used = read_rope(fields, entries, factors, local=architecture.local_rope)
        known |= used
        if not architecture.period:
            known.add("rope.freq_base_swa")  # no layer has a sliding window, so this key is unused
        elif not architecture.local_rope:
            expected["rope.freq_base_swa"] = table.get("rope.freq_base", 10_000.0)
        expected["rope.dimension_count_swa"] = table.get("rope.dimension_count", width)
    else:
        known |= {key for key in table if key.startswith("rope.")}  # the model has no rotary positions
    _check_known(table, expected, known - expected.keys(), f"{where}: {name}")
    for entry, tensor in architecture.present.items():
        entries[entry] = tensor in shapes if tensor[0] != "!" else tensor[1:] not in shapes
    entries |= {entry: allowed[0] for entry, allowed in architecture.fixed.items() if entry != "tie_word_embeddings"}
    if not architecture.head_dim:
        del entries["head_dim"]
    return architecture, {architecture.entry(entry): value for entry, value in entries.items()}


def _counts(architecture: Architecture, fields: Fields, tensors: int) -> dict[str, Any]:
    """The configuration entries whose values are in one key of the file each (`Architecture.keys`), and the width of a
    head."""
    entries: dict[str, Any] = {}
    for key in architecture.keys:
        default = entries[key.default] if isinstance(key.default, str) else key.default
        default = REQUIRED if default is None and not key.optional else default
        if key.kind == "count":
            most = {"num_hidden_layers": tensors, "num_attention_heads": _COUNTS}.get(key.entry, MOST)
            value = fields.count(key.gguf, default, least=0 if key.optional else 1, most=most) or None
        elif key.kind == "flag":
            value = fields.flag(key.gguf, default)
        elif not (value := fields.number(key.gguf, default)) > 0:
            raise CheckpointError(f"{fields.where}.{key.gguf} is {value}")
        entries[key.entry] = value
    heads, groups = entries["num_attention_heads"], entries.get("num_key_value_heads", 1)
    width = entries["hidden_size"] // heads
    if heads % groups or width < 1:
        raise CheckpointError(
            f"{fields.where}: a width of {entries['hidden_size']} does not fit {heads} heads and {groups} KV heads"
        )
    entries["head_dim"] = fields.count("attention.key_length", width) if architecture.head_dim else width
    return entries


def _rows(shapes: Mapping[str, tuple[int, ...]], name: str, where: str) -> int:
    shape = shapes.get(name, ())
    if len(shape) != 2:
        raise CheckpointError(f"{where} lacks {name}, a matrix")
    return shape[0]


def _plain(value: Any) -> Any:
    """Convert a value from a file: an fp32 number to the shortest decimal that rounds to it (such as 1e-5), an array to
    a list."""
    if isinstance(value, float) and math.isfinite(value):
        return float(str(np.float32(value)))
    return value.tolist() if isinstance(value, np.ndarray) and value.size <= _COUNTS else value


def _check_known(table: Mapping[str, Any], expected: Mapping[str, Any], known: set[str], where: str) -> None:
    """Refuse unknown keys that may affect the generated text, and known keys with an unsupported value."""
    for name, value in table.items():
        text = reprlib.repr(value)
        if name in _OFF and (isinstance(value, bool) or value in _OFF[name]):
            is_off = value in _OFF[name]  # a value that llama.cpp writes for models that do not use the key
        else:
            numbers = value if isinstance(value, list) else [value]
            is_off = all(isinstance(number, int | float) and number in _UNSET for number in numbers)
        if name in known or is_off:
            continue
        if name not in expected:
            hint = "a newer version may read it"
            raise ConfigError(f"{where}.{name} is {text}, a key that is not known and may change the text", hint=hint)
        if isinstance(expected[name], bool) != isinstance(value, bool) or value != expected[name]:
            raise ConfigError(f"{where}.{name} is {text}", hint=f"only {expected[name]!r} is supported")
