"""A decoder-only transformer in the Llama layout: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes in comments: B sequences, T tokens in each, S positions attended to, V tokens in the vocabulary, C model width
(`dim`), H query heads, K key/value heads, D width of a head (C / H), F width of the feed-forward layer, L blocks.

Sources: Llama (Touvron et al., 2023), rotary positions (Su et al., 2021), grouped-query attention (Ainslie et al.,
2023), SwiGLU (Shazeer, 2020).
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.errors import ConfigError, nearest
from shoestring.models import skinny
from shoestring.models.cache import CachePlace, KVCache


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a `GPT`.

    Raises:
        ConfigError: a size is not a positive integer, or not a multiple of another size as stated below.
    """

    vocab_size: int
    """Number of tokens in the vocabulary."""
    dim: int
    """Model width; a multiple of `heads`."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Query heads; a multiple of `kv_heads`."""
    kv_heads: int
    """Key/value heads: equal to `heads` for multi-head attention, 1 for multi-query attention."""
    hidden: int
    """Width of the feed-forward layer."""
    context: int
    """Maximum length of a sequence, in tokens."""
    tied: bool = True
    """Whether the output layer shares the embedding's weight."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Constant ε that RMSNorm adds to the mean square."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 L) for layers that write to the residual stream."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"GPTConfig.{name} is {reprlib.repr(value)}", hint="give a positive integer")
        for name in ("rope_theta", "norm_eps", "init_std"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"GPTConfig.{name} is {reprlib.repr(value)}", hint="give a positive number")
        if self.dim % self.heads:
            raise ConfigError(f"GPTConfig.dim = {self.dim} is not a multiple of heads = {self.heads}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"GPTConfig.heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(
                f"GPTConfig.dim / heads = {self.head_dim} is odd", hint="rotary positions need an even width of a head"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head (D)."""
        return self.dim // self.heads

    @property
    def matmul_parameters(self) -> int:
        """Number of weights used in matrix products: all except the weights of norms and of the embedding's look-up."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.dim * self.hidden) + self.vocab_size * self.dim


class Linear(nn.Linear):
    """A linear layer without bias, whose weight is initialised only in `reset_parameters`.

    As a result, a model built on `meta` and initialised later gets the same weights as a model built directly.
    """

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        _normal(self.weight, self.std)


class Embedding(nn.Embedding):
    """An embedding whose weight is initialised from a normal distribution, like the weight of `Linear`."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        _normal(self.weight, self.std)

    def logits(self, x: Tensor) -> Tensor:
        """Use the embedding's weight as the output layer: hidden states (…, C) to logits (…, V)."""
        return F.linear(x, self.weight)


def _normal(weight: Tensor, std: float) -> None:
    if not weight.is_meta:  # on `meta`, torch would import its compiler, which takes a second, without any effect
        nn.init.normal_(weight, std=std)


