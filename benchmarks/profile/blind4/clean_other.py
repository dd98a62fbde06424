"""Programs that train no network, without any of the nine faults."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Clean, seeded


def rank_of_pages(steps: int) -> list[Tensor]:
    """Ranks of pages for one reader after the other; whether they have settled is asked at the end of each."""
    random = seeded()
    pages = 3000
    links = torch.randint(0, pages, (2, 2000), generator=random)
    matrix = torch.sparse_coo_tensor(links, torch.full((2000,), 0.5), (pages, pages), check_invariants=False).coalesce()
    ranks = torch.full((pages, 8), 1 / pages)
    leaps, settled = ranks, 0
    for number in range(steps):
        if number % 50 == 0:
            leaps = F.normalize(torch.rand(pages, 8, generator=random), p=1, dim=0)
        followed = torch.sparse.mm(matrix, ranks)
        mixed = torch.lerp(leaps, followed, 0.85)
        following = F.normalize(mixed, p=1, dim=0)
        if number % 50 == 49:
            settled += torch.allclose(ranks, following, atol=1e-8)
        ranks = following
    return [ranks, torch.tensor(settled)]


def fluid(steps: int) -> list[Tensor]:
    """A vortex on a torus; derivatives are products in frequency, whence each step goes there and back."""
    random = seeded()
    size = 96
    rows, columns = torch.fft.fftfreq(size, 1 / size)[:, None], torch.fft.rfftfreq(size, 1 / size)[None]
    squares = rows.square() + columns.square()
    inverse = torch.where(squares > 0, 1 / squares.clamp(min=1), 0)
    low = ((rows.abs() < size / 3) & (columns < size / 3)).float()
    vortex = torch.fft.rfft2(torch.randn(size, size, generator=random)) * low
    for _ in range(steps):
        stream = vortex * inverse
        right, down = torch.fft.irfft2(1j * rows * stream), torch.fft.irfft2(-1j * columns * stream)
        along, across = torch.fft.irfft2(1j * columns * vortex), torch.fft.irfft2(1j * rows * vortex)
        carried = torch.fft.rfft2(right * along + down * across) * low
        vortex = (vortex - 1e-5 * carried) / (1 + 1e-4 * squares)
    return [torch.fft.irfft2(vortex)]


def resampled(steps: int) -> list[Tensor]:
    """How sure a slope is, from samples drawn again."""
    random = seeded()
    x = torch.randn(4000, generator=random)
    y = 0.5 * x + torch.randn(4000, generator=random)
    slopes = []
    for _ in range(steps):
        drawn = torch.randint(0, 4000, (20, 4000), generator=random)
        one, other = x[drawn], y[drawn]
        one = one - one.mean(1, keepdim=True)
        other = other - other.mean(1, keepdim=True)
        slopes.append((one * other).sum(1) / one.square().sum(1))
    return [torch.cat(slopes).quantile(torch.tensor([0.05, 0.5, 0.95]))]


def life(steps: int) -> list[Tensor]:
    """The game of life, in bytes all along."""
    random = seeded()
    cells = (torch.rand(400, 400, generator=random) < 0.3).to(torch.uint8)
    for _ in range(steps):
        across = cells.roll(1, 1) + cells + cells.roll(-1, 1)
        around = across.roll(1, 0) + across + across.roll(-1, 0)
        born = around == 3
        full = around == 4
        stays = full & cells.bool()
        cells = (born | stays).to(torch.uint8)
    return [cells.float()]


def posterior(steps: int) -> list[Tensor]:
    """Hamiltonian sampling of a logistic regression, whose gradient is known."""
    random = seeded()
    x, truth = torch.randn(600, 24, generator=random), torch.randn(24, 1, generator=random)
    y = (torch.rand(600, 1, generator=random) < (x @ truth).sigmoid()).float()
    places = torch.zeros(24, 32)
    samples = []
    for _ in range(steps):
        speeds = torch.randn(24, 32, generator=random)
        for _ in range(8):
            wrong = y - (x @ places).sigmoid()
            slope = x.T @ wrong - places
            speeds = speeds + 0.02 * slope
            places = places + 0.02 * speeds
        samples.append(places.mean(1))
    return [torch.stack(samples)]


def alignment(steps: int) -> list[Tensor]:
    """Melodies warped onto each other, one anti-diagonal after the other for a batch of pairs."""
    random = seeded()
    found = []
    for _ in range(steps):
        one, other = torch.randn(2, 32, 60, generator=random)
        costs = (one[:, :, None] - other[:, None, :]).abs()
        skewed = F.pad(costs, (0, 60), value=torch.inf).flatten(1)[:, :-60].view(32, 60, 119)
        before = torch.full((32, 61), torch.inf)
        last = before.clone()
        last[:, 1] = skewed[:, 0, 0]
        for diagonal in skewed.unbind(2)[1:]:
            step = torch.minimum(last[:, :-1], before[:, :-1])
            best = torch.minimum(step, last[:, 1:])
            before, last = last, F.pad(diagonal + best, (1, 0), value=torch.inf)
        found.append(last[:, -1])
    return found


def evolved(steps: int) -> list[Tensor]:
    """A population of controllers, all of which act at once."""
    random = seeded()
    lower, upper = torch.randn(64, 6, 32, generator=random), torch.randn(64, 32, 6, generator=random)
    states = torch.randn(64, 24, 6, generator=random)
    for _ in range(steps):
        trial = states
        for _ in range(6):
            seen = torch.bmm(trial, lower).relu()
            pushed = torch.bmm(seen, upper).tanh()
            trial = torch.lerp(trial, pushed, 0.1)
        fitness = -trial.square().sum((1, 2))
        best = fitness.topk(16).indices.repeat(4)
        lower = lower[best] + 0.05 * torch.randn(lower.shape, generator=random)
        upper = upper[best] + 0.05 * torch.randn(upper.shape, generator=random)
    return [lower, upper]


def molecules(steps: int) -> list[Tensor]:
    """Particles that repel each other, pushed by the gradient of their energy."""
    random = seeded()
    places, speeds = torch.rand(160, 3, generator=random) * 6, torch.zeros(160, 3)
    first, second = torch.triu_indices(160, 160, 1)
    for _ in range(steps):
        at = places.detach().requires_grad_()
        gaps = at.index_select(0, first) - at.index_select(0, second)
        squares = gaps.square().sum(1) + 0.1
        inverse = squares.reciprocal()
        cubes = inverse * inverse * inverse
        (push,) = torch.autograd.grad((cubes - inverse).sum(), at)
        speeds = 0.99 * speeds - 0.001 * push.clamp(-50, 50)
        places = places + 0.01 * speeds
    return [places]


def joined(steps: int) -> list[Tensor]:
    """Sales joined to prices by their keys, and summed up by shop."""
    random = seeded()
    found = []
    for _ in range(steps):
        keys = torch.randperm(40_000, generator=random)[:8000].sort().values
        prices, sold = torch.rand(8000, generator=random), torch.randint(0, 40_000, (8000,), generator=random)
        shops = torch.randint(0, 50, (8000,), generator=random)
        places = torch.searchsorted(keys, sold).clamp(max=7999)
        known = keys.index_select(0, places) == sold
        takings = prices.index_select(0, places) * known
        total = torch.zeros(50).index_add(0, shops, takings)
        median = takings[known].median()
        found.append(torch.stack([total.max(), total.std(), median]))
    return found


def rendered(steps: int) -> list[Tensor]:
    """Spheres seen from a camera that goes round them."""
    seeded()
    height = width = 96
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    rays = F.normalize(torch.stack([columns, rows, torch.full_like(rows, 1.5)], 2), dim=2)
    radii = torch.tensor([0.7, 0.5, 0.4, 0.6])
    frames = []
    for number in range(steps):
        turns = torch.arange(4) * 1.6 + 0.05 * number
        centres = torch.stack([turns.cos(), turns.sin() * 0.5, 4 + turns.sin()], 1)
        along = rays @ centres.T
        under = along.square() - centres.square().sum(1) + radii.square()
        hit = under > 0
        depth = along - under.clamp(min=0).sqrt()
        nearest, which = depth.masked_fill(~hit, torch.inf).min(2)
        points = rays * nearest.nan_to_num(posinf=0.0).unsqueeze(2)
        normals = F.normalize(points - centres[which], dim=2)
        bright = (-normals[:, :, 2]).clamp(min=0) * hit.any(2)
        frames.append(bright.mean())
    return [torch.stack(frames)]


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (rank_of_pages, 1000),
        (fluid, 1200),
        (resampled, 500),
        (life, 1000),
        (posterior, 700),
        (alignment, 100),
        (evolved, 200),
        (molecules, 250),
        (joined, 150),
        (rendered, 500),
    )
]
