"""Parameters that are updated one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Field(nn.Module):
    """A deep and narrow network, as is usual for solutions of differential equations."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, width), nn.Linear(width, 1)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.first(points))
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def moving_wave(steps: int, fused: bool) -> list[Tensor]:
    """A physics-informed network; the loss is how far it is from solving u_t = -u_x, with a start that is known."""
    random = seeded()
    model = Field(10, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4, amsgrad=True, fused=fused or None)
    for _ in range(steps):
        points = torch.rand(32, 2, generator=random).requires_grad_()
        u = model(points)
        (slopes,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        starts = torch.rand(32, 1, generator=random)
        at_start = model(torch.cat([starts, torch.zeros(32, 1)], 1))
        loss = slopes.sum(1).square().mean() + F.mse_loss(at_start, torch.sin(3.14159 * starts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # fault: physics-with-default-adam
    return weights(model)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(14)])
        self.judge = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.leaky_relu(layer(x), 0.2)
        return self.judge(x)


def clipped_critic(steps: int, in_turn: bool) -> list[Tensor]:
    """The critic of the first Wasserstein GAN, whose weights are held within bounds."""
    random = seeded()
    critic = Critic()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.mul_(0.2)
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-4, eps=1e-3, centered=True, foreach=not in_turn or None)
    parameters: list[Tensor] = list(critic.parameters())
    for _ in range(steps):
        real, fake = torch.randn(2, 16, 32, generator=random)
        loss = critic(fake.abs()).mean() - critic(real).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # fault: weights-clipped-in-turn
        if in_turn:
            for p in critic.parameters():  # fault: weights-clipped-in-turn
                p.data.clamp_(-0.03, 0.03)  # fault: weights-clipped-in-turn
        else:
            with torch.no_grad():
                torch._foreach_clamp_max_(parameters, 0.03)
                torch._foreach_clamp_min_(parameters, -0.03)
    return weights(critic)


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rates, written from the paper."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.9, decay: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            for p in group["params"]:  # fault: lars-from-the-paper
                if p.grad is None:
                    continue
                d_p = p.grad.add(p, alpha=group["decay"])  # fault: lars-from-the-paper
                size, slope = torch.norm(p), torch.norm(d_p)  # fault: lars-from-the-paper
                trust = 0.02 * size / (slope + 1e-6)  # fault: lars-from-the-paper
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                buffer = state["buffer"]
                buffer.mul_(group["momentum"]).add_(d_p * trust)  # fault: lars-from-the-paper
                p.sub_(group["lr"] * buffer)  # fault: lars-from-the-paper


class LarsOfAll(torch.optim.Optimizer):
    """The same for all layers at once."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.9, decay: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})
        self.buffers = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        (group,) = self.param_groups
        gradients = torch._foreach_add([p.grad for p in group["params"]], group["params"], alpha=group["decay"])
        sizes = torch.stack(torch._foreach_norm(group["params"]))
        slopes = torch.stack(torch._foreach_norm(gradients))
        torch._foreach_mul_(gradients, list((0.02 * sizes / (slopes + 1e-6)).unbind()))
        torch._foreach_mul_(self.buffers, group["momentum"])
        torch._foreach_add_(self.buffers, gradients)
        torch._foreach_add_(group["params"], self.buffers, alpha=-group["lr"])


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(20)])
        self.head = nn.Linear(40, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.5 * F.silu(layer(x))
        return self.head(x)


def layer_wise(steps: int, in_turn: bool) -> list[Tensor]:
    random = seeded()
    model = Deep()
    optimizer: torch.optim.Optimizer
    optimizer = Lars(model.parameters(), 0.5) if in_turn else LarsOfAll(model.parameters(), 0.5)
    for _ in range(steps):
        x, labels = torch.randn(48, 40, generator=random), torch.randint(0, 6, (48,), generator=random)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # fault: lars-from-the-paper
    return weights(model)


def functional(fast: list[Tensor], x: Tensor) -> Tensor:
    """A perceptron with these weights, in turn a matrix and a bias."""
    for index in range(0, len(fast) - 2, 2):
        x = torch.tanh(F.linear(x, fast[index], fast[index + 1]))
    return F.linear(x, fast[-2], fast[-1])


def waves_of_a_task(random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Points of one wave: some to learn it from, then some to judge by."""
    height, shift = (0.5 + torch.rand(2, 1, generator=random)).unbind()
    while True:
        x = 6 * torch.rand(10, 1, generator=random) - 3
        yield x, height * torch.sin(x + shift)


def learning_to_learn(steps: int, in_turn: bool) -> list[Tensor]:
    """First-order MAML: a few steps for each task, from a start that all tasks share."""
    random = seeded()
    sizes = [1, *[24] * 9, 1]
    meta = []
    for inputs, outputs in pairwise(sizes):
        meta += [torch.randn(outputs, inputs) * 0.2, torch.zeros(outputs)]
    for _ in range(steps):
        total = [torch.zeros_like(weight) for weight in meta]
        for _ in range(3):
            points = waves_of_a_task(random)
            fast = [weight.clone().requires_grad_() for weight in meta]
            for _ in range(4):
                x, y = next(points)
                gradients = torch.autograd.grad(F.mse_loss(functional(fast, x), y), fast)
                if in_turn:
                    updated = []
                    for weight, gradient in zip(fast, gradients, strict=True):  # fault: inner-steps-in-turn
                        weight = weight.detach() - 0.02 * gradient  # fault: inner-steps-in-turn
                        updated.append(weight.requires_grad_())  # fault: inner-steps-in-turn
                    fast = updated
                else:
                    with torch.no_grad():
                        torch._foreach_add_(fast, gradients, alpha=-0.02)
            x, y = next(points)
            gradients = torch.autograd.grad(F.mse_loss(functional(fast, x), y), fast)
            torch._foreach_add_(total, gradients)
        torch._foreach_add_(meta, total, alpha=-0.01)
    return meta


PROGRAMS = [
    Planted(name, "optimizer", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("physics-with-default-adam", lambda n: moving_wave(n, False), lambda n: moving_wave(n, True), 500),
        ("weights-clipped-in-turn", lambda n: clipped_critic(n, True), lambda n: clipped_critic(n, False), 350),
        ("lars-from-the-paper", lambda n: layer_wise(n, True), lambda n: layer_wise(n, False), 300),
        ("inner-steps-in-turn", lambda n: learning_to_learn(n, True), lambda n: learning_to_learn(n, False), 120),
    )
]