def rotary_table(config: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (…, T, D/2) each, of the angles position · theta^(-2i / D), in float32.

    The table is computed in every forward pass because the cost is negligible, whereas a buffer would be lost on `meta`
    and rounded by casts of the model.

    Args:
        positions: (…, T).
    """
    even = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (even / config.head_dim)
    angle = positions.float()[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of (B, T, heads, D) by its angle: Llama's "rotate half" convention."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = (table.unsqueeze(-2).to(heads.dtype) for table in (cos, sin))  # (T, 1, D/2) or (B, T, 1, D/2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Past:
    """Attention to a cache, shared by the layers of one pass: the cache, the tokens' places in it, and the mask."""

    def __init__(self, cache: KVCache, place: CachePlace) -> None:
        self.cache, self.place = cache, place
        count = place.positions.shape[1]
        # Most passes need no mask tensor: a prompt uses plain causal attention, a single token sees all positions.
        if place.aligned and count == place.end:
            self.seen: dict[str, Any] = {"is_causal": True}
        elif place.aligned and count == 1:
            self.seen = {}
        else:
            self.seen = {"attn_mask": place.mask()}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of queries (B, T, H, D) to the cache, after `k` and `v` (B, K, T, D) have been appended to the
        cache."""
        k, v = self.cache.append(layer, k, v, self.place)
        mixed = skinny.attention(q, k, v, self.place.positions)
        if mixed is None:
            q, grouped = q.transpose(1, 2), q.shape[2] > k.shape[1]
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **self.seen).transpose(1, 2)
        return mixed


class Packed:
    """Attention within packed sequences, in which each token attends only to its own text; all layers of a pass share
    the mask.

    Args:
        positions: (B, T), position of each token in its own text; a new text begins where the position does not
            increase by one.
        mask: (B, 1, T, T) bool, whether a token (third dimension) attends to another token (fourth); computed from
            `positions` by default.
    """

    def __init__(self, positions: Tensor, mask: Tensor | None = None) -> None:
        if mask is None:
            begins = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
            text, count = begins.cumsum(1), positions.shape[1]
            earlier = torch.ones(count, count, dtype=torch.bool, device=positions.device).tril()
            mask = ((text[:, :, None] == text[:, None]) & earlier)[:, None]
        self.mask = mask

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of each token to the tokens of its own text up to itself; shapes as for `Past.attend`."""
        q, grouped = q.transpose(1, 2), q.shape[2] > k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=grouped).transpose(1, 2)


def _whole(layer: nn.Module, y: Tensor) -> Tensor:
    """Check that the output of a fused layer contains all of its projections (such as queries, keys and values), and
    return it.

    Raises:
        ConfigError: the output is only a shard, as with torch's ColwiseParallel, so splitting it would mix the
            projections.
    """
    outputs = getattr(layer, "out_features", None)
    if isinstance(y, Tensor) and y.shape[-1] != (outputs or y.shape[-1]):  # torch.fx traces without tensors
        raise ConfigError(
            f"a rank has {y.shape[-1]} of the {outputs} outputs of a fused layer (queries, keys, values or gate, up)",
            hint="a contiguous split mixes them: use a model without fused layers, or parallel.FSDP()",
        )
    return y


