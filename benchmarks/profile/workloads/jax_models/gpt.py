"""GPT in plain JAX: parameters are a tree of arrays, layers are functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.profile.workloads import Workload, data

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 96, 64, 128, 4, 4, 4

Params = dict[str, Any]


def dense_params(key: Array, inputs: int, outputs: int) -> Params:
    return {"w": jax.random.normal(key, (inputs, outputs)) * 0.02, "b": jnp.zeros(outputs)}


def init(key: Array) -> Params:
    keys = iter(jax.random.split(key, 4 * LAYERS + 2))
    norm = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
    blocks = [
        {
            "ln_1": norm,
            "qkv": dense_params(next(keys), WIDTH, 3 * WIDTH),
            "proj": dense_params(next(keys), WIDTH, WIDTH),
            "ln_2": norm,
            "fc": dense_params(next(keys), WIDTH, 4 * WIDTH),
            "out": dense_params(next(keys), 4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    wte = jax.random.normal(next(keys), (VOCABULARY, WIDTH)) * 0.02
    wpe = jax.random.normal(next(keys), (CONTEXT, WIDTH)) * 0.02
    return {"wte": wte, "wpe": wpe, "blocks": blocks, "ln_f": norm}


def dense(p: Params, x: Array) -> Array:
    return x @ p["w"] + p["b"]


def layer_norm(p: Params, x: Array) -> Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return p["scale"] * (x - mean) / jnp.sqrt(variance + 1e-5) + p["bias"]


def attention(block: Params, x: Array) -> Array:
    B, T, C = x.shape
    q, k, v = jnp.split(dense(block["qkv"], x), 3, axis=-1)
    q, k, v = (a.reshape(B, T, HEADS, C // HEADS).transpose(0, 2, 1, 3) for a in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(C // HEADS)
    causal = jnp.tril(jnp.ones((T, T)))
    scores = jnp.where(causal == 0, -1e10, scores)
    y = jax.nn.softmax(scores) @ v
    return dense(block["proj"], y.transpose(0, 2, 1, 3).reshape(B, T, C))


def mlp(block: Params, x: Array) -> Array:
    return dense(block["out"], jax.nn.gelu(dense(block["fc"], x)))


def forward(params: Params, tokens: Array) -> Array:
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for block in params["blocks"]:
        x = x + attention(block, layer_norm(block["ln_1"], x))
        x = x + mlp(block, layer_norm(block["ln_2"], x))
    return layer_norm(params["ln_f"], x) @ params["wte"].T


def loss_fn(params: Params, tokens: Array, targets: Array) -> Array:
    log_probs = jax.nn.log_softmax(forward(params, tokens))
    one_hot = jax.nn.one_hot(targets, VOCABULARY)
    return -jnp.mean(jnp.sum(log_probs * one_hot, axis=-1))


def build(seed: int) -> Workload:
    params = init(jax.random.key(seed))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, weight_decay=0.1))
    opt_state = optimizer.init(params)

    @jax.jit
    def update(params: Params, opt_state: Any, x: Array, y: Array) -> tuple[Any, Any, Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def train_step(batch: tuple[np.ndarray]) -> float:
        nonlocal params, opt_state
        (windows,) = batch
        params, opt_state, loss = update(params, opt_state, jnp.array(windows[:, :-1]), jnp.array(windows[:, 1:]))
        return loss.item()

    windows = data.text_windows(seed, VOCABULARY, 256, CONTEXT)
    return Workload("gpt", data.shuffled_batches((windows,), BATCH, seed), train_step)
