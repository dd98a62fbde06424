"""Code that is traced or compiled more often than needed, or in parts."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(6)])
        self.score = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.score(x).squeeze(-1)


class Service:
    """Ranks documents for requests, with a model that is traced for each request or once."""

    def __init__(self, model: nn.Module, example: Tensor | None = None) -> None:
        self.model = model.eval()
        self.traced: Any = None if example is None else torch.jit.trace(self.model, example)

    @torch.no_grad()
    def rank(self, documents: Tensor) -> Tensor:
        traced: Any = self.traced
        if traced is None:
            traced = torch.jit.trace(self.model, documents)  # fault: traced-for-each-request
        return traced(documents).argsort(descending=True)


def requests(steps: int, once: bool) -> list[Tensor]:
    random = seeded()
    service = Service(Ranker(), torch.zeros(100, 48) if once else None)
    return [service.rank(torch.randn(100, 48, generator=random)) for _ in range(steps)]


class WarmedUp(nn.Module):
    """Blends a residual branch in over the first steps, which it counts in a number or in a tensor."""

    count: Tensor | int

    def __init__(self, counts_in_tensor: bool) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(32, 32), nn.Linear(32, 4)
        if counts_in_tensor:
            self.register_buffer("count", torch.zeros(()))
        else:
            self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        blend = self.count / 100
        return self.head(x + blend * torch.tanh(self.branch(x)))


def warming_up(steps: int, counts_in_tensor: bool) -> list[Tensor]:
    random = seeded()
    torch._dynamo.reset()
    model = WarmedUp(counts_in_tensor)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(steps):
        x, y = torch.randn(64, 32, generator=random), torch.randint(0, 4, (64,), generator=random)
        loss = F.cross_entropy(compiled(x), y)  # fault: counter-as-constant
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.count += 1
    return weights(model)


@torch.compiler.disable()
def noted(peaks: list[Tensor], hidden: Tensor) -> None:
    """Keeps the largest activation; not part of compiled code, in which it would be a constant."""
    peaks.append(hidden.abs().max())


class Monitored(nn.Module):
    """Watches the largest activations of a network, in compiled code or after it."""

    def __init__(self, in_compiled_code: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 4)
        self.in_compiled_code, self.peaks = in_compiled_code, list[Tensor]()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.inner(x))
        if self.in_compiled_code:
            noted(self.peaks, hidden)  # fault: statistics-in-compiled-code
        out = x + torch.tanh(self.outer(hidden))
        if self.in_compiled_code:
            noted(self.peaks, out)  # fault: statistics-in-compiled-code
        return self.head(out), hidden, out


@cache
def compiled_monitored(in_compiled_code: bool) -> tuple[Monitored, Any]:
    torch.manual_seed(0)
    model = Monitored(in_compiled_code).eval()
    return model, torch.compile(model, backend="eager")


@torch.no_grad()
def monitoring(steps: int, in_compiled_code: bool) -> list[Tensor]:
    """A service that was warmed up before: all is compiled."""
    random = seeded()
    model, compiled = compiled_monitored(in_compiled_code)
    outputs, largest = [], torch.zeros(())
    for _ in range(steps):
        x = torch.randn(8, 24, generator=random)
        scores, *activations = compiled(x)
        peaks = model.peaks if in_compiled_code else [hidden.abs().max() for hidden in activations]
        largest = torch.maximum(largest, torch.stack(peaks).max())
        model.peaks.clear()
        outputs.append(scores)
    return [*outputs, largest]


def scheduled(steps: int, static: bool) -> np.ndarray:
    """A flax network in training, whose schedule takes the number of the step as a constant or as a value."""
    import flax.linen as linen
    import jax
    import jax.numpy as jnp

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(1)(linen.gelu(linen.Dense(64)(x)))[:, 0]

    rng, net = np.random.default_rng(0), Net()
    x, y = jnp.asarray(rng.normal(size=(256, 16))), jnp.asarray(rng.normal(size=256))
    params = net.init(jax.random.PRNGKey(0), x)

    @partial(jax.jit, static_argnames="step" if static else ())
    def update(params: Any, step: int) -> Any:
        rate = 0.1 / (1 + 0.01 * step)
        grads = jax.grad(lambda params: jnp.mean((net.apply(params, x) - y) ** 2))(params)  # pyrefly: ignore[unsupported-operation]
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    for step in range(steps):
        params = update(params, step)  # fault: static-step-number
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def completions(steps: int, growing: bool) -> np.ndarray:
    """Text is completed token by token in JAX; the text grows, or lies in a buffer of its final length."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    embedding, head = (jnp.asarray(rng.normal(size=shape) / 8) for shape in ((200, 48), (48, 200)))

    @jax.jit
    def next_token(tokens: jax.Array, length: jax.Array) -> jax.Array:
        x = embedding[tokens]
        scores = jnp.where(jnp.arange(len(tokens)) < length, x @ x[length - 1] / 48**0.5, -jnp.inf)
        return jnp.argmax(jax.nn.softmax(scores) @ x @ head)

    tokens = jnp.zeros(1 if growing else steps + 1, dtype=jnp.int32)
    for position in range(1, steps + 1):
        token = next_token(tokens, jnp.asarray(position))  # fault: growing-text
        tokens = jnp.append(tokens, token) if growing else tokens.at[position].set(token)
    return np.asarray(tokens)


PROGRAMS = [
    Planted(
        "traced-for-each-request",
        "retracing",
        lambda steps: requests(steps, False),
        lambda steps: requests(steps, True),
        steps=25,
        module=__name__,
    ),
    Planted(
        "counter-as-constant",
        "retracing",
        lambda steps: warming_up(steps, False),
        lambda steps: warming_up(steps, True),
        steps=8,
        module=__name__,
    ),
    Planted(
        "statistics-in-compiled-code",
        "retracing",
        lambda steps: monitoring(steps, True),
        lambda steps: monitoring(steps, False),
        steps=2000,
        module=__name__,
    ),
    Planted(
        "static-step-number",
        "retracing",
        lambda steps: scheduled(steps, True),
        lambda steps: scheduled(steps, False),
        steps=15,
        module=__name__,
        framework="jax",
    ),
    Planted(
        "growing-text",
        "retracing",
        lambda steps: completions(steps, True),
        lambda steps: completions(steps, False),
        steps=20,
        module=__name__,
        framework="jax",
    ),
]
