"""Tiny causal models of most families of transformers, with random weights, for everything promised for all models.

Windows, switches of rope and the steps of recurrent layers are so small that a text of 40 tokens crosses each. What
differs within a family and changes a text (windows, tied heads, kinds of positions, biases) is a case of its own.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shoestring.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CONTEXT = 128
"""Tokens that every model reads at least."""
VOCABULARY = 288
"""The 256 bytes, the end, and some that no tokenizer has."""
END = 256
"""The token that ends a text, as in the tokenizer of bytes."""

_WINDOW = 16
_SWITCH = 24
"""Tokens after which models that change their rope with the length do so."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "initializer_range": 0.15,  # at the usual 0.02, so small a model repeats one token whatever it reads
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": _WINDOW,
}
"""Settings of every model whose configuration has them."""

_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LATENT |= {"num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_expand": 2}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": _SWITCH},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": _SWITCH},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _SWITCH,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": _SWITCH,
    },
}


def _rope(kind: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **_ROPES[kind]}}


_FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "afmoe": {"": {"num_dense_layers": 1, **_SLIDING_AND_FULL}},
    "apertus": {"": {}},
    "arcee": {"": {}},
    "bamba": {"": {"attn_layer_indices": [1], **_MAMBA}},
    "biogpt": {"": {}},
    "bloom": {"": {}, "untied": {"tie_word_embeddings": False}},
    "codegen": {"": {"rotary_dim": 4}},
    "cohere": {"": {"logit_scale": 1.0}, "query norms": {"logit_scale": 1.0, "use_qk_norm": True}},
    "cohere2": {"": {"logit_scale": 1.0, **_SLIDING_AND_FULL}},
    "ctrl": {"": {"dff": 64}},
    "dbrx": {
        "": {
            "d_model": 32,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        }
    },
    "deepseek_v2": {"": {"first_k_dense_replace": 1, "n_shared_experts": 1, **_LATENT}},
    "deepseek_v3": {
        "": {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, **_LATENT},
        "whole queries": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **_LATENT, "q_lora_rank": None},
    },
    "diffllama": {"": {}},
    "dots1": {"": {"n_shared_experts": 1, "first_k_dense_replace": 1, **_SLIDING_AND_FULL}},
    "ernie4_5": {"": {}},
    "ernie4_5_moe": {"": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}},
    "exaone4": {"": {"num_hidden_layers": 2, **_SLIDING_AND_FULL}},
    "falcon": {
        "one key": {"multi_query": True},
        "alibi": {"alibi": True, "multi_query": False, "bias": True},
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "sequential": {"parallel_attn": False, "multi_query": True},
    },
    "falcon_h1": {"": {"mamba_d_ssm": 64, **_MAMBA}},
    "falcon_mamba": {"": {"state_size": 8}},
    "flex_olmo": {"": {}},
    "fuyu": {
        "": {
            "patch_size": 2,
            "text_config": {
                "model_type": "persimmon",
                **{
                    name: _COMMON[name]
                    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
                },
                **{name: _COMMON[name] for name in ("num_attention_heads", "max_position_embeddings", "eos_token_id")},
                "initializer_range": 0.15,
            },
        }
    },
    "gemma": {"": {}},
    "gemma2": {"": {"query_pre_attn_scalar": 8, **_SLIDING_AND_FULL}},
    "gemma3_text": {"": {"query_pre_attn_scalar": 8, **_SLIDING_AND_FULL}},
    "gemma3n_text": {
        "": {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        }
    },
    "gemma4_text": {"": {"hidden_size_per_layer_input": 8, **_SLIDING_AND_FULL, "per_layer_config": {}}},
    "glm": {"": {}},
    "glm4": {"": {}},
    "glm4_moe": {"": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}},
    "gpt2": {"": {}, "untied": {"tie_word_embeddings": False}, "scaled": {"scale_attn_by_inverse_layer_idx": True}},
    "gpt_bigcode": {"": {}, "all keys": {"multi_query": False}},
    "gpt_neo": {"": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": _WINDOW}},
    "gpt_neox": {"": {}, "sequential": {"use_parallel_residual": False, "rotary_pct": 1.0}},
    "gpt_oss": {"": {**_SLIDING_AND_FULL}},
    "gptj": {"": {"rotary_dim": 4}},
    "granite": {"": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}},
    "granitemoe": {"": {}},
    "granitemoehybrid": {"": {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"], **_MAMBA}},
    "granitemoeshared": {"": {"shared_intermediate_size": 32}},
    "helium": {"": {}},
    "hunyuan_v1_dense": {"": {}},
    "hunyuan_v1_moe": {"": {"moe_topk": 2}},
    "jamba": {"": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}},
    "jetmoe": {"": {"kv_channels": 8}},
    "lfm2": {"": {"layer_types": ["conv", "full_attention"]}},
    "llama": {
        "": {},
        "one key": {"num_key_value_heads": 1},
        "tied": {"tie_word_embeddings": True},
        "biased": {"attention_bias": True, "mlp_bias": True},
        "wide heads": {"head_dim": 16, "num_key_value_heads": 4},
        **{kind: _rope(kind) for kind in ("linear", "dynamic", "yarn", "llama3")},
    },
    "llama4_text": {
        "": {
            "intermediate_size_mlp": 64,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": _WINDOW,
            "interleave_moe_layer_step": 2,
            "floor_scale": 8,
            "num_experts_per_tok": 1,
        }
    },
    "mamba": {"": {"state_size": 8}},
    "mamba2": {"": {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}},
    "minimax": {"": {**_LINEAR_AND_FULL, "block_size": _WINDOW}},
    "ministral": {"": {**_SLIDING_AND_FULL}},
    "mistral": {"": {}, "whole": {"sliding_window": None}},
    "mixtral": {"": {"sliding_window": None}, "sliding": {}},
    "modernbert-decoder": {"": {"local_attention": _WINDOW, **_SLIDING_AND_FULL}},
    "mpt": {"": {}},
    "nemotron": {"": {}},
    "nemotron_h": {
        "": {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 32,
            "mamba_ssm_cache_dtype": "float64",
        }
    },
    "olmo": {"": {"clip_qkv": 8.0}},
    "olmo2": {"": {}},
    "olmo3": {"": {**_SLIDING_AND_FULL}},
    "olmoe": {"": {}},
    "openai-gpt": {"": {}},
    "opt": {
        "": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.15},
        "projected": {"ffn_dim": 64, "word_embed_proj_dim": 16, "init_std": 0.15},
    },
    "persimmon": {"": {}},
    "phi": {"": {}},
    "phi3": {
        "": {"sliding_window": None},
        "sliding": {},
        "longrope": {"original_max_position_embeddings": _SWITCH, "sliding_window": None, **_rope("longrope")},
    },
    "phimoe": {"": {"sliding_window": None}},
    "qwen2": {
        "": {"use_sliding_window": False},
        "sliding": {"use_sliding_window": True, "max_window_layers": 1},
        "tied": {"use_sliding_window": False, "tie_word_embeddings": True},
    },
    "qwen2_moe": {"": {"decoder_sparse_step": 2}},
    "qwen3": {"": {}, "tied": {"tie_word_embeddings": True}},
    "qwen3_5_text": {"": {**_DELTA, **_LINEAR_AND_FULL}},
    "qwen3_moe": {"": {}},
    "qwen3_next": {"": {**_DELTA, **_LINEAR_AND_FULL}},
    "recurrent_gemma": {
        "": {
            "num_hidden_layers": 3,
            "lru_width": 32,
            "attention_window_size": _WINDOW,
            "w_init_variance_scale": 1.0,
            "final_w_init_variance_scale": 1.0,
        }
    },
    "rwkv": {"": {"attention_hidden_size": 32, "context_length": CONTEXT}},
    "seed_oss": {"": {}},
    "smollm3": {"": {"no_rope_layers": [1, 0]}},
    "stablelm": {"": {}, "parallel": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}},
    "starcoder2": {"": {"sliding_window": None}, "sliding": {}},
    "vaultgemma": {"": {"query_pre_attn_scalar": 8, **_SLIDING_AND_FULL}},
    "xglm": {"": {"ffn_dim": 64, "init_std": 0.15, "pad_token_id": 1}},
    "zamba2": {
        "": {
            "layers_block_type": ["linear_attention", "hybrid"],
            "hybrid_layer_ids": [1],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 16,
            "adapter_rank": 4,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_key_value_heads": 4,
        }
    },
}
"""Settings of each case, by family and by what tells it from the family's plain one."""


