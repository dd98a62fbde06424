"""GNN in plain JAX: GraphSAGE-like message passing by segment sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.profile.workloads import Workload, data, forever

NODES, EDGES, FEATURES, CLASSES, WIDTH = 1500, 6000, 256, 7, 32

Layer = dict[str, Array]


def init_layer(key: Array, inputs: int, outputs: int) -> Layer:
    left, right = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {"left": glorot(left, (inputs, outputs)), "right": glorot(right, (inputs, outputs)), "b": jnp.zeros(outputs)}


def sage_layer(layer: Layer, x: Array, senders: Array, receivers: Array) -> Array:
    messages = x[senders]
    total = jax.ops.segment_sum(messages, receivers, num_segments=x.shape[0])
    count = jax.ops.segment_sum(jnp.ones_like(receivers, dtype=x.dtype), receivers, num_segments=x.shape[0])
    mean = total / jnp.maximum(count, 1)[:, None]
    return mean @ layer["left"] + x @ layer["right"] + layer["b"]


def dropout(key: Array, x: Array) -> Array:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0)


def loss_fn(params: list[Layer], key: Array, x: Array, edges: Array, y: Array, train: Array) -> Array:
    first, second = jax.random.split(key)
    senders, receivers = edges
    h = jax.nn.relu(sage_layer(params[0], dropout(first, x), senders, receivers))
    logits = sage_layer(params[1], dropout(second, h), senders, receivers)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return jnp.sum(losses * train) / jnp.sum(train)


def build(seed: int) -> Workload:
    key, one, two = jax.random.split(jax.random.key(seed), 3)
    params = [init_layer(one, FEATURES, WIDTH), init_layer(two, WIDTH, CLASSES)]
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.adam(0.01))
    opt_state = optimizer.init(params)
    x, edges, y = (jnp.asarray(array) for array in data.citations(seed, NODES, EDGES, FEATURES, CLASSES))
    edges = jnp.concatenate([edges, edges[::-1]], axis=1)
    train = jax.random.uniform(key, (NODES,)) < 0.5

    @jax.jit
    def update(params: Any, opt_state: Any, key: Array, graph: tuple[Array, ...]) -> tuple[Any, Any, Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, key, *graph)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def train_step(graph: tuple[Array, ...]) -> float:
        nonlocal params, opt_state, key
        key, dropout_key = jax.random.split(key)
        params, opt_state, loss = update(params, opt_state, dropout_key, graph)
        return float(loss)

    return Workload("gnn", forever([(x, edges, y, train)]), train_step)
