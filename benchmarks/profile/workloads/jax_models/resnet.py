"""ResNet with basic blocks in flax.nnx."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from benchmarks.profile.workloads import Workload, data
from benchmarks.profile.workloads.jax_models.training import fit

SIZE, CLASSES, WIDTH, BATCH = 32, 10, 8, 8


def conv(inputs: int, outputs: int, kernel: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(inputs, outputs, (kernel, kernel), strides=(stride, stride), use_bias=False, rngs=rngs)


class BasicBlock(nnx.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1, self.conv2 = conv(inputs, outputs, 3, stride, rngs), conv(outputs, outputs, 3, 1, rngs)
        self.norm1, self.norm2 = nnx.BatchNorm(outputs, rngs=rngs), nnx.BatchNorm(outputs, rngs=rngs)
        self.projects = stride != 1 or inputs != outputs
        if self.projects:
            self.conv_proj, self.norm_proj = conv(inputs, outputs, 1, stride, rngs), nnx.BatchNorm(outputs, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        residual = self.norm_proj(self.conv_proj(x)) if self.projects else x
        return nnx.relu(residual + y)


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem, self.norm = conv(3, WIDTH, 3, 1, rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        blocks, inputs = [], WIDTH
        for stage in range(3):
            outputs = WIDTH * 2**stage
            for index in range(2):
                blocks.append(BasicBlock(inputs, outputs, 2 if stage > 0 and index == 0 else 1, rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, CLASSES, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def loss_fn(model: ResNet, batch: tuple[np.ndarray, np.ndarray]) -> Array:
    images, labels = batch
    logits = model(jnp.transpose(images, (0, 2, 3, 1)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def build(seed: int) -> Workload:
    tx = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(0.1, momentum=0.9))
    batches = data.shuffled_batches(data.images(seed, 256, SIZE, CLASSES), BATCH, seed)
    return fit("resnet", ResNet(nnx.Rngs(seed)), tx, loss_fn, batches)