def _config(family: str, settings: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of a case.

    Raises:
        ConfigError: the installed transformers has no such family.
    """
    configurations: Mapping[str, Any] = importlib.import_module("transformers").CONFIG_MAPPING
    if family not in configurations:
        raise ConfigError(f"this release of transformers has no `{family}`")
    make = configurations[family]
    names = set(make().to_dict()) | set(getattr(make, "attribute_map", ()))
    common = {name: value for name, value in _COMMON.items() if name in names}
    return make(**copy.deepcopy({**common, **settings}))


CASES: dict[str, Callable[[], PretrainedConfig]] = {
    f"{family}, {variant}" if variant else family: partial(_config, family, settings)
    for family, variants in _FAMILIES.items()
    for variant, settings in variants.items()
}
"""Configuration of each case, by "family" or "family, variant"."""


def family(name: str) -> str:
    """The family of a case, which is its `model_type`."""
    return name.partition(",")[0]


def missing() -> dict[str, str]:
    """Cases that the installed transformers cannot build, each with the reason."""
    configurations = importlib.import_module("transformers").CONFIG_MAPPING
    return {name: "not in this release" for name in CASES if family(name) not in configurations}


FLOAT32_ONLY = {"xglm"}
"""Families that transformers itself cannot compute in float64."""


@torch.no_grad()
def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The model of a case in evaluation mode; the global generator is left as it was.

    Biases and the weights of norms are drawn too: one that is lost or added twice shows only where it is not 0 or 1.
    Embeddings are made small: with tied heads the model would repeat the last token whatever it reads.

    Args:
        dtype: that of the weights; float32 in place of float64 for a family in `FLOAT32_ONLY`.

    Raises:
        ConfigError: the installed transformers has no such family.
    """
    config: Any = CASES[name]()
    config._experts_implementation = "eager"  # the others multiply no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = importlib.import_module("transformers").AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            if parameter.dim() < 2 or spread == 0:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif spread < 0.05:
                parameter.normal_(0, _COMMON["initializer_range"])
        model.get_input_embeddings().weight.mul_(0.2)
    if dtype == torch.float64 and family(name) in FLOAT32_ONLY:
        dtype = torch.float32
    return model.to(dtype).eval()
