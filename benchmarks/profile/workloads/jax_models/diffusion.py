"""Diffusion in flax.nnx: DDPM training with a moving average of the weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from benchmarks.profile.workloads import Workload, data

SIZE, WIDTH, TIMESTEPS, BATCH = 16, 16, 200, 8


def sinusoidal_embedding(time: Array, dim: int) -> Array:
    frequencies = jnp.exp(-jnp.log(10000) * jnp.arange(dim // 2) / (dim // 2 - 1))
    angles = time[:, None] * frequencies[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResnetBlock(nnx.Module):
    def __init__(self, inputs: int, outputs: int, time_dim: int, rngs: nnx.Rngs) -> None:
        self.time = nnx.Linear(time_dim, 2 * outputs, rngs=rngs)
        self.conv1, self.norm1 = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs), nnx.GroupNorm(outputs, 4, rngs=rngs)
        self.conv2, self.norm2 = nnx.Conv(outputs, outputs, (3, 3), rngs=rngs), nnx.GroupNorm(outputs, 4, rngs=rngs)
        self.residual = nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)

    def __call__(self, x: Array, time: Array) -> Array:
        scale, shift = jnp.split(self.time(nnx.swish(time))[:, None, None], 2, axis=-1)
        h = self.norm1(self.conv1(x)) * (scale + 1) + shift
        h = nnx.swish(self.norm2(self.conv2(nnx.swish(h))))
        return h + self.residual(x)


class NoisePredictor(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        dim = 4 * WIDTH
        self.time1, self.time2 = nnx.Linear(WIDTH, dim, rngs=rngs), nnx.Linear(dim, dim, rngs=rngs)
        self.init_conv = nnx.Conv(3, WIDTH, (3, 3), rngs=rngs)
        self.down1 = ResnetBlock(WIDTH, WIDTH, dim, rngs)
        self.downsample = nnx.Conv(WIDTH, 2 * WIDTH, (4, 4), strides=(2, 2), rngs=rngs)
        self.mid = ResnetBlock(2 * WIDTH, 2 * WIDTH, dim, rngs)
        self.upsample = nnx.Conv(2 * WIDTH, WIDTH, (3, 3), rngs=rngs)
        self.up1 = ResnetBlock(2 * WIDTH, WIDTH, dim, rngs)
        self.final_conv = nnx.Conv(WIDTH, 3, (1, 1), rngs=rngs)

    def __call__(self, x: Array, time: Array) -> Array:
        t = self.time2(nnx.gelu(self.time1(sinusoidal_embedding(time, WIDTH))))
        skip = self.down1(self.init_conv(x), t)
        h = self.mid(self.downsample(skip), t)
        h = jax.image.resize(h, (*skip.shape[:3], h.shape[-1]), "nearest")
        h = jnp.concatenate([self.upsample(h), skip], axis=-1)
        return self.final_conv(self.up1(h, t))


def loss_fn(model: NoisePredictor, images: Array, key: Array) -> Array:
    time_key, noise_key = jax.random.split(key)
    alphas_cumprod = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, TIMESTEPS))
    t = jax.random.randint(time_key, (len(images),), 0, TIMESTEPS)
    noise = jax.random.normal(noise_key, images.shape)
    a = alphas_cumprod[t][:, None, None, None]
    x = jnp.sqrt(a) * images + jnp.sqrt(1 - a) * noise
    return jnp.mean((model(x, t) - noise) ** 2)


@nnx.jit
def update(
    model: NoisePredictor, optimizer: nnx.Optimizer, average: NoisePredictor, images: Array, key: Array
) -> Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, images, key)
    optimizer.update(model, grads)
    old, new = nnx.state(average, nnx.Param), nnx.state(model, nnx.Param)
    nnx.update(average, jax.tree.map(lambda a, b: 0.995 * a + 0.005 * b, old, new))
    return loss


def build(seed: int) -> Workload:
    model, average = NoisePredictor(nnx.Rngs(seed)), NoisePredictor(nnx.Rngs(seed))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(8e-5, b2=0.99))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    key = jax.random.key(seed)

    def train_step(batch: tuple[np.ndarray, np.ndarray]) -> float:
        nonlocal key
        key, step_key = jax.random.split(key)
        images = jnp.asarray(batch[0].transpose(0, 2, 3, 1))
        return float(update(model, optimizer, average, images, step_key))

    return Workload("diffusion", data.shuffled_batches(data.images(seed, 256, SIZE, 10), BATCH, seed), train_step)
