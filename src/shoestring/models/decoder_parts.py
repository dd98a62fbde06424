"""Finds the parts of a decoder-only model among its modules, for `decoder_layers`, which passes them to native code.

The package's own `GPT` is supported, and so are models of transformers that belong to one of `FAMILIES`. The layers of
these families are Llama's, or differ from them only in ways that the fields of `Layer` describe. The kinds of norms and
activations are found by calling them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.models import hf
from shoestring.models.gpt import GPT, MLP, Attention, Block, rotary_table
from shoestring.models.hf_cache import RaggedPasses

FAMILIES = frozenset(
    [
        "llama",
        "mistral",
        "ministral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma",
        "gemma3_text",
        "granite",
        "olmo2",
        "olmo3",
        "smollm3",
        "exaone4",
        "seed_oss",
    ]
)
"""Model families (`model_type` in transformers) that `Layer` can describe; `behaviour` also tests native code on each
model."""
_KNOWN_CODE = ("torch.nn.", "transformers.", "shoestring.")
"""Prefixes of the Python modules whose classes may occur in a supported model; other classes may compute anything."""
_STATIC = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions whose angles do not depend on the length of a text."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: x · (weight + offset) / sqrt(mean(x²) + eps)."""

    module: nn.Module
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Layer:
    """The modules of a layer: y = x + Out(Attention(norm(x))), and then y + Down(act(Gate(norm(y))) · Up(norm(y))).

    Norms are None where the layer has none.
    """

    attention: nn.Module
    mlp: nn.Module
    qkv: Sequence[nn.Module]
    """The linear layers of queries, keys and values, in this order; or a single layer for all three."""
    out: nn.Module
    gate_up: Sequence[nn.Module]
    """The linear layers Gate and Up, in this order; or a single layer for both."""
    down: nn.Module
    attention_norm: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    attention_end: Norm | None = None
    """The norm of attention's output, applied before the output is added to the residual stream."""
    mlp_norm: Norm | None = None
    mlp_end: Norm | None = None
    window: int | None = None
    """Maximum number of positions that a token attends to; None for no limit."""
    rotation: str | None = ""
    """Name of the layer's table of angles; None for a layer without rotation."""


@dataclass(frozen=True)
class Decoder:
    """A decoder whose layers native code can run.

    Shapes: C model width, H query heads, K key/value heads, D width of a head, F width of the feed-forward layer.
    """

    layers: Sequence[Layer]
    blocks: Sequence[nn.Module]
    """The module of each layer."""
    around: Sequence[nn.Module]
    """The modules that contain `blocks`, the model first."""
    holder: nn.Module
    """The module list that contains `blocks`."""
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    embed: nn.Module
    """Maps tokens (B, T) to the residual stream (B, T, C)."""
    head: Callable[[Tensor], Tensor]
    """Maps the residual stream to logits."""
    angles: Callable[[str, Tensor], tuple[Tensor, Tensor]]
    """Maps the name of a table and positions (S,) to cosines and sines, (S, R / 2) each, in float32. Entries i and i +
    R / 2 of a head are rotated as a pair, for i < R / 2."""
    scale: float
    """Factor by which attention scores are multiplied."""
    tanh_gelu: bool = False
    """Whether the gate's activation is GELU approximated by tanh; otherwise it is SiLU."""
    norm_whole: bool = False
    """Whether the norms of queries and keys are computed over all heads together rather than head by head."""


def find(model: nn.Module) -> Decoder | None:
    """Find the parts of a model; None if the model is not supported."""
    if type(model) is GPT:
        # Every block must consist of the package's own classes, none of which has been replaced.
        names = ("attention", "mlp", "attention_norm", "mlp_norm")
        kinds = ([type(block), *(type(block.get_submodule(name)) for name in names)] for block in model.blocks)
        are_own = all(block_kinds == [Block, Attention, MLP, nn.RMSNorm, nn.RMSNorm] for block_kinds in kinds)
        return _of_gpt(model) if are_own else None
    family = getattr(getattr(model, "config", None), "model_type", None)
    if not hf.is_pretrained(model) or family not in FAMILIES:
        return None
    try:
        return _of_transformers(model)
    except (AttributeError, _OtherFormError):  # some releases of transformers name modules differently
        return None


def _of_gpt(model: GPT) -> Decoder:
    config: Any = model.config

    def layer(block: Any) -> Layer:
        return Layer(
            attention=block.attention,
            mlp=block.mlp,
            qkv=[block.attention.qkv],
            out=block.attention.out,
            gate_up=[block.mlp.gate_up],
            down=block.mlp.down,
            attention_norm=Norm(block.attention_norm, config.norm_eps),
            mlp_norm=Norm(block.mlp_norm, config.norm_eps),
        )

    def head(x: Tensor) -> Tensor:
        x = model.norm(x)
        return model.embed.logits(x) if model.head is None else model.head(x)

    return Decoder(
        layers=[layer(block) for block in model.blocks],
        blocks=list(model.blocks),
        around=[model],
        holder=model.blocks,
        width=config.dim,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_width=config.head_dim,
        hidden=config.hidden,
        embed=model.embed,
        head=head,
        angles=lambda _, positions: rotary_table(config, positions),
        scale=config.head_dim**-0.5,
    )


