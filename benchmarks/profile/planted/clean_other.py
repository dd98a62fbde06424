"""Inference, numerical programs and programs in JAX without any of the nine faults."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Clean, seeded


@torch.inference_mode()
def neighbours(steps: int) -> list[Tensor]:
    """Votes of the nearest neighbours."""
    random = seeded()
    stored, labels = torch.randn(4000, 96, generator=random), torch.randint(0, 10, (4000,), generator=random)
    squares = stored.square().sum(1)
    votes = []
    for _ in range(steps):
        query = torch.randn(64, 96, generator=random)
        products = query @ stored.T
        distance = squares - 2 * products
        nearest = distance.topk(7, dim=1, largest=False).indices
        votes.append(F.one_hot(labels[nearest], 10).sum(1).argmax(1))
    return votes


def logistic_regression(steps: int) -> list[Tensor]:
    """Newton's method, with its gradient and its Hessian matrix in closed form."""
    random = seeded()
    x, truth = torch.randn(500, 40, generator=random).double(), torch.randn(40, generator=random).double()
    y = (torch.rand(500, generator=random) < torch.sigmoid(x @ truth)).double()
    found = []
    for start in range(steps):
        weight = torch.full((40,), 0.01 * start, dtype=torch.float64)
        for _ in range(4):
            probability = torch.sigmoid(x @ weight)
            gradient = x.T @ (probability - y) + weight
            scaled = x * (probability * (1 - probability))[:, None]
            curvature = scaled.T @ x + torch.eye(40, dtype=torch.float64)
            weight = weight - torch.linalg.solve(curvature, gradient)
        found.append(weight)
    return found


def gaussian_process(steps: int) -> list[Tensor]:
    """The evidence of a regression, over lengths of the kernel."""
    random = seeded()
    x = torch.rand(150, 1, generator=random).double()
    y = torch.sin(9 * x) + 0.1 * torch.randn(150, 1, generator=random).double()
    square = (x - x.T).square()
    evidence = []
    for length in torch.linspace(0.05, 0.5, steps).double():
        kernel = torch.exp(-square / (2 * length**2)) + 0.01 * torch.eye(150, dtype=torch.float64)
        factor = torch.linalg.cholesky(kernel)
        solved = torch.linalg.solve_triangular(factor, y, upper=False)
        evidence.append(-0.5 * solved.square().sum() - factor.diagonal().log().sum())
    return evidence


def heat(steps: int) -> Tensor:
    """The heat equation by Fourier's method, with a source that moves."""
    size = 96
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    waves = torch.fft.fftfreq(size)[:, None].square() + torch.fft.rfftfreq(size)[None].square()
    decay = torch.exp(-40 * waves)
    field = torch.zeros(size, size)
    for step in range(steps):
        centre = np.cos(step / 10)
        source = torch.exp(-20 * ((x - centre).square() + y.square()))
        spectrum = torch.fft.rfft2(field + source)
        field = torch.fft.irfft2(spectrum * decay, s=(size, size))
    return field


@torch.inference_mode()
def evaluation(steps: int) -> Tensor:
    """Accuracy over a test set, read once at its end."""
    random = seeded()
    first, second, out = nn.Linear(50, 128), nn.Linear(128, 128), nn.Linear(128, 8)
    right = torch.zeros((), dtype=torch.long)
    for _ in range(steps):
        x, labels = torch.randn(200, 50, generator=random), torch.randint(0, 8, (200,), generator=random)
        hidden = F.relu(first(x))
        hidden = F.relu(second(hidden))
        right += (out(hidden).argmax(1) == labels).sum()
    return right


@torch.inference_mode()
def message_passing(steps: int) -> list[Tensor]:
    """Label propagation over a graph."""
    random = seeded()
    source, target = torch.randint(0, 1000, (2, 6000), generator=random)
    degree = torch.bincount(target, minlength=1000).clamp(min=1)[:, None]
    belief, known = torch.rand(1000, 8, generator=random), torch.rand(1000, 1, generator=random) < 0.1
    start, history = belief.clone(), []
    for _ in range(steps):
        sent = belief.index_select(0, source)
        received = torch.zeros(1000, 8).index_add_(0, target, sent) / degree
        belief = torch.where(known, start, F.normalize(received, p=1.0, dim=1))
        history.append(belief.amax(1).mean())
    return [belief, *history]


