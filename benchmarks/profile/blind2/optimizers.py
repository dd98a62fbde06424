"""Parameters that are updated one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Mixer(nn.Module):
    """Mixes patches and channels in turn."""

    def __init__(self, patches: int, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.ModuleList([nn.Linear(patches, patches) for _ in range(depth)])
        self.channels = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for number, (patches, channels) in enumerate(zip(self.patches, self.channels, strict=True)):
            x = x + F.gelu(patches(self.norms[2 * number](x).transpose(1, 2))).transpose(1, 2)
            x = x + F.gelu(channels(self.norms[2 * number + 1](x)))
        return self.head(x.mean(dim=1))


class Trainer:
    """The usual class around a training loop."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.model.train()
        for images, labels in batches:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.1)
            loss.backward()
            self.optimizer.step()  # fault: radam-by-default
            self.scheduler.step()


def mixing(steps: int, **options: Any) -> list[Tensor]:
    random = seeded()
    model = Mixer(patches=16, width=48, depth=8)
    trainer = Trainer(model, torch.optim.RAdam(model.parameters(), lr=1e-3, **options))
    trainer.fit(
        (torch.randn(16, 16, 48, generator=random), torch.randint(0, 10, (16,), generator=random)) for _ in range(steps)
    )
    return weights(model)


def follow_one_by_one(online: nn.Module, target: nn.Module, tau: float) -> None:
    for target_param, param in zip(target.parameters(), online.parameters(), strict=True):
        target_param.data.copy_(tau * param.data + (1.0 - tau) * target_param.data)  # fault: target-network-loop


@torch.no_grad()
def follow_together(online: nn.Module, target: nn.Module, tau: float) -> None:
    torch._foreach_lerp_(list[Tensor](target.parameters()), list[Tensor](online.parameters()), tau)


def q_learning(steps: int, follow: Callable[[nn.Module, nn.Module, float], None]) -> list[Tensor]:
    """Deep Q-learning from a store of transitions; a target network follows the one that learns."""
    random = seeded()
    online = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU())), nn.Linear(32, 4)
    )
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, fused=True)
    states, rewards = torch.randn(4000, 32, generator=random), torch.randn(4000, generator=random)
    actions = torch.randint(0, 4, (4000, 1), generator=random)
    for _ in range(steps):
        rows = torch.randint(0, 3999, (32,), generator=random)
        with torch.no_grad():
            future = target(states.index_select(0, rows + 1)).amax(dim=1)
        chosen = online(states.index_select(0, rows)).gather(1, actions[rows]).squeeze(1)
        loss = F.smooth_l1_loss(chosen, rewards[rows] + 0.99 * future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(online, target, 0.005)
    return weights(target)


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (Chen et al., 2023), as it is usually published: one parameter after the other."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["decay"])  # fault: lion-by-hand
                update = exp_avg.clone().mul_(beta1).add_(p.grad, alpha=1 - beta1).sign_()  # fault: lion-by-hand
                p.add_(update, alpha=-group["lr"])  # fault: lion-by-hand
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)  # fault: lion-by-hand


class ManyTensorLion(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            if not group.get("averages"):
                group["averages"] = [torch.zeros_like(p) for p in params]
            grads, averages = [p.grad for p in params], group["averages"]
            torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            updates = torch._foreach_lerp(averages, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(params, updates, alpha=-group["lr"])
            torch._foreach_lerp_(averages, grads, 1 - beta2)


def fine_tuning(steps: int, optimizer_class: type[Lion]) -> list[Tensor]:
    """Low-rank adapters of a frozen network are trained: many parameters, all of them small."""
    random = seeded()
    frozen = [torch.randn(64, 64, generator=random) / 8 for _ in range(24)]
    down = nn.ParameterList([nn.Parameter(torch.randn(64, 4, generator=random) / 8) for _ in frozen])
    up = nn.ParameterList([nn.Parameter(torch.zeros(4, 64)) for _ in frozen])
    optimizer = optimizer_class([*down, *up], lr=1e-3, decay=0.01)
    for _ in range(steps):
        x = torch.randn(32, 64, generator=random)
        for weight, a, b in zip(frozen, down, up, strict=True):
            x = torch.tanh(torch.addmm(x @ weight, x @ a, b))
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*weights(down), *weights(up)]


PROGRAMS = [
    Planted(
        "radam-by-default",
        "optimizer",
        lambda steps: mixing(steps, foreach=False),
        lambda steps: mixing(steps, foreach=True),
        steps=40,
        module=__name__,
    ),
    Planted(
        "target-network-loop",
        "optimizer",
        lambda steps: q_learning(steps, follow_one_by_one),
        lambda steps: q_learning(steps, follow_together),
        steps=250,
        module=__name__,
    ),
    Planted(
        "lion-by-hand",
        "optimizer",
        lambda steps: fine_tuning(steps, Lion),
        lambda steps: fine_tuning(steps, ManyTensorLion),
        steps=100,
        module=__name__,
    ),
]
