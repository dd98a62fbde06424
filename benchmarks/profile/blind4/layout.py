"""Tensors that are converted, and soon converted back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded

WINDOW = 8


def to_windows(x: Tensor) -> Tensor:
    """Squares of a picture: (batch, height, width, channels) to (windows, pixels, channels)."""
    batch, height, width, channels = x.shape
    x = x.view(batch, height // WINDOW, WINDOW, width // WINDOW, WINDOW, channels)
    return x.transpose(2, 3).contiguous().view(-1, WINDOW * WINDOW, channels)  # fault: windows-each-layer


def from_windows(x: Tensor, height: int, width: int) -> Tensor:
    x = x.view(-1, height // WINDOW, width // WINDOW, WINDOW, WINDOW, x.shape[2])
    return x.transpose(2, 3).contiguous().view(-1, height, width, x.shape[5])  # fault: windows-each-layer


class WindowMixer(nn.Module):
    """Mixes the channels of pixels with the mean of their window."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.own, self.common = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        common = self.common(x.mean(1, keepdim=True))
        return F.relu(self.own(x) + common)


def textures(steps: int, each_layer: bool) -> list[Tensor]:
    """Textures of pictures, by layers that all have the same windows."""
    random = seeded()
    layers = nn.ModuleList([WindowMixer(16) for _ in range(6)])
    found = []
    with torch.no_grad():
        for _ in range(steps):
            x = torch.randn(4, 96, 96, 16, generator=random)
            if each_layer:
                for layer in layers:
                    windows = to_windows(x)
                    x = from_windows(layer(windows), 96, 96)
            else:
                windows = x.view(4, 12, WINDOW, 12, WINDOW, 16).transpose(2, 3).reshape(-1, WINDOW * WINDOW, 16)
                for layer in layers:
                    windows = layer(windows)
                x = windows.view(4, 12, 12, WINDOW, WINDOW, 16).transpose(2, 3).reshape(4, 96, 96, 16)
            found.append(x.amax((1, 2)))
    return found


class Schedule:
    """How much of a picture and how much noise there is at each of a hundred times."""

    def __init__(self, dtype: torch.dtype) -> None:
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100, dtype=torch.float64), 0)
        self.picture, self.noise = kept.sqrt().to(dtype), (1 - kept).sqrt().to(dtype)

    def at(self, values: Tensor, time: Tensor) -> Tensor:
        return values[time].view(-1, 1, 1, 1)

    def denoise(self, noisy: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """One step of sampling, from the noise that the network told."""
        picture = (noisy - self.at(self.noise, time) * noise) / self.at(self.picture, time)  # fault: schedule-in-double
        before = (time - 1).clamp(min=0)
        return (
            self.at(self.picture, before) * picture + self.at(self.noise, before) * noise
        )  # fault: schedule-in-double


def sampling(steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Pictures from noise; the network takes single precision."""
    random = seeded()
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    schedule = Schedule(dtype)
    x = torch.randn(8, 3, 48, 48, generator=random)
    with torch.no_grad():
        for number in range(steps):
            time = torch.full((8,), 99 - number % 100)
            noise = network(x.float())  # fault: schedule-in-double
            x = schedule.denoise(x, noise, time).clamp(-3, 3)
    return [x.float()]


def balance_dense(adjacency: Tensor, importance: Tensor) -> Tensor:
    """The adjacency matrix, with each node's edges by the importance of where they come from."""
    dense = adjacency.to_dense()  # fault: sparse-and-dense
    return (dense * importance).to_sparse()  # fault: sparse-and-dense


def balance_sparse(adjacency: Tensor, importance: Tensor) -> Tensor:
    places, values = adjacency.indices(), adjacency.values()
    weighted = values * importance.index_select(0, places[1])
    return torch.sparse_coo_tensor(places, weighted, adjacency.shape, is_coalesced=True, check_invariants=False)


def influence(steps: int, balance: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Who matters in a social network, asked again and again with what the last answer was."""
    random = seeded()
    people = 600
    edges = torch.randint(0, people, (2, 6000), generator=random)
    adjacency = torch.sparse_coo_tensor(
        edges, torch.rand(6000, generator=random), (people, people), check_invariants=False
    ).coalesce()
    opinions, mix = torch.randn(people, 64, generator=random), torch.randn(64, 64, generator=random) / 8
    importance = torch.ones(people)
    for _ in range(steps):
        weighted = balance(adjacency, importance)
        heard = torch.sparse.mm(weighted, opinions)
        opinions = torch.tanh(heard @ mix) + 0.1 * opinions
        importance = opinions.square().mean(1).sqrt()
    return [opinions, importance]


PROGRAMS = [
    Planted(name, "layout", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("windows-each-layer", lambda n: textures(n, True), lambda n: textures(n, False), 40),
        (
            "schedule-in-double",
            lambda n: sampling(n, torch.float64),
            lambda n: sampling(n, torch.float32),
            500,
        ),
        (
            "sparse-and-dense",
            lambda n: influence(n, balance_dense),
            lambda n: influence(n, balance_sparse),
            400,
        ),
    )
]
