"""Numerical and other programs without any of the nine faults."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Clean, seeded


def mixture(steps: int) -> list[Tensor]:
    """Expectation maximization of a mixture of normal distributions of one width."""
    random = seeded()
    points = torch.randn(6000, 48, generator=random)
    squares = points.square().sum(1, keepdim=True)
    means = points[:64].clone()
    likelihood = []
    for _ in range(steps):
        closeness = torch.addmm(squares + means.square().sum(1), points, means.T, beta=-0.5)
        likelihood.append(closeness.logsumexp(1).mean())
        shares = closeness.softmax(1)
        means = (shares.T @ points) / shares.sum(0).unsqueeze(1)
    return [means, torch.stack(likelihood)]


def waves(steps: int) -> list[Tensor]:
    """The wave equation in a box with reflecting sides, by its spectrum."""
    random = seeded()
    height = torch.randn(384, 384, generator=random)
    number = torch.fft.fftfreq(384).unsqueeze(1).square() + torch.fft.rfftfreq(384).square()
    turn = torch.polar(torch.ones_like(number), number.sqrt())
    energy = []
    for _ in range(steps):
        spectrum = torch.fft.rfft2(height)
        spectrum *= turn
        height = torch.fft.irfft2(spectrum, s=(384, 384))
        energy.append(torch.histc(spectrum.abs(), 32, 0, 800))
    return [height, torch.stack(energy)]


def eigenvectors(steps: int) -> list[Tensor]:
    """The largest eigenvalues, by subspace iteration."""
    random = seeded()
    root = torch.randn(500, 500, generator=random)
    matrix = root @ root.T / 500
    basis, values = torch.randn(500, 96, generator=random), []
    for _ in range(steps):
        basis = torch.linalg.qr(basis).Q
        image = matrix @ basis
        values.append(torch.linalg.eigvalsh(basis.T @ image))
        basis = image
    return values


def tracking(steps: int) -> list[Tensor]:
    """Kalman filters of many objects."""
    random = seeded()
    turns = torch.linalg.qr(torch.randn(24, 24, generator=random).double()).Q
    motion, sight = turns * 0.98, torch.randn(12, 24, generator=random).double()
    state, doubt = torch.zeros(64, 24, 1).double(), torch.eye(24).double().repeat(64, 1, 1)
    noise, blur = torch.eye(24).double() / 100, torch.eye(12).double() / 10
    for _ in range(steps):
        state = motion @ state
        doubt = motion @ doubt @ motion.T + noise
        seen = torch.randn(64, 12, 1, dtype=torch.float64, generator=random)
        crossed = sight @ doubt
        expected = crossed @ sight.T + blur
        gain = torch.cholesky_solve(crossed, torch.linalg.cholesky(expected)).mT
        state = torch.baddbmm(state, gain, seen - sight @ state)
        doubt = torch.baddbmm(doubt, gain, crossed, alpha=-1)
    return [state, doubt]


def options(steps: int) -> np.ndarray:
    """Prices of options whose paths are simulated; NumPy only."""
    rng = np.random.default_rng(0)
    prices = []
    for number in range(steps):
        moves = rng.normal(size=(1000, 50))
        moves = np.concatenate([moves, -moves])
        paths = np.exp(np.cumsum(moves * 0.02 - 0.0002, axis=1))
        highest = np.maximum.accumulate(paths, axis=1)
        worst = (highest - paths).max(axis=1)
        prices.append([np.maximum(paths[:, -1] - 1 - number / 1000, 0).mean(), np.median(worst)])
    return np.array(prices)


def words(steps: int) -> np.ndarray:
    """Counts words, and pairs of those which come first; Python only."""
    rng = np.random.default_rng(0)
    lexicon = ["".join(chr(97 + letter) for letter in rng.integers(0, 26, 6)) for _ in range(500)]
    counts: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for _ in range(steps):
        text = " ".join(lexicon[number] for number in rng.integers(0, 500, 3000))
        found = re.findall(r"[a-z]+", text.title().lower())
        counts.update(found)
        pairs.update(pairwise(found[:1000]))
    return np.array([counts.most_common(1)[0][1], pairs.most_common(1)[0][1], len(pairs)])


def ridge(steps: int) -> list[Tensor]:
    """Cross-validated ridge regression."""
    random = seeded()
    x, y = torch.randn(5, 800, 160, generator=random), torch.randn(5, 800, 4, generator=random)
    errors = []
    for number in range(steps):
        kept = [fold for fold in range(5) if fold != number % 5]
        train, wanted = x[kept].flatten(0, 1), y[kept].flatten(0, 1)
        gram = train.T @ train + (1 + number) * torch.eye(160)
        solution = torch.cholesky_solve(train.T @ wanted, torch.linalg.cholesky(gram))
        weak = torch.linalg.eigvalsh(gram)[0]
        errors.append(F.mse_loss(x[number % 5] @ solution, y[number % 5]) / weak)
    return [torch.stack(errors)]


def pictures(steps: int) -> list[Tensor]:
    """Edges, blobs and local maxima of images, by filters."""
    random = seeded()
    blur, edges = torch.ones(1, 1, 9, 9) / 81, torch.randn(4, 1, 5, 5, generator=random)
    found = []
    for _ in range(steps):
        image = torch.rand(4, 1, 160, 160, generator=random)
        smooth = F.conv2d(image, blur, padding=4)
        strength = F.conv2d(smooth, edges, padding=2).amax(1, keepdim=True)
        peaks = F.max_pool2d(strength, 3, stride=1, padding=1)
        found.append(torch.histc(peaks, 16, 0, 10))
        found.append(strength.flatten(1).topk(20).values.mean(1))
    return found


def flock(steps: int) -> list[Tensor]:
    """Birds that take on the ways of those which are near."""
    random = seeded()
    places, ways = torch.randn(2, 600, 96, generator=random)
    for _ in range(steps):
        distances = torch.cdist(places, places)
        nearness = F.softmin(distances, dim=1)
        ways = torch.lerp(ways, nearness @ ways, 0.2)
        crowds = nearness.T @ places
        places = torch.lerp(places, crowds, -0.01).add(ways, alpha=1e-2)
    return [places, ways]


def queues(steps: int) -> list[Tensor]:
    """How long customers wait whose arrivals are random."""
    random = seeded()
    found = []
    for _ in range(steps):
        gaps, services = torch.rand(2, 30_000, generator=random)
        arrivals, work = gaps.cumsum(0), (services * 0.9).cumsum(0)
        waits = work + (arrivals - work).cummax(0).values - arrivals
        ordered = waits.sort().values
        places = torch.searchsorted(ordered, torch.rand(20_000, generator=random))
        counts = torch.bincount(places // 300, minlength=100)
        late = torch.searchsorted(arrivals, arrivals[::2] + 20)
        found.append(torch.stack([ordered[29_000], counts.float().std(), late.float().mean()]))
    return found


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (mixture, 200),
        (waves, 350),
        (eigenvectors, 300),
        (tracking, 900),
        (options, 250),
        (words, 240),
        (ridge, 150),
        (pictures, 80),
        (flock, 150),
        (queues, 150),
    )
]
