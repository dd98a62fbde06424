"""Well-written training programs that have something about them that looks like a fault."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profile.planted.program import Clean, seeded, weights


def logging_now_and_then(steps: int) -> list[float]:
    """Takes the loss out every twenty steps."""
    random = seeded()
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    logged, total = [], torch.zeros(())
    for step in range(1, steps + 1):
        x = torch.randn(128, 64, generator=random)
        loss = F.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % 20 == 0:
            logged.append(total.item() / 20)
            total.zero_()
    return logged


def default_optimizer(steps: int) -> list[Tensor]:
    """The optimizer updates one parameter after the other, which is nothing beside the batches."""
    random = seeded()
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, stride=2), nn.ReLU(), nn.Conv2d(24, 10, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x, y = torch.rand(32, 3, 40, 40, generator=random), torch.randint(0, 10, (32,), generator=random)
        loss = F.cross_entropy(model(x).mean(dim=(2, 3)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def loader_that_keeps_up(steps: int) -> list[Tensor]:
    """A data loader without workers gives small samples to a model that is far slower."""
    random = seeded()
    data = TensorDataset(torch.rand(256, 1, 48, 48, generator=random), torch.randint(0, 5, (256,), generator=random))
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True, generator=random)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1), nn.ReLU()) for i, o in ((1, 32), (32, 64), (64, 64))),
        nn.Flatten(),
        nn.Linear(64 * 36, 5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    for _ in range(steps):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model)


def accumulating(steps: int) -> list[Tensor]:
    """Four small batches make one step; gradients are clipped with operators on all tensors."""
    random = seeded()
    layer = nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for _ in range(steps):
        for _ in range(4):
            x = torch.randn(8, 48, 96, generator=random)
            (F.mse_loss(model(x), x.flip(1)) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def recomputing(steps: int) -> list[Tensor]:
    """Activations are computed twice on purpose."""
    random = seeded()
    blocks = nn.ModuleList(
        [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]
    )
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        x = torch.randn(256, 128, generator=random)
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()
    return weights(blocks)


def variational(steps: int) -> list[float]:
    """The divergence of a variational autoencoder is a chain of small operators, on small tensors."""
    random = seeded()
    encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 32))
    decoder = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 784))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        x = torch.rand(128, 784, generator=random)
        mean, logvar = encoder(x).chunk(2, dim=1)
        z = mean + torch.exp(0.5 * logvar) * torch.randn(mean.shape, generator=random)
        reconstruction = F.binary_cross_entropy_with_logits(decoder(z), x, reduction="sum")
        divergence = -0.5 * torch.sum(1 + logvar - mean.square() - logvar.exp())
        loss = (reconstruction + divergence) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def contrastive(steps: int) -> list[Tensor]:
    """Two views of each picture are to have like embeddings; the products of all pairs are the work."""
    random = seeded()
    net = nn.Sequential(nn.Conv2d(3, 32, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 128))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    own = torch.eye(128, dtype=torch.bool)
    for _ in range(steps):
        pictures = torch.rand(64, 3, 32, 32, generator=random)
        views = torch.cat([pictures.flip(3), pictures + 0.1 * torch.randn(pictures.shape, generator=random)])
        embedded = F.normalize(net(views), dim=1)
        logits = (embedded @ embedded.T / 0.2).masked_fill(own, float("-inf"))
        loss = F.cross_entropy(logits, torch.arange(128).roll(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(net)


def spectrograms(steps: int) -> list[Tensor]:
    """Spectrograms are computed in the loop, batch by batch."""
    random = seeded()
    window = torch.hann_window(400)
    model = nn.Sequential(nn.Conv1d(201, 96, 3), nn.ReLU(), nn.Conv1d(96, 96, 3), nn.ReLU(), nn.Conv1d(96, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        waves, labels = torch.randn(16, 16_000, generator=random), torch.randint(0, 8, (16,), generator=random)
        power = torch.stft(waves, 400, 160, window=window, return_complex=True).abs()
        loss = F.cross_entropy(model(power).mean(dim=2), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def recurrent(steps: int) -> list[Tensor]:
    """A recurrent language model, which is a loop over time in one operator."""
    random = seeded()
    model = LanguageModel(400, 96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    text = torch.randint(0, 400, (16, 1 + 32 * 8), generator=random)
    for step in range(steps):
        start = 32 * (step % 8)
        logits = model(text[:, start : start + 32])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, start + 1 : start + 33].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    return weights(model)


def sparse_factors(steps: int) -> list[Tensor]:
    """Factors of a large matrix of ratings, with sparse gradients and the optimizer for these, below a network."""
    random = seeded()
    users, films = nn.Embedding(20_000, 32, sparse=True), nn.Embedding(5_000, 32, sparse=True)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))
    sparse = torch.optim.SparseAdam([*users.parameters(), *films.parameters()], lr=1e-2)
    dense = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        who = torch.randint(0, 20_000, (1024,), generator=random)
        what = torch.randint(0, 5_000, (1024,), generator=random)
        ratings = torch.rand(1024, 1, generator=random)
        loss = F.mse_loss(net(torch.cat([users(who), films(what)], dim=1)), ratings)
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
    return [*weights(users), *weights(films)]


def early_stopping(steps: int) -> list[float]:
    """After each epoch of eight batches the loss on other data decides whether to continue."""
    random = seeded()
    x, y = torch.randn(2560, 50, generator=random), torch.randn(2560, 1, generator=random)
    model = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    history: list[float] = []
    for _ in range(steps):
        for features, target in zip(x[:2048].split(256), y[:2048].split(256), strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(features), target).backward()
            optimizer.step()
        with torch.no_grad():
            history.append(F.mse_loss(model(x[2048:]), y[2048:]).item())
        if len(history) > 1000 and history[-1] > history[-1000]:
            break
    return history


def distillation(steps: int) -> list[Tensor]:
    """A small network learns from the answers of a larger one, which makes no gradients."""
    random = seeded()
    teacher = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 20)).eval()
    student = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 20))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        x = torch.randn(128, 64, generator=random)
        with torch.no_grad():
            answers = teacher(x).div_(2).softmax(dim=1)
        loss = F.kl_div((student(x) / 2).log_softmax(dim=1), answers, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(student)


@cache
def jitted_training() -> tuple[Any, Any]:
    """A step of gradient descent in JAX, traced once."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def update(params: list[Any], x: Any, y: Any) -> list[Any]:
        def loss(params: list[Any]) -> Any:
            hidden = x
            for weight in params[:-1]:
                hidden = jax.nn.gelu(hidden @ weight)
            return jnp.mean((hidden @ params[-1] - y) ** 2)

        return [weight - 0.01 * grad for weight, grad in zip(params, jax.grad(loss)(params), strict=True)]

    rng = np.random.default_rng(0)
    shapes = ((64, 256), (256, 256), (256, 1))
    return update, [jnp.asarray(rng.normal(size=shape) / 16, dtype=jnp.float32) for shape in shapes]


def jax_training(steps: int) -> list[Any]:
    update, params = jitted_training()
    rng = np.random.default_rng(1)
    for _ in range(steps):
        x = rng.normal(size=(256, 64)).astype(np.float32)
        params = update(params, x, x[:, :1])
    return [np.asarray(weight) for weight in params]


PROGRAMS = [
    Clean("logging-now-and-then", logging_now_and_then, steps=200),
    Clean("default-optimizer", default_optimizer, steps=25),
    Clean("loader-that-keeps-up", loader_that_keeps_up, steps=5),
    Clean("accumulating", accumulating, steps=10),
    Clean("recomputing", recomputing, steps=30),
    Clean("variational", variational, steps=150),
    Clean("contrastive", contrastive, steps=80),
    Clean("spectrograms", spectrograms, steps=20),
    Clean("recurrent", recurrent, steps=30),
    Clean("sparse-factors", sparse_factors, steps=40),
    Clean("early-stopping", early_stopping, steps=30),
    Clean("distillation", distillation, steps=150),
    Clean("jax-training", jax_training, steps=150, framework="jax"),
]
