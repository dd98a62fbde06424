"""The training loop that the flax models share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optax
from flax import nnx
from jax import Array

from benchmarks.profile.workloads import Workload


def fit(
    name: str,
    model: nnx.Module,
    tx: optax.GradientTransformation,
    loss_fn: Callable[[Any, Any], Array],
    batches: Iterator[Any],
) -> Workload:
    """A workload that trains a model on a loss of batches."""
    model.train()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def update(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    def train_step(batch: Any) -> float:
        loss = update(model, optimizer, batch)
        return float(loss)

    return Workload(name, batches, train_step)
