"""Hotspots: a line that takes most of the time, and does more than it has to."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class RetrievalHead(nn.Module):
    """Scores queries against a memory and averages what the best eight remember."""

    def __init__(self, whole_sort: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.memory = nn.Parameter(torch.randn(4096, 32))
        self.values = nn.Parameter(torch.randn(4096, 16))
        self.whole_sort = whole_sort

    def best(self, scores: Tensor) -> Tensor:
        if self.whole_sort:
            return scores.detach().sort(dim=1, descending=True).indices[:, :8]  # fault: sort-for-eight
        return scores.detach().topk(8, dim=1).indices

    def forward(self, x: Tensor) -> Tensor:
        query = self.encoder(x)
        scores = query @ self.memory.T
        chosen = self.best(scores)
        share = F.softmax(scores.gather(1, chosen), dim=1)
        remembered = F.embedding(chosen, self.values)
        return torch.einsum("bk,bkd->bd", share, remembered)


def retrieval(steps: int, whole_sort: bool) -> list[Tensor]:
    random = seeded()
    model = RetrievalHead(whole_sort)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    x, y = torch.randn(64, 64, generator=random), torch.randn(64, 16, generator=random)
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def nearest_centre(points: Tensor, centres: Tensor, broadcast: bool) -> Tensor:
    if broadcast:
        return (points[:, None, :] - centres[None, :, :]).pow(2).sum(-1).argmin(1)  # fault: broadcast-distances
    products = points @ centres.T
    scores = centres.square().sum(1) - 2 * products
    return scores.argmin(1)


def k_means(steps: int, broadcast: bool) -> Tensor:
    random = seeded()
    points = torch.randn(3000, 8, generator=random).double() + 4 * torch.randint(0, 3, (3000, 1), generator=random)
    centres = points[:48].clone()
    for _ in range(steps):
        label = nearest_centre(points, centres, broadcast)
        total = torch.zeros_like(centres).index_add_(0, label, points)
        count = torch.bincount(label, minlength=len(centres)).clamp_(min=1)
        centres = total / count[:, None]
    return centres


def kalman_gain_by_inverse(covariance: Tensor, noise: Tensor, observe: Tensor) -> Tensor:
    return covariance @ observe.mT @ torch.linalg.pinv(observe @ covariance @ observe.mT + noise)  # fault: pinv-solve


def kalman_gain_by_cholesky(covariance: Tensor, noise: Tensor, observe: Tensor) -> Tensor:
    cross = observe @ covariance
    factor = torch.linalg.cholesky(cross @ observe.mT + noise)
    return torch.cholesky_solve(cross, factor).mT


def kalman(steps: int, by_inverse: bool) -> list[Tensor]:
    random = seeded()
    size = 48
    gain_of = kalman_gain_by_inverse if by_inverse else kalman_gain_by_cholesky
    state, covariance = torch.zeros(size, dtype=torch.float64), torch.eye(size, dtype=torch.float64)
    move = 0.95 * torch.eye(size).double() + 0.01 * torch.randn(size, size, generator=random).double()
    observe = torch.randn(40, size, generator=random, dtype=torch.float64) / math.sqrt(size)
    noise = 0.1 * torch.eye(40, dtype=torch.float64)
    for measured in torch.randn(steps, 40, generator=random, dtype=torch.float64):
        state = move @ state
        covariance = move @ covariance @ move.mT + noise[0, 0] * torch.eye(size, dtype=torch.float64)
        gain = gain_of(covariance, noise, observe)
        state = state + gain @ (measured - observe @ state)
        covariance = covariance - gain @ observe @ covariance
        covariance = (covariance + covariance.mT) / 2
    return [state, covariance]


def windows_in_python(signal: np.ndarray, size: int) -> np.ndarray:
    rows = []
    for start in range(len(signal) - size + 1):
        rows.append([float(value) for value in signal[start : start + size]])  # fault: windows-in-python
    return np.array(rows)


def autoregression(steps: int, in_python: bool) -> list[Tensor]:
    rng = np.random.default_rng(0)
    coefficients = []
    for _ in range(steps):
        signal = np.cumsum(rng.normal(size=600)) * 0.1
        rows = windows_in_python(signal, 17) if in_python else np.lib.stride_tricks.sliding_window_view(signal, 17)
        design, target = torch.from_numpy(rows[:, :16].copy()), torch.from_numpy(rows[:, 16:].copy())
        gram = design.T @ design + 1e-3 * torch.eye(16, dtype=torch.float64)
        coefficients.append(torch.linalg.solve(gram, design.T @ target))
    return coefficients


PROGRAMS = [
    Planted("sort-for-eight", "hotspot", lambda n: retrieval(n, True), lambda n: retrieval(n, False), 40, __name__),
    Planted("broadcast-distances", "hotspot", lambda n: k_means(n, True), lambda n: k_means(n, False), 60, __name__),
    Planted("pinv-solve", "hotspot", lambda n: kalman(n, True), lambda n: kalman(n, False), 1000, __name__),
    Planted(
        "windows-in-python",
        "hotspot",
        lambda n: autoregression(n, True),
        lambda n: autoregression(n, False),
        250,
        __name__,
    ),
]
