"""Computations other than the training of networks, without any of the nine faults."""

from __future__ import annotations

import random as plain
from collections import Counter
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Clean, seeded


def clusters(steps: int) -> list[Tensor]:
    """K-means; distances by a product, sums by the number of the cluster."""
    random = seeded()
    points = torch.randn(3000, 128, generator=random)
    centers, ones = points[:40].clone(), torch.ones(3000)
    for _ in range(steps):
        farther = torch.addmm(centers.square().sum(1), points, centers.T, alpha=-2)
        nearest = farther.argmin(1)
        sums = torch.zeros(40, 128).index_add_(0, nearest, points)
        counts = torch.zeros(40).index_add_(0, nearest, ones)
        centers = sums / counts.clamp(min=1).unsqueeze(1)
    return [centers]


def steepest(steps: int) -> list[Tensor]:
    """Conjugate gradients on many systems; how far to go stays in tensors."""
    random = seeded()
    roots = torch.randn(32, 40, 40, generator=random) / 6
    matrices = torch.baddbmm(torch.eye(40).expand(32, 40, 40), roots, roots.mT)
    answers = []
    for _ in range(steps):
        wanted = torch.randn(32, 40, 1, generator=random)
        x, rest = torch.zeros_like(wanted), wanted.clone()
        direction, size = rest.clone(), torch.bmm(rest.mT, rest)
        for _ in range(12):
            image = torch.bmm(matrices, direction)
            far = size / torch.bmm(direction.mT, image)
            x = torch.addcmul(x, far, direction)
            rest = torch.addcmul(rest, -far, image)
            before, size = size, torch.bmm(rest.mT, rest)
            direction = torch.addcmul(rest, size / before, direction)
        answers.append(x.norm(dim=1))
    return answers


def sensors(steps: int) -> list[Tensor]:
    """Kalman filters of 128 things at once."""
    random = seeded()
    turn = 0.95 * torch.eye(6) + 0.05 * torch.diag(torch.ones(5), 1)
    watch, noise = torch.randn(3, 6, generator=random), torch.eye(3)
    state, doubt = torch.zeros(128, 6, 1), torch.eye(6).repeat(128, 1, 1)
    seen = []
    for _ in range(steps):
        state = turn @ state
        doubt = turn @ doubt @ turn.T + 0.01 * torch.eye(6)
        surprise = torch.randn(128, 3, 1, generator=random) - watch @ state
        cross = doubt @ watch.T
        gain = torch.linalg.solve(watch @ cross + noise, cross.mT).mT
        state = state + gain @ surprise
        doubt = doubt - gain @ cross.mT
        seen.append(state[:8, :, 0])
    return [torch.stack(seen)]


def prices(steps: int) -> list[Tensor]:
    """What options on the average of a price are worth, and how that depends on the price (by a backward pass)."""
    random = seeded()
    start, spread = torch.tensor(100.0, requires_grad=True), torch.tensor(0.2, requires_grad=True)
    worth = []
    for _ in range(steps):
        shocks = torch.randn(2000, 50, generator=random)
        logs = (spread * 0.02**0.5 * shocks - 0.01 * spread * spread).cumsum(1)
        paths = start * logs.exp()
        gain = F.relu(paths.mean(1) - 100).mean()
        slopes = torch.autograd.grad(gain, (start, spread))
        worth.append(torch.stack([gain.detach(), *slopes]))
    return worth


def plates(steps: int) -> list[Tensor]:
    """Two substances that react and spread (Gray and Scott), on a grid that is closed in itself."""
    random = seeded()
    u, v = torch.ones(160, 160), torch.zeros(160, 160)
    v[60:90, 60:90] = 0.5 + 0.1 * torch.rand(30, 30, generator=random)
    for _ in range(steps):
        around_u = u.roll(1, 0) + u.roll(-1, 0)
        around_u = around_u + u.roll(1, 1) + u.roll(-1, 1)
        around_v = v.roll(1, 0) + v.roll(-1, 0)
        around_v = around_v + v.roll(1, 1) + v.roll(-1, 1)
        reaction = u * v * v
        u = u.mul(0.816).sub_(reaction).add_(around_u, alpha=0.04).add_(0.024)
        v = v.mul(0.84).add_(reaction).add_(around_v, alpha=0.02)
    return [u, v]


def spectra(steps: int) -> list[Tensor]:
    """Loudness of bands of sounds, evened out over time."""
    random = seeded()
    window, bands = torch.hann_window(256), torch.rand(129, 160, generator=random) / 129
    waves_of_bands = torch.randn(160, 48, generator=random) / 13
    sums = torch.zeros(48)
    for _ in range(steps):
        sound = torch.randn(16, 4096, generator=random)
        frames = sound.unfold(1, 256, 128) * window
        waves = torch.fft.rfft(frames)
        power = torch.view_as_real(waves).square().sum(3)
        loudness = (power @ bands).add_(1e-5).log_()
        smooth = F.avg_pool1d((loudness @ waves_of_bands).mT, 5, stride=1, padding=2)
        sums += smooth.mean((0, 2))
    return [sums]


