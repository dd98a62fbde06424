"""A decoder-only transformer in the Llama layout: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes in comments: B sequences, T tokens of them, S positions attended to, V words in the vocabulary, C model width
(`dim`), H query heads, K key/value heads, D width of a head (C / H), F width of the feed-forward layer, L blocks.

Sources: Touvron et al. 2023 (Llama), Su et al. 2021 (rotary), Ainslie et al. 2023 (grouped queries),
Shazeer 2020 (SwiGLU).
"""

from __future__ import annotations

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
        ConfigError: a size that is not a positive integer, or sizes that do not divide.
    """

    vocab_size: int
    """Words in the vocabulary."""
    dim: int
    """Model width; a multiple of `heads`."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Query heads; a multiple of `kv_heads`."""
    kv_heads: int
    """Key/value heads: `heads` is multi-head attention, 1 is multi-query."""
    hidden: int
    """Width of the feed-forward layer."""
    context: int
    """The longest sequence, in tokens."""
    tied: bool = True
    """The output layer is the embedding, transposed."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; those that write to the residual stream get 1 / sqrt(2 L) of it."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"GPTConfig.{name} is {value!r}", hint="give a positive integer")
        for name in ("rope_theta", "norm_eps", "init_std"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"GPTConfig.{name} is {value!r}", hint="give a positive number")
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
        """Weights that a token is multiplied with: everything but the norms and the embedding's look-up."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.dim * self.hidden) + self.vocab_size * self.dim


class Linear(nn.Linear):
    """Without bias. Draws its weight once, so that a model built on `meta` and reset later gets the same numbers."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """Rows drawn once from a normal distribution, as in `Linear`."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def logits(self, x: Tensor) -> Tensor:
        """The embedding as the head of the model: (…, C) to (…, V)."""
        return F.linear(x, self.weight)


def rotary_table(config: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (…, T, D/2) each, of the angles position · theta^(-2i / D), in float32.

    Computed at every forward pass: it costs next to nothing, and so there is no buffer to lose on `meta` or in a cast.

    Args:
        positions: (…, T).
    """
    even = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (even / config.head_dim)
    angle = positions.float()[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of (B, T, heads, D) by its angle: Llama's "rotate half" convention."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = (table.unsqueeze(-2).to(heads.dtype) for table in (cos, sin))  # T 1 D/2, or B T 1 D/2
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Past:
    """What the layers of one pass share: the cache, where its tokens go there, and what they see."""

    def __init__(self, cache: KVCache, place: CachePlace) -> None:
        self.cache, self.place = cache, place
        count = place.positions.shape[1]
        if place.aligned and count == place.end:
            self.seen: dict[str, Any] = {"is_causal": True}
        elif place.aligned and count == 1:
            self.seen = {}
        else:
            self.seen = {"attn_mask": place.mask()}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What queries (B, T, H, D) get from the cache and from the (B, K, T, D) `k` and `v` of their own tokens."""
        k, v = self.cache.append(layer, k, v, self.place)
        mixed = skinny.attention(q, k, v, self.place.positions)
        if mixed is None:
            q, grouped = q.transpose(1, 2), q.shape[2] > k.shape[1]
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **self.seen).transpose(1, 2)
        return mixed


