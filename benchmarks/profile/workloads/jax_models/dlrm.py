"""DLRM-like in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.profile.workloads import Workload, data

ROWS = [40, 2000, 500, 8000, 1200, 90, 3000, 700]
WIDTH, BAG, BATCH = 32, 4, 512

Params = dict[str, Any]


def init_mlp(key: Array, sizes: list[int]) -> list[tuple[Array, Array]]:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (m, n)) * (2 / (m + n)) ** 0.5, jnp.zeros(n))
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def mlp(layers: list[tuple[Array, Array]], x: Array) -> Array:
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(jnp.dot(x, weight) + bias)
    weight, bias = layers[-1]
    return jnp.dot(x, weight) + bias


def init(key: Array) -> Params:
    bottom, top, *tables = jax.random.split(key, 2 + len(ROWS))
    features = len(ROWS) + 1
    return {
        "bottom": init_mlp(bottom, [13, 128, 64, WIDTH]),
        "top": init_mlp(top, [features * (features - 1) // 2 + WIDTH, 128, 64, 1]),
        "tables": [
            jax.random.uniform(k, (n, WIDTH), minval=-1, maxval=1) / n**0.5 for k, n in zip(tables, ROWS, strict=True)
        ],
    }


def forward(params: Params, dense: Array, ids: Array) -> Array:
    x = mlp(params["bottom"], dense)
    bags = [jnp.take(table, ids[:, k], axis=0).sum(1) for k, table in enumerate(params["tables"])]
    features = jnp.stack([x, *bags], axis=1)
    interactions = jnp.einsum("bid,bjd->bij", features, features)
    rows, columns = jnp.tril_indices(features.shape[1], k=-1)
    return mlp(params["top"], jnp.concatenate([x, interactions[:, rows, columns]], axis=1))[:, 0]


def loss_fn(params: Params, dense: Array, ids: Array, clicked: Array) -> Array:
    logits = forward(params, dense, ids)
    return jnp.mean(jnp.maximum(logits, 0) - logits * clicked + jnp.log1p(jnp.exp(-jnp.abs(logits))))


@jax.jit
def update(params: Params, dense: Array, ids: Array, clicked: Array) -> tuple[Params, Array]:
    loss, grads = jax.value_and_grad(loss_fn)(params, dense, ids, clicked)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def build(seed: int) -> Workload:
    params = init(jax.random.key(seed))

    def train_step(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> float:
        nonlocal params
        params, loss = update(params, *(jnp.asarray(array) for array in batch))
        return float(loss)

    return Workload("dlrm", data.shuffled_batches(data.clicks(seed, 8192, ROWS, BAG), BATCH, seed), train_step)
