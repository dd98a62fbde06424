"""Transformer encoder in flax.nnx, post-norm, trained on masked language modelling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from benchmarks.profile.workloads import Workload, data
from benchmarks.profile.workloads.jax_models.training import fit

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 500, 48, 96, 4, 3, 6
MASK = VOCABULARY


def positional_encoding() -> np.ndarray:
    position, index = np.mgrid[0:LENGTH, 0:WIDTH]
    angles = position / 10000 ** (2 * (index // 2) / WIDTH)
    return np.where(index % 2 == 0, np.sin(angles), np.cos(angles)).astype(np.float32)


class EncoderLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query, self.key, self.value, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))
        self.linear1, self.linear2 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def attend(self, x: Array) -> Array:
        shape = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        q, k, v = (layer(x).reshape(shape).swapaxes(1, 2) for layer in (self.query, self.key, self.value))
        scores = jnp.matmul(q, k.swapaxes(-2, -1)) / jnp.sqrt(WIDTH // HEADS)
        weights = self.dropout(jax.nn.softmax(scores, axis=-1))
        return self.out(jnp.matmul(weights, v).swapaxes(1, 2).reshape(x.shape))

    def __call__(self, x: Array) -> Array:
        x = self.norm1(x + self.dropout(self.attend(x)))
        return self.norm2(x + self.dropout(self.linear2(self.dropout(nnx.relu(self.linear1(x))))))


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY + 1, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.layers = nnx.List([EncoderLayer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        x = self.dropout(self.embed(tokens) * jnp.sqrt(WIDTH) + positional_encoding())
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: Encoder, batch: tuple[np.ndarray, np.ndarray]) -> Array:
    tokens, chosen = batch
    logits = model(jnp.where(chosen, MASK, tokens))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return jnp.sum(losses * chosen) / jnp.maximum(jnp.sum(chosen), 1)


def build(seed: int) -> Workload:
    tokens = data.text_windows(seed, VOCABULARY, 256, LENGTH - 1)
    chosen = np.random.default_rng(seed).uniform(size=tokens.shape) < 0.15
    schedule = optax.warmup_exponential_decay_schedule(0, 3e-4, 400, 1000, 0.5)
    batches = data.shuffled_batches((tokens, chosen), BATCH, seed)
    return fit("encoder", Encoder(nnx.Rngs(seed)), optax.adam(schedule, b2=0.98), loss_fn, batches)
