"""Chains of small operators that one operator of PyTorch can replace."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def sigmoid_loss_by_hand(logits: Tensor, mask: Tensor) -> Tensor:
    p = 1 / (1 + torch.exp(-logits))  # fault: sigmoid-loss-by-hand
    p = p.clamp(1e-6, 1 - 1e-6)  # fault: sigmoid-loss-by-hand
    loss = -(mask * torch.log(p) + (1 - mask) * torch.log(1 - p))  # fault: sigmoid-loss-by-hand
    return loss.mean()  # fault: sigmoid-loss-by-hand


def segmentation(steps: int, by_hand: bool) -> list[Tensor]:
    """A small network marks the cells of a microscope's picture, pixel by pixel."""
    random = seeded()
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 2, stride=2),
    )
    criterion = sigmoid_loss_by_hand if by_hand else F.binary_cross_entropy_with_logits
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    pictures = torch.rand(64, 1, 128, 128, generator=random)
    masks = (pictures > 0.6).float()
    for step in range(steps):
        part = slice(8 * (step % 8), 8 * (step % 8) + 8)
        loss = criterion(net(pictures[part]), masks[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(net)


class HandMish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(torch.log(1 + torch.exp(x)))  # fault: mish-by-hand


class DetectorBlock(nn.Module):
    """Residual block of a one-stage detector."""

    def __init__(self, channels: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 2, 1, bias=False)
        self.expand = nn.Conv2d(channels // 2, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels // 2), nn.BatchNorm2d(channels)])
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norms[0](self.reduce(x)))
        return x + self.activation(self.norms[1](self.expand(y)))


@torch.no_grad()
def detection(steps: int, activation: type[nn.Module]) -> list[Tensor]:
    """Boxes and classes of a detector for a stream of pictures."""
    random = seeded()
    backbone = nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1),
        *[DetectorBlock(24, activation) for _ in range(4)],
        nn.Conv2d(24, 18, 1),
    ).eval()
    found = []
    for _ in range(steps):
        grid = backbone(torch.rand(4, 3, 96, 96, generator=random))
        confidence = grid[:, 4].sigmoid().flatten(1)
        found.append(confidence.topk(20).values)
    return found


class HandGroupNorm(nn.Module):
    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        grouped = x.reshape(n, self.groups, -1)
        mean = grouped.mean(dim=2, keepdim=True)  # fault: group-norm-by-hand
        centered = grouped - mean  # fault: group-norm-by-hand
        var = (centered**2).mean(dim=2, keepdim=True)  # fault: group-norm-by-hand
        normal = centered / torch.sqrt(var + 1e-5)  # fault: group-norm-by-hand
        normal = normal.reshape(n, c, h, w)
        return normal * self.weight[:, None, None] + self.bias[:, None, None]  # fault: group-norm-by-hand


class Denoiser(nn.Module):
    def __init__(self, norm: type[nn.Module], channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.convolutions = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3)])
        self.norms = nn.ModuleList([norm(4, channels) for _ in range(3)])
        self.last = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = y + convolution(F.silu(norm(y)))
        return self.last(y)


def denoising(steps: int, norm: type[nn.Module]) -> list[Tensor]:
    """A network learns to take the noise out of pictures."""
    random = seeded()
    model = Denoiser(norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    for _ in range(steps):
        clean = torch.rand(8, 3, 48, 48, generator=random)
        noise = 0.3 * torch.randn(8, 3, 48, 48, generator=random)
        loss = F.mse_loss(model(clean + noise), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return weights(model)


PROGRAMS = [
    Planted(
        "sigmoid-loss-by-hand",
        "fusible",
        lambda steps: segmentation(steps, True),
        lambda steps: segmentation(steps, False),
        steps=60,
        module=__name__,
    ),
    Planted(
        "mish-by-hand",
        "fusible",
        lambda steps: detection(steps, HandMish),
        lambda steps: detection(steps, nn.Mish),
        steps=24,
        module=__name__,
    ),
    Planted(
        "group-norm-by-hand",
        "fusible",
        lambda steps: denoising(steps, HandGroupNorm),
        lambda steps: denoising(steps, nn.GroupNorm),
        steps=24,
        module=__name__,
    ),
]
