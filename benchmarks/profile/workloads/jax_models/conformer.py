"""Conformer in flax.nnx, trained with the CTC loss."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from benchmarks.profile.workloads import Workload, data
from benchmarks.profile.workloads.jax_models.training import fit

FRAMES, BANDS, SYMBOLS, SPOKEN, WIDTH, HEADS, BLOCKS, KERNEL, BATCH = 96, 40, 30, 12, 64, 4, 2, 15, 4


class FeedForwardModule(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = self.dropout(nnx.swish(self.up(self.norm(x))))
        return self.dropout(self.down(x))


class ConvModule(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.batch_norm = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.pointwise1 = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.depthwise = nnx.Conv(WIDTH, WIDTH, (KERNEL,), feature_group_count=WIDTH, rngs=rngs)
        self.pointwise2 = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.glu(self.pointwise1(self.norm(x)))
        x = nnx.swish(self.batch_norm(self.depthwise(x)))
        return self.dropout(self.pointwise2(x))


class ConformerBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.ff1, self.ff2, self.conv = FeedForwardModule(rngs), FeedForwardModule(rngs), ConvModule(rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, dropout_rate=0.1, decode=False, rngs=rngs)
        self.attention_norm, self.final_norm = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(self.attention_norm(x), mask=mask)
        x = x + self.conv(x)
        x = x + 0.5 * self.ff2(x)
        return self.final_norm(x)


class Conformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.subsample = nnx.Conv(BANDS, WIDTH, (3,), strides=(2,), rngs=rngs)
        self.blocks = nnx.List([ConformerBlock(rngs) for _ in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, SYMBOLS, rngs=rngs)

    def __call__(self, spectra: Array, lengths: Array) -> tuple[Array, Array]:
        x = nnx.relu(self.subsample(spectra))
        padding = jnp.arange(x.shape[1])[None, :] >= (lengths[:, None] + 1) // 2
        mask = ~padding[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x), padding


def loss_fn(model: Conformer, batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Array:
    spectra, lengths, labels = batch
    logits, padding = model(jnp.asarray(spectra), jnp.asarray(lengths))
    label_paddings = jnp.zeros(labels.shape)
    return optax.ctc_loss(logits, padding.astype(jnp.float32), labels, label_paddings).mean() / labels.shape[1]


def build(seed: int) -> Workload:
    spectra, lengths, transcripts = data.speech(seed, 128, FRAMES, BANDS, SYMBOLS, SPOKEN)
    spectra = np.where(np.arange(FRAMES)[None, :, None] < lengths[:, None, None], spectra, 0)
    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(5e-4, b2=0.98))
    batches = data.shuffled_batches((spectra, lengths, transcripts), BATCH, seed)
    return fit("conformer", Conformer(nnx.Rngs(seed)), tx, loss_fn, batches)
