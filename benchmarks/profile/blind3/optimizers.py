"""Parameters that are updated one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        hidden = self.inner(normal)
        return x + F.relu(hidden)


class DeepTower(nn.Module):
    """Lines of its own for what comes first and last, and many narrow layers between."""

    def __init__(self, inputs: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.layers = nn.ModuleList([Residual(width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.enter(x))
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


class Together:
    """One optimizer with a group for each learning rate."""

    def __init__(self, rates: Sequence[tuple[list[nn.Parameter], float]]) -> None:
        groups = [{"params": parameters, "lr": rate} for parameters, rate in rates]
        self.optimizer = torch.optim.Adam(groups, fused=True)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Separately:
    """An optimizer for each learning rate."""

    def __init__(self, rates: Sequence[tuple[list[nn.Parameter], float]]) -> None:
        self.optimizers = [torch.optim.Adam(parameters, lr=rate) for parameters, rate in rates]

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()  # fault: rate-for-each-layer
            optimizer.zero_grad()


def fine_tuning(steps: int, kind: type[Together] | type[Separately]) -> list[Tensor]:
    """Lower layers learn more slowly, as fine-tuning of language models has it."""
    random = seeded()
    model = DeepTower(64, 96, 16, 3)
    blocks: list[nn.Module] = [model.enter, *model.layers, model.leave]
    rates = [(list(block.parameters()), 1e-3 * 0.8 ** (17 - depth)) for depth, block in enumerate(blocks)]
    updater = kind(rates)
    for _ in range(steps):
        x, y = torch.randn(64, 64, generator=random), torch.randint(0, 3, (64,), generator=random)
        F.cross_entropy(model(x), y).backward()
        updater.update()
    return weights(model)


class Adagrad(torch.optim.Optimizer):
    """As the paper has it."""

    def __init__(self, params: Iterable[nn.Parameter], rate: float, epsilon: float = 1e-10) -> None:
        super().__init__(params, {"lr": rate, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["total"] = torch.zeros_like(parameter)
                state["total"] = state["total"] + gradient**2  # fault: adagrad-as-published
                scale = torch.sqrt(state["total"]) + group["epsilon"]  # fault: adagrad-as-published
                parameter -= group["lr"] * gradient / scale  # fault: adagrad-as-published


def fused_adagrad(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=rate, fused=True)


class WideAndDeep(nn.Module):
    """A linear part over crossed features, and a deep part over dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Linear(512, 1), DeepTower(512, 128, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide(x) + self.deep(x)).squeeze(1)


def clicks(
    steps: int, make_optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
) -> list[Tensor]:
    random = seeded()
    model = WideAndDeep()
    optimizer = make_optimizer(model.parameters(), 0.002)
    for _ in range(steps):
        x = torch.randn(64, 512, generator=random)
        clicked = (x[:, 0] + x[:, 1] > 0).float()
        loss = F.binary_cross_entropy_with_logits(model(x), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # fault: adagrad-as-published
    return weights(model)


class Adversaries:
    """A generator and a critic, each with an optimizer."""

    def __init__(self, fused: bool) -> None:
        self.generator, self.critic = DeepTower(16, 64, 6, 32), DeepTower(32, 64, 6, 1)
        settings = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": fused}
        self.of_generator = torch.optim.Adam(self.generator.parameters(), **settings)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), **settings)

    def train_critic(self, real: Tensor, latent: Tensor) -> None:
        with torch.no_grad():
            made = self.generator(latent)
        self.of_critic.zero_grad()
        (F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made)).mean()).backward()
        self.of_critic.step()  # fault: adversaries-by-default

    def train_generator(self, latent: Tensor) -> None:
        self.of_generator.zero_grad()
        F.softplus(-self.critic(self.generator(latent))).mean().backward()
        self.of_generator.step()  # fault: adversaries-by-default


def adversarial(steps: int, fused: bool) -> list[Tensor]:
    random = seeded()
    game = Adversaries(fused)
    for number in range(steps):
        latent = torch.randn(96, 16, generator=random)
        game.train_critic(torch.randn(96, 32, generator=random).sin(), latent)
        if number % 2:
            game.train_generator(latent)
    return [*weights(game.generator), *weights(game.critic)]


PROGRAMS = [
    Planted(name, "optimizer", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("rate-for-each-layer", lambda n: fine_tuning(n, Separately), lambda n: fine_tuning(n, Together), 80),
        ("adagrad-as-published", lambda n: clicks(n, Adagrad), lambda n: clicks(n, fused_adagrad), 150),
        ("adversaries-by-default", lambda n: adversarial(n, False), lambda n: adversarial(n, True), 120),
    )
]
