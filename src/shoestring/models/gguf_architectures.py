"""Describes the llama.cpp architectures that can be read and written; one description serves both directions.

A description maps GGUF's keys and tensors to transformers' configuration entries and modules. A description also lists
the configuration entries that llama.cpp assumes to have a fixed value, and the order of the rows of each weight. What
is said here about llama.cpp comes from its `convert_hf_to_gguf.py` and `llama-model.cpp`; `benchmarks/models/gguf.py`
compares the texts that llama.cpp and this package generate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Entries = Mapping[str, Any]
"""Entries of transformers' config.json."""


@dataclass(frozen=True)
class Key:
    """A key of a GGUF file and the configuration entry with the same value."""

    gguf: str
    """Name of the key without the architecture's prefix."""
    entry: str
    kind: Literal["count", "number", "flag"] = "count"
    default: Any = None
    """Value that llama.cpp uses if the file lacks the key: the value itself, or the name of the entry that holds it.
    None if the key is required."""
    optional: bool = False
    """Whether the entry may be None; the key is then not written."""


@dataclass(frozen=True)
class Architecture:
    """Describes one architecture of llama.cpp; used for reading and writing."""

    name: str
    model_types: tuple[str, ...]
    """Model types of transformers that are written as this architecture; a file is read as the first type."""
    keys: tuple[Key, ...]
    modules: Mapping[str, str]
    """Maps the name of a tensor in the file, without its suffix, to a module; `{}` is the number of the block."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Configuration entries for which llama.cpp supports only these values; a model that is read gets the first one."""
    ignored: tuple[str, ...] = ()
    """Configuration entries that do not change the model's output."""
    unused: tuple[str, ...] = ()
    """Keys that appear in files although llama.cpp does not use them."""
    present: Mapping[str, str] = field(default_factory=dict)
    """Maps a configuration entry to a tensor: the entry is true if the file has the tensor or, if `!` stands before the
    tensor's name, if the file lacks it."""
    rows: Mapping[str, Callable[[Entries], Tensor]] = field(default_factory=dict)
    """Maps the name of a tensor, without its suffix, to a function that returns, for each row of the tensor in the
    file, the index of this row in the model's weight."""
    plus_one: tuple[str, ...] = ()
    """Names of tensors, without suffix, to which the file adds 1 relative to the model's weights."""
    head_dim: bool = True
    """Whether the configuration has an entry for the width of a head; otherwise the width is hidden_size / heads."""
    rope: bool = True
    period: int = 0
    """Period in layers: the last layer of each period has full attention, the others a sliding window. 0 if llama.cpp
    has no sliding window for this architecture."""
    query_scale: int = 0
    """Number of blocks of the one model size for which `query_pre_attn_scalar` is hidden_size / heads; for all other
    sizes, it is the width of a head. 0 if the architecture has no such entry."""
    local_rope: bool = False
    """Whether layers with a sliding window use other rotary frequencies than layers with full attention."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the file, each with its only supported value."""
    untied_head: bool = False
    """Whether the file must contain the output layer even if its weight is tied to the embeddings."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps entry names as used in `Key` and in this module to the names in the configuration, where these differ."""

    def entry(self, name: str) -> str:
        """The name of an entry in this architecture's configuration."""
        return self.names.get(name, name)


# -- keys --------------------------------------------------------------------------------------------------------------

_SIZES = (
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("block_count", "num_hidden_layers"),
    Key("attention.head_count", "num_attention_heads"),
)
_HIDDEN = Key("feed_forward_length", "intermediate_size")
_GROUPS = Key("attention.head_count_kv", "num_key_value_heads", default="num_attention_heads")
_RMS = Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", "number")
_LAYER_NORM = Key("attention.layer_norm_epsilon", "layer_norm_eps", "number")
_COMMON = (*_SIZES, _HIDDEN, _GROUPS, _RMS)


# -- modules -----------------------------------------------------------------------------------------------------------