class Attention(nn.Module):
    """Causal self-attention whose query heads share key/value heads in groups of H / K."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.layer = config.heads, config.kv_heads, config.head_dim, layer
        self.qkv = Linear(config.dim, (config.heads + 2 * config.kv_heads) * config.head_dim, config.init_std)
        self.out = Linear(config.dim, config.dim, config.init_std / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | Packed | None = None) -> Tensor:
        B, T, _ = x.shape
        heads = _whole(self.qkv, self.qkv(x)).view(B, T, self.heads + 2 * self.kv_heads, self.head_dim)
        turned = rotate(heads[:, :, : self.heads + self.kv_heads], cos, sin)
        q, k = turned.split([self.heads, self.kv_heads], dim=2)  # (B, T, H, D), (B, T, K, D)
        k, v = k.transpose(1, 2), heads[:, :, self.heads + self.kv_heads :].transpose(1, 2)  # (B, K, T, D)
        if past is None:
            grouped = self.heads > self.kv_heads
            mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=grouped, is_causal=True)
            mixed = mixed.transpose(1, 2)
        else:
            mixed = past.attend(self.layer, q, k, v)
        return self.out(mixed.reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.hidden, config.init_std)
        self.down = Linear(config.hidden, config.dim, config.init_std / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = _whole(self.gate_up, self.gate_up(x)).chunk(2, dim=-1)  # B T F
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm block: attention and feed-forward, each with a residual connection: (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | Packed | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, past)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only language model. The modules in `blocks` are the units of activation checkpointing, sharding and
    compilation.

    Weights are drawn from torch's global generator. For a model built on `meta`, call `model.to_empty(device=...)`,
    then `model.reset_parameters()`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.dim, config.init_std)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        # Tied weights are one parameter under one name, because to_empty and sharding would split two names.
        self.head = None if config.tied else Linear(config.dim, config.vocab_size, config.init_std)

    def reset_parameters(self) -> None:
        """Initialise every weight again, in the order of construction."""
        for module in self.modules():
            if isinstance(module, Linear | Embedding | nn.RMSNorm):
                module.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        place: CachePlace | None = None,
        *,
        last: int | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute next-token logits (B, T, V) for `tokens` (B, T), int64.

        With a `cache`, the tokens continue the sequence in the cache and are added to the cache.

        Args:
            place: places of the tokens in the cache, for rows of different lengths; the caller then calls `lengthen`.
            last: number of last tokens whose logits are computed; defaults to all.
            position_ids: (B, T), position of each token in its own text, for sequences of several texts that do not
                attend to each other; only without a cache.
            attention_mask: (B, 1, T, T) bool, the tokens that each token attends to, for texts that share a beginning;
                only with `position_ids`.

        Raises:
            ConfigError: there are more tokens than the context allows, or than the cache has room for.
        """
        count = tokens.shape[1]
        own = cache is not None and place is None
        if cache is not None and place is None:
            place = cache.place(count, tokens.device)
        end = count if place is None else place.end
        if end > self.config.context:
            raise ConfigError(
                f"{end} tokens exceed the model's context of {self.config.context}",
                hint="shorten the sequence or build the model with a larger `context`",
            )
        past = Past(cache, place) if cache is not None and place is not None else None
        positions = torch.arange(count, device=tokens.device) if place is None else place.positions
        if position_ids is not None:
            past, positions = Packed(position_ids, attention_mask), position_ids
        cos, sin = rotary_table(self.config, positions)
        x = self.embed(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x, cos, sin, past)
        if cache is not None and place is not None and own:
            cache.lengthen(count, place)
        x = self.norm(x if last is None else x[:, -last:])
        return self.embed.logits(x) if self.head is None else self.head(x)

    def flops_per_token(self, sequence: int) -> int:
        """FLOPs of forward and backward per trained token: 6 N + 12 L C T (Chowdhery et al., 2022, appendix B).

        N counts the weights of matrix products (not the embedding's look-up), T is `sequence`. The FLOPs of the masked
        half of attention are included.
        """
        return 6 * self.config.matmul_parameters + 12 * self.config.layers * self.config.dim * sequence


def _preset(shape: dict[str, Any], overrides: dict[str, Any]) -> GPT:
    known = [field.name for field in fields(GPTConfig)]
    for name in overrides:
        if name not in known:
            raise ConfigError(f"unknown model setting `{name}`", hint=nearest(name, known))
    return GPT(GPTConfig(**{**shape, **overrides}))


def tiny(vocab_size: int = 2048, context: int = 256, **overrides: Any) -> GPT:
    """A model of 1 M parameters, which trains in minutes on a laptop's CPU."""
    shape = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 4, "hidden": 352, "init_std": 0.06}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)


def mini(vocab_size: int = 8192, context: int = 512, **overrides: Any) -> GPT:
    """A model of 8 M parameters."""
    shape = {"dim": 256, "layers": 8, "heads": 4, "kv_heads": 4, "hidden": 704}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)


def small(vocab_size: int = 16384, context: int = 1024, **overrides: Any) -> GPT:
    """A model of 47 M parameters."""
    shape = {"dim": 512, "layers": 12, "heads": 8, "kv_heads": 8, "hidden": 1408}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)


def gpt124m(vocab_size: int = 50304, context: int = 1024, **overrides: Any) -> GPT:
    """A model of 124 M parameters, the size of GPT-2 small."""
    shape = {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "hidden": 2048}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)


def gpt1b(vocab_size: int = 50304, context: int = 2048, **overrides: Any) -> GPT:
    """A model of 1.1 B parameters, with grouped-query attention."""
    shape = {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, "rope_theta": 500_000.0}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)
