"""Parameters that are updated one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class AverageByName:
    """The average of a model's weights over time, from which samples are drawn."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            kept = self.decay * self.average[name]  # fault: average-by-name
            self.average[name] = kept + (1 - self.decay) * value.detach()  # fault: average-by-name

    def tensors(self) -> list[Tensor]:
        return list(self.average.values())


class AverageOfAll(AverageByName):
    def update(self, model: nn.Module) -> None:
        torch._foreach_lerp_(self.tensors(), [value.detach() for value in model.parameters()], 1 - self.decay)


class TimeBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.expand, self.contract = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Linear(8, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.norm(x) * self.scale(time)
        return x + self.contract(F.silu(self.expand(hidden)))


class PointDenoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(2, 48), nn.Linear(48, 2)
        self.blocks = nn.ModuleList([TimeBlock(48) for _ in range(8)])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.read(x)
        for block in self.blocks:
            x = block(x, time)
        return self.write(x)


def diffusion(steps: int, kind: type[AverageByName]) -> list[Tensor]:
    """Diffusion of points in a plane."""
    random = seeded()
    model = PointDenoiser()
    average = kind(model, 0.99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        points, noise = torch.randn(2, 64, 2, generator=random)
        time = torch.rand(64, 8, generator=random)
        loss = F.mse_loss(model(points + time[:, :1] * noise, time), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
    return average.tensors()


class Adapter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.relu(self.down(x)))


class AdaptedText(nn.Module):
    """Frozen layers, each followed by adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList([nn.Linear(96, 96).requires_grad_(False) for _ in range(10)])
        self.adapters = nn.ModuleList([Adapter(96) for _ in range(10)])
        self.head = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer, adapter in zip(self.frozen, self.adapters, strict=True):
            x = adapter(torch.tanh(layer(x)))
        return self.head(x)


def adapting(steps: int, fused: bool) -> list[Tensor]:
    """Classes of texts whose vectors another network made."""
    random = seeded()
    model = AdaptedText()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adagrad(trained, lr=1e-2, fused=fused)
    for _ in range(steps):
        texts, labels = torch.randn(64, 96, generator=random), torch.randint(0, 4, (64,), generator=random)
        loss = F.cross_entropy(model(texts), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # fault: adagrad-of-adapters
    return weights(model)


def climb_one_by_one(parameters: list[Tensor], radius: float) -> list[Tensor]:
    """Goes to where the loss is highest nearby, and gives the way there."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    ways = []
    for parameter in parameters:
        assert parameter.grad is not None
        way = radius * parameter.grad / (norm + 1e-12)  # fault: climbs-one-by-one
        parameter.add_(way)  # fault: climbs-one-by-one
        ways.append(way)
    return ways


def climb(parameters: list[Tensor], radius: float) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    ways = list(torch._foreach_mul(gradients, radius / (norm + 1e-12)))
    torch._foreach_add_(parameters, ways)
    return ways


def descend_one_by_one(parameters: list[Tensor], ways: list[Tensor]) -> None:
    for parameter, way in zip(parameters, ways, strict=True):
        parameter.sub_(way)  # fault: climbs-one-by-one


def descend(parameters: list[Tensor], ways: list[Tensor]) -> None:
    torch._foreach_sub_(parameters, ways)


def sharpness_aware(
    steps: int,
    up: Callable[[list[Tensor], float], list[Tensor]],
    down: Callable[[list[Tensor], list[Tensor]], None],
) -> list[Tensor]:
    """Tables classified by a deep network, with the gradient at the worst place nearby."""
    random = seeded()
    layers: list[nn.Module] = [nn.Linear(20, 48)]
    for _ in range(14):
        layers += [nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 48)]
    model = nn.Sequential(*layers, nn.Linear(48, 3))
    parameters: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)
    for _ in range(steps):
        table, labels = torch.randn(32, 20, generator=random), torch.randint(0, 3, (32,), generator=random)
        F.cross_entropy(model(table), labels).backward()
        with torch.no_grad():
            ways = up(parameters, 0.05)
        optimizer.zero_grad()
        F.cross_entropy(model(table), labels).backward()
        with torch.no_grad():
            down(parameters, ways)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


PROGRAMS = [
    Planted(name, "optimizer", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("average-by-name", lambda n: diffusion(n, AverageByName), lambda n: diffusion(n, AverageOfAll), 120),
        ("adagrad-of-adapters", lambda n: adapting(n, False), lambda n: adapting(n, True), 250),
        (
            "climbs-one-by-one",
            lambda n: sharpness_aware(n, climb_one_by_one, descend_one_by_one),
            lambda n: sharpness_aware(n, climb, descend),
            100,
        ),
    )
]
