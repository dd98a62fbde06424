"""Code that is traced or compiled again and again, or whose graph breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def scaled_step(x: Tensor, weight: Tensor, temperature: float | Tensor) -> Tensor:
    hidden = torch.tanh(x @ weight / temperature)
    return F.normalize(hidden + x, dim=1)


def annealing(steps: int, plain_number: bool) -> Tensor:
    """A network that is iterated while its temperature falls; a Python number is a constant of the compiled code."""
    random = seeded()
    torch._dynamo.reset()
    step = torch.compile(scaled_step, backend="eager", dynamic=False)
    x, weight = torch.randn(64, 48, generator=random), torch.randn(48, 48, generator=random)
    for number in range(steps):
        temperature = 2.0 - number / steps
        x = step(x, weight, temperature if plain_number else torch.tensor(temperature))  # fault: number-as-constant
    return x


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(100, 32), nn.Linear(32, 32), nn.Linear(32, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + F.gelu(self.mix(x))
        return self.head(x)


def tagging(steps: int, padded: bool) -> list[Tensor]:
    """A tagger of sentences whose lengths differ; padding to a few lengths would spare most compilations."""
    random = seeded()
    torch._dynamo.reset()
    model = Tagger()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for number in range(steps):
        length = 9 + number % 7
        tokens, tags = torch.randint(0, 100, (8, length), generator=random), torch.full((8, 16), -100)
        tags[:, :length] = tokens % 9
        if padded:
            tokens = F.pad(tokens, (0, 16 - length))
        logits = compiled(tokens)  # fault: length-by-length
        loss = F.cross_entropy(logits.flatten(0, 1), tags[:, : logits.shape[1]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def branching_layer(x: Tensor, weight: Tensor) -> Tensor:
    x = torch.tanh(x @ weight) + x
    if x.abs().mean() > 1.0:  # fault: branch-on-a-value
        x = x * 0.5
    return x


def selecting_layer(x: Tensor, weight: Tensor) -> Tensor:
    x = torch.tanh(x @ weight) + x
    return torch.where(x.abs().mean() > 1.0, x * 0.5, x)


def stabilized(steps: int, branches: bool) -> Tensor:
    """A deep network that halves its activations where they grow, from within its compiled code."""
    random = seeded()
    torch._dynamo.reset()
    layer = branching_layer if branches else selecting_layer

    def forward(x: Tensor, layers: list[Tensor]) -> Tensor:
        for weight in layers:
            x = layer(x, weight)
        return x

    compiled = torch.compile(forward, backend="eager")
    layers = [torch.randn(16, 16, generator=random) for _ in range(12)]
    x = torch.randn(8, 16, generator=random)
    for _ in range(steps):
        x = compiled(x, layers)
    return x


def fresh_jit(steps: int, fresh: bool) -> np.ndarray:
    """Gradient descent in JAX; what is jitted is a new function at every step."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(256, 32))), jnp.asarray(rng.normal(size=256))
    w = jnp.zeros(32)

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    update = jax.jit(lambda w: w - 0.1 * jax.grad(loss)(w))
    for _ in range(steps):
        if fresh:
            w = jax.jit(lambda w: w - 0.1 * jax.grad(loss)(w))(w)  # fault: jit-in-the-loop
        else:
            w = update(w)
    return np.asarray(w)


def growing_batches(steps: int, padded: bool) -> np.ndarray:
    """Statistics of samples that keep arriving, in JAX; each size of the array is compiled anew."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def moments(samples: jax.Array, valid: jax.Array) -> jax.Array:
        count = jnp.sum(valid)
        mean = jnp.sum(jnp.where(valid[:, None], samples, 0), axis=0) / count
        spread = jnp.sum(jnp.where(valid[:, None], (samples - mean) ** 2, 0), axis=0) / count
        return jnp.stack([mean, jnp.sqrt(spread)])

    samples = np.random.default_rng(0).normal(size=(steps + 8, 16)).astype(np.float32)
    found = []
    for size in range(8, steps + 8):
        rows = steps + 8 if padded else size
        valid = np.arange(rows) < size
        found.append(np.asarray(moments(samples[:rows], valid)))  # fault: shape-by-shape
    return np.stack(found)


def static_rate(steps: int, static: bool) -> np.ndarray:
    """Training in JAX with a learning rate that falls and is marked static."""
    import jax
    import jax.numpy as jnp

    def loss(params: tuple[jax.Array, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        first, second = params
        return jnp.mean((jax.nn.relu(x @ first) @ second - y) ** 2)

    def update(params: Any, x: jax.Array, y: jax.Array, rate: float) -> Any:
        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params, x, y))

    update = jax.jit(update, static_argnames="rate") if static else jax.jit(update)
    rng = np.random.default_rng(0)
    params = tuple(jnp.asarray(rng.normal(size=shape) * 0.1) for shape in ((16, 64), (64, 4)))
    x, y = rng.normal(size=(128, 16)), rng.normal(size=(128, 4))
    for number in range(steps):
        params = update(params, x, y, rate=0.1 / (1 + number))  # fault: static-rate
    return np.concatenate([np.asarray(p).ravel() for p in params])


PROGRAMS = [
    Planted(
        "number-as-constant", "retracing", lambda n: annealing(n, True), lambda n: annealing(n, False), 8, __name__
    ),
    Planted("length-by-length", "retracing", lambda n: tagging(n, False), lambda n: tagging(n, True), 14, __name__),
    Planted(
        "branch-on-a-value", "retracing", lambda n: stabilized(n, True), lambda n: stabilized(n, False), 600, __name__
    ),
    Planted(
        "jit-in-the-loop", "retracing", lambda n: fresh_jit(n, True), lambda n: fresh_jit(n, False), 10, __name__, "jax"
    ),
    Planted(
        "shape-by-shape",
        "retracing",
        lambda n: growing_batches(n, False),
        lambda n: growing_batches(n, True),
        12,
        __name__,
        "jax",
    ),
    Planted(
        "static-rate", "retracing", lambda n: static_rate(n, True), lambda n: static_rate(n, False), 8, __name__, "jax"
    ),
]