@torch.inference_mode()
def beam_search(steps: int) -> list[Tensor]:
    """The most probable paths through a random transition network."""
    random = seeded()
    embed, onward, head = nn.Embedding(120, 64), nn.Linear(64, 64), nn.Linear(64, 120)
    paths = []
    for start in torch.randint(0, 120, (steps,), generator=random):
        beams, scores = start.repeat(8, 1), torch.tensor([0.0] + [-1e9] * 7)
        for _ in range(10):
            state = torch.tanh(onward(embed(beams[:, -1])))
            total = scores[:, None] + head(state).log_softmax(1)
            scores, chosen = total.flatten().topk(8)
            beams = torch.cat([beams[chosen // 120], (chosen % 120)[:, None]], dim=1)
        paths.append(beams[0])
    return paths


def jitted_network(steps: int) -> list[np.ndarray]:
    """A multilayer perceptron in JAX, one jitted update."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=shape) * 0.1) for shape in ((32, 128), (128, 128), (128, 4))]
    x, y = jnp.asarray(rng.normal(size=(256, 32))), jnp.asarray(rng.normal(size=(256, 4)))

    def loss_of(params: list[jax.Array]) -> jax.Array:
        hidden = jax.nn.relu(x @ params[0])
        hidden = jax.nn.relu(hidden @ params[1])
        return jnp.mean((hidden @ params[2] - y) ** 2)

    @jax.jit
    def update(params: list[jax.Array]) -> list[jax.Array]:
        return [p - 0.05 * g for p, g in zip(params, jax.grad(loss_of)(params), strict=True)]

    for _ in range(steps):
        params = update(params)
    return [np.asarray(p) for p in params]


def scanned_recurrence(steps: int) -> np.ndarray:
    """A recurrent network in JAX by `lax.scan`."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=shape) * 0.1) for shape in ((8, 48), (48, 48), (48, 8))]
    series = jnp.asarray(rng.normal(size=(40, 32, 8)))

    def loss_of(params: list[jax.Array]) -> jax.Array:
        def advance(state: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(item @ params[0] + state @ params[1])
            return state, state @ params[2]

        _, predicted = jax.lax.scan(advance, jnp.zeros((32, 48)), series)
        return jnp.mean((predicted[:-1] - series[1:]) ** 2)

    gradient = jax.jit(jax.value_and_grad(loss_of))
    losses = []
    for _ in range(steps):
        loss, gradients = gradient(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        losses.append(loss)
    return np.asarray(losses)


def vectorized_ensemble(steps: int) -> np.ndarray:
    """Ridge regressions of many bootstrap samples in JAX by `vmap`."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(200, 16))), jnp.asarray(rng.normal(size=200))

    def ridge(rows: jax.Array) -> jax.Array:
        gram = x[rows].T @ x[rows] + jnp.eye(16)
        return jnp.linalg.solve(gram, x[rows].T @ y[rows])

    ensemble = jax.jit(jax.vmap(ridge))
    found = [ensemble(rng.integers(0, 200, (64, 200))).mean(0) for _ in range(steps)]
    return np.stack(found)


PROGRAMS = [
    Clean("neighbours", neighbours, 200),
    Clean("logistic-regression", logistic_regression, 500),
    Clean("gaussian-process", gaussian_process, 1500),
    Clean("heat", heat, 2500),
    Clean("evaluation", evaluation, 1500),
    Clean("message-passing", message_passing, 1500),
    Clean("beam-search", beam_search, 500),
    Clean("jitted-network", jitted_network, 1200, "jax"),
    Clean("scanned-recurrence", scanned_recurrence, 250, "jax"),
    Clean("vectorized-ensemble", vectorized_ensemble, 120, "jax"),
]