def _blocks(prefix: str, **modules: str) -> dict[str, str]:
    return {f"blk.{{}}.{stem}": f"{prefix}.{{}}.{module}" for stem, module in modules.items()}


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
              "attn_output": "self_attn.o_proj"}  # fmt: skip
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AROUND = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
                 "ffn_norm": "pre_feedforward_layernorm",
                 "post_ffw_norm": "post_feedforward_layernorm"}  # fmt: skip
_LLAMA = _OUTER | _blocks("model.layers", **_ATTENTION, **_GATED, **_NORMS_BEFORE)


# -- orders of rows ----------------------------------------------------------------------------------------------------


def _adjacent(heads: str) -> Callable[[Entries], Tensor]:
    """Row order for rotary positions: llama.cpp rotates pairs of adjacent rows of a head, transformers pairs of rows
    half a head apart."""

    def rows(entries: Entries) -> Tensor:
        count, width = entries[heads], entries["head_dim"]
        return torch.arange(count * width).view(count, 2, width // 2).transpose(1, 2).reshape(-1)

    return rows


_ROTATED = {"blk.{}.attn_q": _adjacent("num_attention_heads"), "blk.{}.attn_k": _adjacent("num_key_value_heads")}


def _by_kind(entries: Entries) -> Tensor:
    """Row order with all queries first, then all keys, then all values; GPT-NeoX groups the three by head."""
    heads = entries["num_attention_heads"]
    width = entries["hidden_size"] // heads
    return torch.arange(3 * heads * width).view(heads, 3, width).transpose(0, 1).reshape(-1)


# -- architectures -----------------------------------------------------------------------------------------------------

_SILU = ("silu", "swish")
_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_ALL = (
    Architecture(
        "llama",
        ("llama", "mistral"),
        _COMMON,
        _LLAMA,
        fixed={"hidden_act": _SILU},
        ignored=("pretraining_tp",),
        present={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        rows=_ROTATED,
    ),
    Architecture(
        "qwen2",
        ("qwen2",),
        _COMMON,
        _LLAMA,
        fixed={"hidden_act": _SILU, "use_sliding_window": (False,)},
        ignored=("sliding_window", "max_window_layers", "layer_types"),
        head_dim=False,
    ),
    Architecture(
        "qwen3",
        ("qwen3",),
        _COMMON,
        _LLAMA | _blocks("model.layers", **_HEAD_NORMS),
        fixed={"hidden_act": _SILU, "use_sliding_window": (False,), "attention_bias": (False,)},
        ignored=("sliding_window", "max_window_layers", "layer_types"),
    ),
    Architecture(
        "gemma",
        ("gemma",),
        _COMMON,
        _LLAMA,
        fixed={
            "hidden_act": _TANH,
            "attention_bias": (False,),
            "use_bidirectional_attention": (None, False),
            "tie_word_embeddings": (True,),
        },
        plus_one=("output_norm", "blk.{}.attn_norm", "blk.{}.ffn_norm"),
    ),
    Architecture(
        "gemma2",
        ("gemma2",),
        (
            *_COMMON,
            Key("attention.sliding_window", "sliding_window", default=4096),
            Key("attn_logit_softcapping", "attn_logit_softcapping", "number", default=50.0),
            Key("final_logit_softcapping", "final_logit_softcapping", "number", default=30.0),
        ),
        _OUTER | _blocks("model.layers", **_ATTENTION, **_GATED, **_NORMS_AROUND),
        fixed={
            "hidden_activation": _TANH,
            "attention_bias": (False,),
            "use_bidirectional_attention": (None, False),
            "tie_word_embeddings": (True,),
        },
        plus_one=("output_norm", *(f"blk.{{}}.{norm}" for norm in _NORMS_AROUND)),
        period=2,
        query_scale=46,
    ),
    Architecture(
        "gemma3",
        ("gemma3_text",),
        (*_COMMON, Key("attention.sliding_window", "sliding_window")),
        _OUTER | _blocks("model.layers", **_ATTENTION, **_GATED, **_NORMS_AROUND, **_HEAD_NORMS),
        fixed={
            "hidden_activation": _TANH,
            "attention_bias": (False,),
            "use_bidirectional_attention": (False, None),
            "final_logit_softcapping": (None,),
            "attn_logit_softcapping": (None,),
            "tie_word_embeddings": (True,),
        },
        ignored=("_sliding_window_pattern",),
        plus_one=("output_norm", *(f"blk.{{}}.{norm}" for norm in (*_NORMS_AROUND, *_HEAD_NORMS))),
        period=6,
        query_scale=62,
        local_rope=True,
    ),
    Architecture(
        "phi3",
        ("phi3",),
        (*_COMMON, Key("attention.sliding_window", "sliding_window", optional=True)),
        _OUTER
        | _blocks(
            "model.layers",
            attn_qkv="self_attn.qkv_proj",
            attn_output="self_attn.o_proj",
            ffn_up="mlp.gate_up_proj",
            ffn_down="mlp.down_proj",
            **_NORMS_BEFORE,
        ),
        fixed={"hidden_act": _SILU},
        ignored=("original_max_position_embeddings",),
        head_dim=False,
    ),
    Architecture(
        "gpt2",
        ("gpt2",),
        (*_SIZES, _HIDDEN, _LAYER_NORM),
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        }
        | _blocks(
            "transformer.h",
            attn_norm="ln_1",
            attn_qkv="attn.c_attn",
            attn_output="attn.c_proj",
            ffn_norm="ln_2",
            ffn_up="mlp.c_fc",
            ffn_down="mlp.c_proj",
        ),
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        ignored=(
            "reorder_and_upcast_attn",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "n_ctx",
        ),
        head_dim=False,
        rope=False,
        names={
            "max_position_embeddings": "n_positions",
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "layer_norm_eps": "layer_norm_epsilon",
        },
    ),
    Architecture(
        "olmo2",
        ("olmo2",),
        _COMMON,
        _OUTER
        | _blocks(
            "model.layers",
            **_ATTENTION,
            **_GATED,
            **_HEAD_NORMS,
            post_attention_norm="post_attention_layernorm",
            post_ffw_norm="post_feedforward_layernorm",
        ),
        fixed={"hidden_act": _SILU, "attention_bias": (False,)},
        head_dim=False,
    ),
    Architecture(
        "starcoder2",
        ("starcoder2",),
        (*_SIZES, _HIDDEN, _GROUPS, _LAYER_NORM),
        _OUTER | _blocks("model.layers", **_ATTENTION, **_NORMS_BEFORE, ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"),
        fixed={"hidden_act": _TANH},
        present={"use_bias": "blk.0.attn_q.bias"},
        head_dim=False,
        names={"layer_norm_eps": "norm_epsilon"},
    ),
    Architecture(
        "granite",
        ("granite",),
        (
            *_COMMON,
            Key("attention.scale", "attention_multiplier", "number"),
            Key("embedding_scale", "embedding_multiplier", "number"),
            Key("residual_scale", "residual_multiplier", "number"),
            Key("logit_scale", "logits_scaling", "number"),
        ),
        _LLAMA,
        fixed={"hidden_act": _SILU},
        present={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        rows=_ROTATED,
        head_dim=False,
    ),
    Architecture(
        "stablelm",
        ("stablelm",),
        (*_SIZES, _HIDDEN, _GROUPS, _LAYER_NORM),
        _LLAMA,
        fixed={"hidden_act": _SILU, "qk_layernorm": (False,)},
        unused=("use_parallel_residual",),
        present={"use_qkv_bias": "blk.0.attn_q.bias", "use_parallel_residual": "!blk.0.ffn_norm.weight"},
        head_dim=False,
    ),
    Architecture(
        "gptneox",
        ("gpt_neox",),
        (
            *_SIZES,
            _HIDDEN,
            _LAYER_NORM,
            Key("use_parallel_residual", "use_parallel_residual", "flag", default=True),
        ),
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"}
        | _blocks(
            "gpt_neox.layers",
            attn_norm="input_layernorm",
            ffn_norm="post_attention_layernorm",
            attn_qkv="attention.query_key_value",
            attn_output="attention.dense",
            ffn_up="mlp.dense_h_to_4h",
            ffn_down="mlp.dense_4h_to_h",
        ),
        fixed={"hidden_act": ("gelu", *_TANH), "is_decoder": (False,)},
        present={"attention_bias": "blk.0.attn_qkv.bias"},
        rows={"blk.{}.attn_qkv": _by_kind},
        head_dim=False,
        untied_head=True,
    ),
    Architecture(
        "falcon",
        ("falcon",),
        (*_SIZES, _HIDDEN, _LAYER_NORM),
        {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"}
        | _blocks(
            "transformer.h",
            attn_norm="input_layernorm",
            attn_qkv="self_attention.query_key_value",
            attn_output="self_attention.dense",
            ffn_up="mlp.dense_h_to_4h",
            ffn_down="mlp.dense_4h_to_h",
        ),
        fixed={
            "alibi": (False,),
            "new_decoder_architecture": (False,),
            "multi_query": (True,),
            "parallel_attn": (True,),
            "bias": (False,),
            "activation": ("gelu",),
            "num_ln_in_parallel_attn": (None, 1),
        },
        ignored=("num_kv_heads",),
        constants={"attention.head_count_kv": 1},
        head_dim=False,
        names={"layer_norm_eps": "layer_norm_epsilon", "intermediate_size": "ffn_hidden_size"},
    ),
    Architecture(
        "smollm3",
        ("smollm3",),
        _COMMON,
        _LLAMA,
        fixed={
            "hidden_act": _SILU,
            "use_sliding_window": (False,),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "no_rope_layer_interval": (4,),
        },
        ignored=("sliding_window", "layer_types", "no_rope_layers", "max_window_layers"),
        rows=_ROTATED,
        head_dim=False,
    ),
    Architecture(
        "cohere2",
        ("cohere2",),
        (
            *_SIZES,
            _HIDDEN,
            _GROUPS,
            _LAYER_NORM,
            Key("attention.sliding_window", "sliding_window"),
            Key("logit_scale", "logit_scale", "number"),
        ),
        _OUTER | _blocks("model.layers", **_ATTENTION, **_GATED, attn_norm="input_layernorm"),
        fixed={"hidden_act": _SILU, "attention_bias": (False,), "tie_word_embeddings": (True,)},
        period=4,
    ),
    Architecture(
        "arcee",
        ("arcee",),
        _COMMON,
        _OUTER | _blocks("model.layers", **_ATTENTION, **_NORMS_BEFORE, ffn_up="mlp.up_proj", ffn_down="mlp.down_proj"),
        fixed={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
        rows=_ROTATED,
    ),
    Architecture(
        "phi2",
        ("phi",),
        (*_SIZES, _HIDDEN, _GROUPS, _LAYER_NORM),
        {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
        | _blocks(
            "model.layers",
            attn_norm="input_layernorm",
            attn_q="self_attn.q_proj",
            attn_k="self_attn.k_proj",
            attn_v="self_attn.v_proj",
            attn_output="self_attn.dense",
            ffn_up="mlp.fc1",
            ffn_down="mlp.fc2",
        ),
        fixed={"hidden_act": ("gelu_new", "gelu_pytorch_tanh"), "qk_layernorm": (False,)},
        head_dim=False,
    ),
)
ARCHITECTURES: Mapping[str, Architecture] = {architecture.name: architecture for architecture in _ALL}
"""Architectures by their name in GGUF files."""
WRITTEN: Mapping[str, Architecture] = {kind: architecture for architecture in _ALL for kind in architecture.model_types}
"""Maps a model type of transformers to the architecture in which a GGUF file of such a model is written."""
