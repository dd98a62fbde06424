"""ViT in flax.nnx."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from benchmarks.profile.workloads import Workload, data
from benchmarks.profile.workloads.jax_models.training import fit

SIZE, PATCH, CLASSES, WIDTH, HEADS, LAYERS, BATCH = 32, 4, 10, 64, 4, 4, 8


class EncoderBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, dropout_rate=0.1, decode=False, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.dropout(self.attention(self.norm1(x)))
        y = nnx.gelu(self.linear1(self.norm2(x)))
        return x + self.dropout(self.linear2(y))


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        patches = (SIZE // PATCH) ** 2
        self.embed = nnx.Conv(3, WIDTH, (PATCH, PATCH), strides=(PATCH, PATCH), rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (1, patches + 1, WIDTH)) * 0.02)
        self.blocks = nnx.List([EncoderBlock(rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        x = self.embed(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        cls = jnp.tile(self.cls[...], (x.shape[0], 1, 1))
        x = jnp.concatenate([cls, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def loss_fn(model: ViT, batch: tuple[np.ndarray, np.ndarray]) -> Array:
    images, labels = batch
    logits = model(jnp.transpose(images, (0, 2, 3, 1)))
    targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


def build(seed: int) -> Workload:
    batches = data.shuffled_batches(data.images(seed, 256, SIZE, CLASSES), BATCH, seed)
    return fit("vit", ViT(nnx.Rngs(seed)), optax.adam(1e-3), loss_fn, batches)