class Packed:
    """What the layers of one pass over several texts in one sequence share: who sees whom, (B, 1, T, T).

    Args:
        positions: (B, T) of each token in its own text; where it is not one more than before, a text begins.
    """

    def __init__(self, positions: Tensor) -> None:
        begins = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
        text, count = begins.cumsum(1), positions.shape[1]
        earlier = torch.ones(count, count, dtype=torch.bool, device=positions.device).tril()
        self.mask = ((text[:, :, None] == text[:, None]) & earlier)[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Past.attend`, within each text."""
        q, grouped = q.transpose(1, 2), q.shape[2] > k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=grouped).transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention whose query heads share key/value heads in groups of H / K."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.layer = config.heads, config.kv_heads, config.head_dim, layer
        self.qkv = Linear(config.dim, (config.heads + 2 * config.kv_heads) * config.head_dim, config.init_std)
        self.out = Linear(config.dim, config.dim, config.init_std / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | Packed | None = None) -> Tensor:
        B, T, C = x.shape
        heads = self.qkv(x).view(B, T, self.heads + 2 * self.kv_heads, self.head_dim)
        turned = rotate(heads[:, :, : self.heads + self.kv_heads], cos, sin)
        q, k = turned.split([self.heads, self.kv_heads], dim=2)  # B T H D, B T K D
        k, v = k.transpose(1, 2), heads[:, :, self.heads + self.kv_heads :].transpose(1, 2)  # B K T D
        if past is None:
            grouped = self.heads > self.kv_heads
            mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=grouped, is_causal=True)
            mixed = mixed.transpose(1, 2)
        else:
            mixed = past.attend(self.layer, q, k, v)
        return self.out(mixed.reshape(B, T, C))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.hidden, config.init_std)
        self.down = Linear(config.hidden, config.dim, config.init_std / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # B T F
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream: (B, T, C) to (B, T, C)."""

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
    """The language model. `blocks` are the units that checkpointing, sharding and compilation take.

    Initialised from torch's global generator. Built on `meta`: `model.to_empty(device=...)`, then
    `model.reset_parameters()`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.dim, config.init_std)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        # Tied weights are one parameter used twice, not two names: to_empty and sharding would part two names.
        self.head = None if config.tied else Linear(config.dim, config.vocab_size, config.init_std)

    def reset_parameters(self) -> None:
        """Draw every weight again, in the order of construction."""
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
    ) -> Tensor:
        """Logits (B, T, V) of the token after each of `tokens` (B, T), int64.

        With a `cache` the tokens continue those in it and are added to it.

        Args:
            place: where they go in the cache, for rows that differ; the caller then lengthens the cache.
            last: only the logits of so many last tokens are computed; default all.
            position_ids: (B, T), of each token in its own text, for sequences of several texts that do not see each
                other; without a cache.

        Raises:
            ConfigError: more tokens than the context, or than the cache has room for.
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
            past, positions = Packed(position_ids), position_ids
        cos, sin = rotary_table(self.config, positions)
        x = self.embed(tokens)  # B T C
        for block in self.blocks:
            x = block(x, cos, sin, past)
        if cache is not None and place is not None and own:
            cache.lengthen(count, place)
        x = self.norm(x if last is None else x[:, -last:])
        return self.embed.logits(x) if self.head is None else self.head(x)

    def flops_per_token(self, sequence: int) -> int:
        """FLOPs of forward and backward per trained token: 6 N + 12 L C T (Chowdhery et al. 2022, appendix B).

        N counts the weights of matrix products (not the embedding's look-up), T is `sequence`; causality is not
        discounted.
        """
        return 6 * self.config.matmul_parameters + 12 * self.config.layers * self.config.dim * sequence


def _preset(shape: dict[str, Any], overrides: dict[str, Any]) -> GPT:
    known = [field.name for field in fields(GPTConfig)]
    for name in overrides:
        if name not in known:
            raise ConfigError(f"unknown model setting `{name}`", hint=nearest(name, known))
    return GPT(GPTConfig(**{**shape, **overrides}))


def tiny(vocab_size: int = 2048, context: int = 256, **overrides: Any) -> GPT:
    """1 M parameters: minutes on a laptop's CPU."""
    shape = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 4, "hidden": 352, "init_std": 0.06}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)


def mini(vocab_size: int = 8192, context: int = 512, **overrides: Any) -> GPT:
    """8 M parameters."""
    shape = {"dim": 256, "layers": 8, "heads": 4, "kv_heads": 4, "hidden": 704}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)


def small(vocab_size: int = 16384, context: int = 1024, **overrides: Any) -> GPT:
    """47 M parameters."""
    shape = {"dim": 512, "layers": 12, "heads": 8, "kv_heads": 8, "hidden": 1408}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)


def gpt124m(vocab_size: int = 50304, context: int = 1024, **overrides: Any) -> GPT:
    """124 M parameters, the size of GPT-2 small."""
    shape = {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "hidden": 2048}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)


def gpt1b(vocab_size: int = 50304, context: int = 2048, **overrides: Any) -> GPT:
    """1.1 B parameters, with grouped queries."""
    shape = {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, "rope_theta": 500_000.0}
    return _preset({"vocab_size": vocab_size, "context": context, **shape}, overrides)