def areas_under_curves(steps: int) -> list[Tensor]:
    """How well 20 models rank, whose scores come in batches and are judged at the end of each round."""
    random = seeded()
    first, second = torch.randn(256, 192, generator=random) / 16, torch.randn(192, 20, generator=random) / 14
    areas = []
    for _ in range(steps):
        scores, labels = [], []
        for _ in range(4):
            rows = torch.randn(500, 256, generator=random)
            hidden = torch.tanh(rows @ first)
            scores.append((hidden @ second).T)
            labels.append((rows[:, :20].T > 0.5).float())
        order = torch.cat(scores, 1)[:, :1000].argsort(1, descending=True)
        hits = torch.cat(labels, 1).gather(1, order)
        positives = hits.cumsum(1)
        areas.append(((1 - hits) * positives).sum(1) / (positives[:, -1] * (1000 - positives[:, -1])))
    return areas


def counting_words(steps: int) -> list[Tensor]:
    """Words that are counted in plain Python, and how surprising texts are by the counts."""
    dice = plain.Random(0)
    syllables = ["ka", "to", "mi", "ra", "ne", "so", "lu", "ve"]
    vocabulary = ["".join(dice.choices(syllables, k=3)) for _ in range(200)]
    surprises = []
    for _ in range(steps):
        text = " ".join(dice.choices(vocabulary, k=2000))
        words = text.split()
        counts = Counter(words)
        pairs = Counter(pairwise(words))
        numbers = {word: number for number, word in enumerate(sorted(counts))}
        table = torch.ones(len(numbers), len(numbers))
        firsts = torch.tensor([numbers[first] for first, _ in pairs])
        seconds = torch.tensor([numbers[second] for _, second in pairs])
        table.index_put_((firsts, seconds), torch.tensor([float(count) for count in pairs.values()]))
        logs = (table / table.sum(1, keepdim=True)).log()
        surprises.append(-logs[firsts, seconds].mean())
    return [torch.stack(surprises)]


def hidden_states(steps: int) -> list[Tensor]:
    """Chances of the states of hidden Markov models, for 64 sequences at once: one loop forward, one back."""
    random = seeded()
    change = torch.randn(48, 48, generator=random).softmax(1)
    answers = []
    for _ in range(steps):
        seen = torch.rand(30, 64, 48, generator=random).add_(0.1)
        ahead, behind = [torch.full((64, 48), 1 / 48)], [torch.ones(64, 48)]
        for now in seen.unbind():
            before = torch.mm(ahead[-1], change) * now
            ahead.append(before / before.sum(1, keepdim=True))
        for now in reversed(seen.unbind()):
            after = torch.mm(behind[-1] * now, change.T)
            behind.append(after / after.mean(1, keepdim=True))
        chances = torch.stack(ahead) * torch.stack(behind[::-1])
        answers.append((chances / chances.sum(2, keepdim=True)).square().mean((1, 2)))
    return answers


def magnets(steps: int) -> list[Tensor]:
    """Ising model; the two colours of a chessboard by turns, how many point up is noted as a tensor."""
    random = seeded()
    spins = torch.where(torch.rand(128, 128, generator=random) < 0.5, 1.0, -1.0)
    rows, columns = torch.meshgrid(torch.arange(128), torch.arange(128), indexing="ij")
    white = (rows + columns) % 2 == 0
    upward = []
    for _ in range(steps):
        dice = torch.rand(128, 128, generator=random)
        for colour in (white, ~white):
            around = spins.roll(1, 0) + spins.roll(-1, 0)
            around = around + spins.roll(1, 1) + spins.roll(-1, 1)
            chance = torch.sigmoid(0.88 * around)
            drawn = torch.where(dice < chance, 1.0, -1.0)
            spins = torch.where(colour, drawn, spins)
        upward.append(spins.mean())
    return [spins, torch.stack(upward)]


def planets(steps: int) -> list[Tensor]:
    """Bodies that attract each other; forces are computed for all pairs."""
    random = seeded()
    place, speed = torch.randn(160, 3, generator=random), 0.1 * torch.randn(160, 3, generator=random)
    mass = torch.rand(160, generator=random) / 160
    for _ in range(steps):
        lengths = place.square().sum(1)
        distances = torch.addmm(lengths.unsqueeze(1) + (lengths + 0.05), place, place.T, alpha=-2)
        pull = distances.rsqrt().pow(3)
        pull = pull * mass
        force = pull @ place - pull.sum(1, keepdim=True) * place
        speed = torch.add(speed, force, alpha=0.01)
        place = torch.add(place, speed, alpha=0.01)
    return [place, speed]


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (clusters, 1000),
        (steepest, 1200),
        (sensors, 3500),
        (prices, 700),
        (plates, 2500),
        (spectra, 1000),
        (areas_under_curves, 200),
        (counting_words, 500),
        (hidden_states, 350),
        (magnets, 2000),
        (planets, 9000),
    )
]
