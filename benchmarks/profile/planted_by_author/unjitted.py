"""JAX operations that Python starts one by one, where one compiled program would do them all."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.profile.planted.program import Planted


def _adam(steps: int, fixed: bool) -> list[Any]:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 9)
    parameters = [jax.random.normal(key, (32, 32)) * 0.1 for key in keys[:8]]
    x = jax.random.normal(keys[8], (64, 32))

    def loss(parameters: list[Any]) -> Any:
        y = x
        for weight in parameters:
            y = jnp.tanh(y @ weight)
        return jnp.mean((y - x) ** 2)

    gradients = jax.jit(jax.grad(loss))

    def update(parameters: list[Any], means: list[Any], given: list[Any]) -> tuple[list[Any], list[Any]]:
        kept = [0.9 * mean + 0.1 * gradient for mean, gradient in zip(means, given, strict=True)]  # fault: update-eager
        made = [
            w - 0.01 * m / (1e-3 + jnp.abs(m)) for w, m in zip(parameters, kept, strict=True)
        ]  # fault: update-eager
        return made, kept

    step = jax.jit(update) if fixed else update
    means = [jnp.zeros_like(weight) for weight in parameters]
    for _ in range(steps):
        parameters, means = step(parameters, means, gradients(parameters))
    return parameters


def _pendulum(steps: int, fixed: bool) -> list[Any]:
    import jax
    import jax.numpy as jnp

    angle, speed = jnp.linspace(-1, 1, 256), jnp.zeros(256)

    def swing(angle: Any, speed: Any) -> tuple[Any, Any]:
        speed = speed - 0.01 * (jnp.sin(angle) + 0.1 * speed * jnp.abs(speed))  # fault: simulation-eager
        return angle + 0.01 * speed, speed

    step = jax.jit(swing) if fixed else swing
    for _ in range(steps):
        angle, speed = step(angle, speed)
    return [angle, speed]


def _forward(steps: int, fixed: bool) -> list[Any]:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(1), 7)
    weights = [jax.random.normal(key, (48, 48)) * 0.2 for key in keys[:6]]
    x = jax.random.normal(keys[6], (32, 48))

    def block(x: Any, weight: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)  # fault: blocks-eager
        scaled = centered / jnp.sqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-5)  # fault: blocks-eager
        return x + jax.nn.relu(scaled @ weight)  # fault: blocks-eager

    def model(x: Any) -> Any:
        for weight in weights:
            x = block(x, weight)
        return x

    apply, found = jax.jit(model) if fixed else model, []
    for _ in range(steps):
        found.append(jnp.mean(apply(x)))
    return found


PROGRAMS = [
    Planted(name, "unjitted", partial(run, fixed=False), partial(run, fixed=True), steps, __name__, framework="jax")
    for name, run, steps in (
        ("update-eager", _adam, 400),
        ("simulation-eager", _pendulum, 4000),
        ("blocks-eager", _forward, 800),
    )
]
