"""Chains of small operators that one operator replaces."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights

Elementwise = Callable[[Tensor], Tensor]


def swish(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)  # fault: swish-by-hand
    return x * gate  # fault: swish-by-hand


class Denoiser(nn.Module):
    """Tells the noise in small pictures."""

    def __init__(self, activation: Elementwise) -> None:
        super().__init__()
        self.activation = activation
        self.read, self.mix, self.write = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 16, 1), nn.Conv2d(16, 3, 1)
        self.time = nn.Linear(16, 32)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.activation(self.read(x))
        x = x + self.time(time)[:, :, None, None]
        x = self.activation(self.mix(self.activation(x)))
        return self.write(x)


def denoising(steps: int, activation: Elementwise) -> list[Tensor]:
    random = seeded()
    model = Denoiser(activation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        images, noise = torch.randn(2, 8, 3, 40, 40, generator=random)
        time = torch.rand(8, 16, generator=random)
        loss = F.mse_loss(model(images + time[:, :1, None, None] * noise, time), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def huber(predicted: Tensor, actual: Tensor, delta: float = 1.0) -> Tensor:
    error = predicted - actual  # fault: huber-by-hand
    size = error.abs()  # fault: huber-by-hand
    quadratic = 0.5 * error.pow(2)  # fault: huber-by-hand
    linear = delta * (size - 0.5 * delta)  # fault: huber-by-hand
    return torch.where(size <= delta, quadratic, linear).mean()  # fault: huber-by-hand


def forecasting(steps: int, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """A linear forecast of many series at once, each from its last values."""
    random = seeded()
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 96))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    history, future = torch.randn(1500, 24, generator=random), torch.randn(1500, 96, generator=random)
    for number in range(steps):
        loss = loss_of(model(history), future.roll(number, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class FrozenNorm(nn.Module):
    """Batch normalization with the statistics of another training."""

    def __init__(self, channels: int, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.mean, self.variance = nn.Buffer(torch.randn(channels) * 0.1), nn.Buffer(torch.rand(channels) + 0.5)
        self.scale, self.shift = nn.Buffer(torch.rand(channels) + 0.5), nn.Buffer(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return F.batch_norm(x, self.mean, self.variance, self.scale, self.shift)
        mean, variance = self.mean.view(1, -1, 1, 1), self.variance.view(1, -1, 1, 1)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)  # fault: frozen-norm-by-hand
        return normal * self.scale.view(1, -1, 1, 1) + self.shift.view(1, -1, 1, 1)  # fault: frozen-norm-by-hand


def detection(steps: int, by_hand: bool) -> list[Tensor]:
    """Features of a frozen detector, and the boxes a head finds in them."""
    random = seeded()
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, stride=2, bias=False), FrozenNorm(32, by_hand), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 1, bias=False), FrozenNorm(32, by_hand), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(32, 5, 1)).eval()
    found = []
    with torch.inference_mode():
        for _ in range(steps):
            boxes = model(torch.rand(4, 3, 160, 160, generator=random))
            found.append(boxes.flatten(2).amax(2))
    return found


def elu(x: Tensor) -> Tensor:
    above = x.clamp(min=0)  # fault: elu-by-hand
    below = torch.exp(x.clamp(max=0)) - 1  # fault: elu-by-hand
    return above + below  # fault: elu-by-hand


class SpeechBlock(nn.Module):
    """Layers that look at each frame of speech alone."""

    def __init__(self, activation: Elementwise) -> None:
        super().__init__()
        self.activation = activation
        self.widen, self.mix, self.narrow = nn.Linear(16, 64), nn.Linear(64, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.widen(x))
        hidden = self.activation(self.mix(hidden))
        return x + self.narrow(hidden)


def speech(steps: int, activation: Elementwise) -> list[Tensor]:
    """The next frame from this one."""
    random = seeded()
    model = nn.Sequential(SpeechBlock(activation), SpeechBlock(activation))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        frames = torch.randn(8, 400, 16, generator=random)
        loss = F.l1_loss(model(frames), frames.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "fusible", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("swish-by-hand", lambda n: denoising(n, swish), lambda n: denoising(n, F.silu), 60),
        ("huber-by-hand", lambda n: forecasting(n, huber), lambda n: forecasting(n, F.huber_loss), 150),
        ("frozen-norm-by-hand", lambda n: detection(n, True), lambda n: detection(n, False), 20),
        ("elu-by-hand", lambda n: speech(n, elu), lambda n: speech(n, F.elu), 40),
    )
]
