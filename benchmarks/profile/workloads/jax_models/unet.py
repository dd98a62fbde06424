"""U-Net in flax.nnx."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from benchmarks.profile.workloads import Workload, data
from benchmarks.profile.workloads.jax_models.training import fit

SIZE, WIDTH, BATCH = 64, 8, 2


class DoubleConv(nnx.Module):
    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.BatchNorm(outputs, rngs=rngs), nnx.BatchNorm(outputs, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(x)))


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inc = DoubleConv(1, WIDTH, rngs)
        self.down1, self.down2 = DoubleConv(WIDTH, 2 * WIDTH, rngs), DoubleConv(2 * WIDTH, 4 * WIDTH, rngs)
        self.up1 = nnx.ConvTranspose(4 * WIDTH, 2 * WIDTH, (2, 2), strides=(2, 2), rngs=rngs)
        self.up2 = nnx.ConvTranspose(2 * WIDTH, WIDTH, (2, 2), strides=(2, 2), rngs=rngs)
        self.merge1, self.merge2 = DoubleConv(4 * WIDTH, 2 * WIDTH, rngs), DoubleConv(2 * WIDTH, WIDTH, rngs)
        self.outc = nnx.Conv(WIDTH, 2, (1, 1), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x1 = self.inc(x)
        x2 = self.down1(nnx.max_pool(x1, (2, 2), strides=(2, 2)))
        x3 = self.down2(nnx.max_pool(x2, (2, 2), strides=(2, 2)))
        x = self.merge1(jnp.concatenate([x2, self.up1(x3)], axis=-1))
        x = self.merge2(jnp.concatenate([x1, self.up2(x)], axis=-1))
        return self.outc(x)


def dice_loss(probabilities: Array, one_hot: Array) -> Array:
    intersection = 2 * (probabilities * one_hot).sum((1, 2))
    sets = probabilities.sum((1, 2)) + one_hot.sum((1, 2))
    return 1 - ((intersection + 1e-6) / (sets + 1e-6)).mean()


def loss_fn(model: UNet, batch: tuple[np.ndarray, np.ndarray]) -> Array:
    images, masks = batch
    logits = model(jnp.transpose(images, (0, 2, 3, 1)))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, masks).mean()
    return cross_entropy + dice_loss(jax.nn.softmax(logits), jax.nn.one_hot(masks, 2))


def build(seed: int) -> Workload:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-4, momentum=0.9))
    batches = data.shuffled_batches(data.blobs(seed, 64, SIZE), BATCH, seed)
    return fit("unet", UNet(nnx.Rngs(seed)), tx, loss_fn, batches)
