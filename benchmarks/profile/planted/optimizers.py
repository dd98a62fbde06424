"""Optimizers that update parameters one by one, with many small operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class DeepNetwork(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = torch.tanh(layer(x))
            x = norm(hidden)
        return self.head(x)


def deep_regression(steps: int, fused: bool) -> list[Tensor]:
    random = seeded()
    model = DeepNetwork(48, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    x, y = torch.randn(16, 48, generator=random), torch.randn(16, 1, generator=random)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()  # fault: adamw-for-loop
    return weights(model)


def momentum_step(parameters: list[nn.Parameter], velocities: list[Tensor], lr: float) -> None:
    for parameter, velocity in zip(parameters, velocities, strict=True):
        if parameter.grad is None:
            continue
        gradient = parameter.grad + 1e-4 * parameter.detach()  # fault: momentum-by-hand
        velocity.mul_(0.9).add_(gradient)  # fault: momentum-by-hand
        parameter.data = parameter.data - lr * velocity  # fault: momentum-by-hand


def autoencoder(steps: int, by_hand: bool) -> list[Tensor]:
    """An autoencoder of many narrow layers, with the update in a helper."""
    random = seeded()
    sizes = [24, 20, 16, 12, 8, 6, 4, 6, 8, 12, 16, 20, 24]
    layers = nn.ModuleList([nn.Linear(*pair) for pair in itertools.pairwise(sizes)])
    parameters = list(layers.parameters())
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    builtin = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)
    x = torch.randn(32, 24, generator=random)
    for _ in range(steps):
        h = x
        for layer in layers:
            h = F.silu(layer(h))
        builtin.zero_grad()
        loss = F.mse_loss(h, x)
        loss.backward()
        if by_hand:
            momentum_step(parameters, velocities, 0.05)
        else:
            builtin.step()
    return weights(layers)


class Lion(torch.optim.Optimizer):
    """Sign of the interpolated momentum (Chen et al. 2023), parameter by parameter."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * 0.01)  # fault: lion-for-loop
                update = average.clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()  # fault: lion-for-loop
                p.add_(update, alpha=-group["lr"])  # fault: lion-for-loop
                average.mul_(0.99).add_(p.grad, alpha=0.01)  # fault: lion-for-loop


class ForeachLion(Lion):
    """The same for all parameters at once."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            params, lr = group["params"], group["lr"]
            gradients = [p.grad for p in params]
            averages = group.setdefault("exp_avgs", [torch.zeros_like(p) for p in params])
            torch._foreach_mul_(params, 1 - lr * 0.01)
            updates = torch._foreach_mul(averages, 0.9)
            torch._foreach_add_(updates, gradients, alpha=0.1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(params, updates, alpha=-lr)
            torch._foreach_mul_(averages, 0.99)
            torch._foreach_add_(averages, gradients, alpha=0.01)


def experts(steps: int, optimizer_class: type[Lion]) -> list[Tensor]:
    """A soft mixture of many tiny experts."""
    random = seeded()
    gate, members = nn.Linear(8, 24), nn.ModuleList([nn.Linear(8, 4) for _ in range(24)])
    parameters = [*gate.parameters(), *members.parameters()]
    optimizer = optimizer_class(parameters, lr=1e-3)
    x, y = torch.randn(64, 8, generator=random), torch.randn(64, 4, generator=random)
    for _ in range(steps):
        shares = F.softmax(gate(x), dim=1)
        outputs = torch.stack([expert(x) for expert in members], dim=1)
        loss = F.mse_loss(torch.einsum("be,bed->bd", shares, outputs), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*weights(gate), *weights(members)]


def averaged(steps: int, each: bool) -> list[Tensor]:
    """A small convolutional network trained with RMSprop, which has no fused form, as a loop or with foreach."""
    random = seeded()
    convolutions = nn.ModuleList([nn.Conv1d(4, 4, 3, padding=1) for _ in range(16)])
    head = nn.Linear(4, 2)
    optimizer = torch.optim.RMSprop(
        [*convolutions.parameters(), *head.parameters()], lr=1e-3, momentum=0.9, centered=True, foreach=not each
    )
    signals, labels = torch.randn(8, 4, 32, generator=random), torch.randint(0, 2, (8,), generator=random)
    for _ in range(steps):
        x = signals
        for convolution in convolutions:
            change = convolution(x)
            x = x + F.relu(change)
        loss = F.cross_entropy(head(x.mean(2)), labels)
        loss.backward()
        optimizer.step()  # fault: rmsprop-for-loop
        optimizer.zero_grad()
    return [*weights(convolutions), *weights(head)]


PROGRAMS = [
    Planted(
        "adamw-for-loop",
        "optimizer",
        lambda n: deep_regression(n, False),
        lambda n: deep_regression(n, True),
        100,
        __name__,
    ),
    Planted(
        "momentum-by-hand", "optimizer", lambda n: autoencoder(n, True), lambda n: autoencoder(n, False), 300, __name__
    ),
    Planted("lion-for-loop", "optimizer", lambda n: experts(n, Lion), lambda n: experts(n, ForeachLion), 150, __name__),
    Planted("rmsprop-for-loop", "optimizer", lambda n: averaged(n, True), lambda n: averaged(n, False), 120, __name__),
]
