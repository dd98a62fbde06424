"""Llama-like in flax.nnx: RMS norm, rotary positions, SwiGLU, shared key and value heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from benchmarks.profile.workloads import Workload, data
from benchmarks.profile.workloads.jax_models.training import fit

VOCABULARY, CONTEXT, WIDTH, HEADS, KV_HEADS, LAYERS, BATCH = 256, 48, 128, 8, 2, 4, 4
HEAD = WIDTH // HEADS


def apply_rope(x: Array, positions: Array) -> Array:
    timescale = 10000.0 ** (2 * jnp.arange(HEAD // 2) / HEAD)
    angles = positions[:, None, None] / timescale
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wq = nnx.Linear(WIDTH, HEADS * HEAD, use_bias=False, rngs=rngs)
        self.wk = nnx.Linear(WIDTH, KV_HEADS * HEAD, use_bias=False, rngs=rngs)
        self.wv = nnx.Linear(WIDTH, KV_HEADS * HEAD, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(HEADS * HEAD, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Array, positions: Array) -> Array:
        batch, length, _ = x.shape
        q = apply_rope(self.wq(x).reshape(batch, length, HEADS, HEAD), positions)
        k = apply_rope(self.wk(x).reshape(batch, length, KV_HEADS, HEAD), positions)
        v = self.wv(x).reshape(batch, length, KV_HEADS, HEAD)
        k, v = (jnp.repeat(a, HEADS // KV_HEADS, axis=2) for a in (k, v))
        logits = jnp.einsum("bthd,bshd->bhts", q, k) * HEAD**-0.5
        mask = jnp.tril(jnp.ones((length, length), dtype=bool))
        probs = jax.nn.softmax(jnp.where(mask, logits, -1e30), axis=-1)
        out = jnp.einsum("bhts,bshd->bthd", probs, v)
        return self.wo(out.reshape(batch, length, WIDTH))


class FeedForward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(WIDTH, 352, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 352, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(352, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention, self.feed_forward = Attention(rngs), FeedForward(rngs)
        self.attention_norm, self.ffn_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Array, positions: Array) -> Array:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        positions = jnp.arange(tokens.shape[1])
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))


def loss_fn(model: Llama, batch: tuple[np.ndarray]) -> Array:
    (tokens,) = batch
    logits = model(jnp.asarray(tokens[:, :-1]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def build(seed: int) -> Workload:
    schedule = optax.cosine_decay_schedule(3e-4, 1000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    windows = data.text_windows(seed, VOCABULARY, 256, CONTEXT)
    return fit("llama", Llama(nnx.Rngs(seed)), tx, loss_fn, data.shuffled_batches((windows,), BATCH, seed))