# -- models of transformers --------------------------------------------------------------------------------------------


class _OtherFormError(Exception):
    """`Layer` cannot describe the layers of a model."""


def _of_transformers(model: Any) -> Decoder:
    config, inner, passes = model.config, model.model, RaggedPasses(model, "", 0)
    blocks, rotary = list(inner.layers), inner.rotary_emb
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
    modules = [module for block in blocks for module in block.modules()]
    if not all(type(module).__module__.startswith(_KNOWN_CODE) for module in modules):
        raise _OtherFormError
    if not blocks or not set(kinds.values()) <= _STATIC or getattr(config, "attn_logit_softcapping", None):
        raise _OtherFormError
    of_layers = passes.kinds or [""] * len(blocks)
    first = blocks[0]
    head_width = first.self_attn.head_dim
    q_norm = getattr(first.self_attn, "q_norm", None)
    last_norm, head = inner.norm, model.lm_head

    def layer(block: Any, kind: str) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        fused = hasattr(attention, "qkv_proj")
        sandwich = hasattr(block, "pre_feedforward_layernorm")
        ends = hasattr(block, "post_feedforward_layernorm")
        rotates = bool(getattr(attention, "use_rope", True))
        if config.model_type == "exaone4":  # if some layers have windows, only these rotate
            rotates = attention.sliding_window is None or attention.is_sliding
        return Layer(
            attention=attention,
            mlp=mlp,
            qkv=[attention.qkv_proj] if fused else [attention.q_proj, attention.k_proj, attention.v_proj],
            out=attention.o_proj,
            gate_up=[mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj],
            down=mlp.down_proj,
            attention_norm=_norm(getattr(block, "input_layernorm", None)),
            q_norm=_norm(getattr(attention, "q_norm", None)),
            k_norm=_norm(getattr(attention, "k_norm", None)),
            attention_end=_norm(block.post_attention_layernorm) if ends else None,
            mlp_norm=_norm(
                block.pre_feedforward_layernorm if sandwich else None if ends else block.post_attention_layernorm
            ),
            mlp_end=_norm(block.post_feedforward_layernorm) if ends else None,
            window=passes.window_of(kind),
            rotation=(kind if kind in kinds else "") if rotates else None,
        )

    return Decoder(
        layers=[layer(block, kind) for block, kind in zip(blocks, of_layers, strict=True)],
        blocks=blocks,
        around=[model, inner],
        holder=inner.layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_width=head_width,
        hidden=config.intermediate_size,
        embed=inner.embed_tokens,
        head=lambda x: head(last_norm(x)),
        angles=partial(_angles, rotary),
        scale=first.self_attn.scaling,
        tanh_gelu=_is_tanh_gelu(getattr(first.mlp, "act_fn", None) or first.mlp.activation_fn),
        norm_whole=q_norm is not None and q_norm.weight.numel() != head_width,
    )


def _angles(rotary: nn.Module, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
    own = {"layer_type": name} if name and "layer_type" in inspect.signature(rotary.forward).parameters else {}
    tables = rotary(torch.empty(0, dtype=torch.float32, device=positions.device), positions[None], **own)
    halves = [table[0].float().chunk(2, -1) for table in tables]
    if not all(torch.equal(*pair) for pair in halves):
        raise _OtherFormError
    return halves[0][0].contiguous(), halves[1][0].contiguous()


@torch.no_grad()
def _norm(module: Any) -> Norm | None:
    """Describe an RMSNorm; a test call finds its offset, because some families store the weight minus 1."""
    if module is None:
        return None
    eps = getattr(module, "variance_epsilon", None) or module.eps
    weight = module.weight
    returned = module(torch.full_like(weight, 1e3)[None])[0].float()
    for offset in (0.0, 1.0):
        if torch.allclose(returned, weight.float() + offset, rtol=1e-2, atol=1e-3):
            return Norm(module, eps, offset)
    raise _OtherFormError


@torch.no_grad()
def _is_tanh_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether an activation is GELU approximated by tanh; False for SiLU, _OtherFormError for any other activation."""
    x = torch.linspace(-4, 4, 65)
    y = activation(x)
    if torch.allclose(y, F.gelu(x, approximate="tanh"), atol=1e-5):
        return True
    if torch.allclose(y, F.silu(x), atol=1e-5):
        return False
    raise _OtherFormError
