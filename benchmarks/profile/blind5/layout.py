"""Tensors that are converted, and a little later converted back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Friends(nn.Module):
    """Two rounds of averaging over those one knows, some of whom are left out each time."""

    def __init__(self, as_sparse: bool) -> None:
        super().__init__()
        self.as_sparse = as_sparse
        self.first, self.second, self.head = nn.Linear(48, 96), nn.Linear(96, 96), nn.Linear(96, 6)

    def thinned(self, adjacency: Tensor, left_out: Tensor) -> Tensor:
        """Those who are known and not left out."""
        if not self.as_sparse:
            return adjacency * (1 - left_out)
        sparse = adjacency.to_sparse()  # fault: sparse-and-dense-again
        present = 1 - left_out[sparse.indices()[0], sparse.indices()[1]]
        values = sparse.values() * present
        sparse = torch.sparse_coo_tensor(sparse.indices(), values, adjacency.shape, is_coalesced=True)
        return sparse.to_dense()  # fault: sparse-and-dense-again

    def forward(self, x: Tensor, adjacency: Tensor, left_out: Tensor) -> Tensor:
        near = self.thinned(adjacency, left_out)
        x = F.relu(self.first(near @ x))
        near = self.thinned(adjacency, left_out.T)
        x = F.relu(self.second(near @ x))
        return self.head(x)


def friends(steps: int, as_sparse: bool) -> list[Tensor]:
    random = seeded()
    x, groups = torch.randn(400, 48, generator=random), torch.randint(0, 6, (400,), generator=random)
    adjacency = (torch.rand(400, 400, generator=random) < 0.03).float() / 12
    model = Friends(as_sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for _ in range(steps):
        left_out = (torch.rand(400, 400, generator=random) < 0.2).float()
        loss = F.cross_entropy(model(x, adjacency, left_out), groups)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class MapBlock(nn.Module):
    """A layer for each place, then a depthwise convolution that needs to know which places are near."""

    def __init__(self, width: int, converts: bool) -> None:
        super().__init__()
        self.converts = converts
        self.mix = nn.Linear(width, width)
        self.near = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        if self.converts:
            x = x.permute(0, 2, 3, 1).contiguous()  # fault: places-and-maps
            x = x + F.relu(self.mix(x))
            x = x.permute(0, 3, 1, 2).contiguous()  # fault: places-and-maps
            return x + self.near(x)
        x = x.permute(0, 2, 3, 1)
        x = x + F.relu(self.mix(x))
        x = x.permute(0, 3, 1, 2)
        return x + self.near(x)


class Places(nn.Module):
    def __init__(self, converts: bool) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 48, 2, stride=2)
        self.blocks = nn.ModuleList([MapBlock(48, converts) for _ in range(3)])
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def places(steps: int, converts: bool) -> list[Tensor]:
    """Which scene a picture shows; in the twin, channels stay last from the first picture on."""
    random = seeded()
    model = Places(converts)
    if not converts:
        model = model.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    for _ in range(steps):
        images, labels = torch.rand(4, 3, 96, 96, generator=random), torch.randint(0, 10, (4,), generator=random)
        if not converts:
            images = images.to(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [weight.contiguous() for weight in weights(model)]


class Gated(nn.Module):
    """A convolution over time with a gate, after which a loudness is evened out."""

    def __init__(self, width: int, in_double: bool) -> None:
        super().__init__()
        self.in_double = in_double
        self.both = nn.Conv1d(width, 2 * width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.both(x), 1)
        if self.in_double:
            precise = y.double()  # fault: loudness-in-double
            precise = precise / (precise.square().mean(1, keepdim=True) + 1e-4).sqrt()
            y = precise.float()  # fault: loudness-in-double
        else:
            y = y / (y.square().mean(1, keepdim=True) + 1e-4).sqrt()
        return x + 0.5 * y


class Denoiser(nn.Module):
    def __init__(self, in_double: bool) -> None:
        super().__init__()
        self.open = nn.Conv1d(1, 32, 9, padding=4)
        self.blocks = nn.ModuleList([Gated(32, in_double) for _ in range(3)])
        self.close = nn.Conv1d(32, 1, 9, padding=4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.open(x)
        for block in self.blocks:
            y = block(y)
        return x - self.close(y)


def denoising(steps: int, in_double: bool) -> list[Tensor]:
    random = seeded()
    model = Denoiser(in_double)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    seconds = torch.arange(512) / 512
    for _ in range(steps):
        pitch = 5 + 20 * torch.rand(8, 1, 1, generator=random)
        clean = torch.sin(6.28318 * pitch * seconds)
        loss = F.l1_loss(model(clean + 0.3 * torch.randn(8, 1, 512, generator=random)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class AsBytes:
    """What many transforms do, so that they take pictures as they are on disk."""

    def __init__(self, converts: bool) -> None:
        self.converts = converts

    def brought(self, images: Tensor) -> Tensor:
        if self.converts:
            return images.float() / 255  # fault: bytes-between-transforms
        return images

    def returned(self, images: Tensor) -> Tensor:
        if self.converts:
            return (images * 255).round().to(torch.uint8)  # fault: bytes-between-transforms
        return images

    def flip(self, images: Tensor) -> Tensor:
        return self.returned(self.brought(images).flip(3))

    def shift(self, images: Tensor, rows: int, columns: int) -> Tensor:
        return self.returned(self.brought(images).roll((rows, columns), (2, 3)))

    def invert(self, images: Tensor) -> Tensor:
        if self.converts:
            return self.returned(1 - self.brought(images))
        return 255 - images


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 24, 5, stride=4), nn.Conv2d(24, 48, 3, stride=2)
        self.third, self.head = nn.Conv2d(48, 64, 3, stride=2), nn.Linear(64, 43)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.head(x.mean((2, 3)))


def traffic_signs(steps: int, converts: bool) -> list[Tensor]:
    random = seeded()
    transforms = AsBytes(converts)
    model = Signs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    pool = torch.randint(0, 256, (128, 3, 64, 64), generator=random, dtype=torch.uint8)
    labels = torch.randint(0, 43, (128,), generator=random)
    for number in range(steps):
        start = 32 * (number % 4)
        images = pool[start : start + 32]
        if number % 2:
            images = transforms.flip(images)
        images = transforms.shift(images, number % 7 - 3, number % 5 - 2)
        if number % 3 == 0:
            images = transforms.invert(images)
        loss = F.cross_entropy(model(images.float() / 255), labels[start : start + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "layout", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("sparse-and-dense-again", lambda n: friends(n, True), lambda n: friends(n, False), 270),
        ("places-and-maps", lambda n: places(n, True), lambda n: places(n, False), 40),
        ("loudness-in-double", lambda n: denoising(n, True), lambda n: denoising(n, False), 40),
        ("bytes-between-transforms", lambda n: traffic_signs(n, True), lambda n: traffic_signs(n, False), 140),
    )
]
