"""Models of different kinds without any of the nine faults."""

from __future__ import annotations

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from benchmarks.profile.planted.program import Clean, seeded, weights


class Outlines(nn.Module):
    """A small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.deep, self.up = nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.ConvTranspose2d(48, 24, 2, stride=2)
        self.join, self.top = nn.Conv2d(48, 24, 3, padding=1), nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.leave = nn.Conv2d(24, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.enter(x))
        second = F.relu(self.down(first))
        third = F.relu(self.deep(second))
        up = F.relu(self.up(third))
        up = F.relu(self.join(torch.cat([up, second], 1)))
        top = F.relu(self.top(up))
        return self.leave(torch.cat([top, first], 1))


def outlines(steps: int) -> list[Tensor]:
    random = seeded()
    model = Outlines()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        scans = torch.rand(4, 1, 48, 48, generator=random)
        truth = (scans > 0.6).float()
        guess = model(scans)
        chance = guess.sigmoid()
        overlap = 2 * (chance * truth).sum() / (truth.sum() + chance.sum())
        loss = F.binary_cross_entropy_with_logits(guess, truth) + 1 - overlap
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.open, self.near = nn.Conv2d(3, 32, 4, stride=4), nn.Conv2d(32, 32, 5, padding=2, groups=32)
        self.mix, self.far = nn.Conv2d(32, 64, 1), nn.Conv2d(64, 64, 5, padding=2, groups=64)
        self.last, self.head = nn.Conv2d(64, 96, 1), nn.Linear(96, 15)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.open(x))
        x = self.near(x)
        x = F.relu(self.mix(x))
        x = self.far(x)
        x = F.relu(self.last(x))
        return self.head(x.mean((2, 3)))


def channels_once(steps: int) -> list[Tensor]:
    """Channels are put last where pictures come in, once, and stay there."""
    random = seeded()
    model = Separable().to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    for _ in range(steps):
        images = torch.rand(8, 3, 80, 80, generator=random).to(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(images), torch.randint(0, 15, (8,), generator=random))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [weight.contiguous() for weight in weights(model)]


class Dilated(nn.Module):
    """Convolutions over time whose reach doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.open = nn.Conv1d(8, 48, 1)
        self.one, self.two = nn.Conv1d(48, 48, 3), nn.Conv1d(48, 48, 3, dilation=2)
        self.four, self.eight = nn.Conv1d(48, 48, 3, dilation=4), nn.Conv1d(48, 48, 3, dilation=8)
        self.close = nn.Conv1d(48, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.open(x)
        x = x + F.relu(self.one(F.pad(x, (2, 0))))
        x = x + F.relu(self.two(F.pad(x, (4, 0))))
        x = x + F.relu(self.four(F.pad(x, (8, 0))))
        x = x + F.relu(self.eight(F.pad(x, (16, 0))))
        return self.close(x)


def weather(steps: int) -> list[Tensor]:
    random = seeded()
    model = Dilated()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    series = torch.randn(8, 2000, generator=random).cumsum(1) / 10
    for _ in range(steps):
        starts = torch.randint(0, 1800, (16, 1), generator=random)
        windows = series[:, starts + torch.arange(193)].transpose(0, 1)
        guess = model(windows[:, :, :-1])
        loss = F.gaussian_nll_loss(guess[:, 0], windows[:, 0, 1:], F.softplus(guess[:, 1]) + 1e-3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Mixer(nn.Module):
    """Perceptrons over places and over channels by turns; transposing is only a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Linear(48, 96), nn.LayerNorm(96), nn.LayerNorm(96)
        self.places_in, self.places_out = nn.Linear(64, 128), nn.Linear(128, 64)
        self.channels_in, self.channels_out = nn.Linear(96, 192), nn.Linear(192, 96)
        self.head = nn.Linear(96, 10)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches)
        inner = F.gelu(self.places_in(self.first(x).mT))
        x = x + self.places_out(inner).mT
        inner = F.gelu(self.channels_in(self.second(x)))
        x = x + self.channels_out(inner)
        return self.head(x.mean(1))


def mixer(steps: int) -> list[Tensor]:
    random = seeded()
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        images, labels = torch.rand(16, 3, 32, 32, generator=random), torch.randint(0, 10, (16,), generator=random)
        patches = F.pixel_unshuffle(images, 4).flatten(2).mT
        loss = F.cross_entropy(model(patches), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Specialists(nn.Module):
    """Six experts that all answer, and how much each is asked; the experts are one batch of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.ask = nn.Linear(64, 96), nn.Linear(96, 6)
        self.inner, self.inner_bias = nn.Parameter(torch.randn(6, 96, 96) / 10), nn.Parameter(torch.zeros(6, 1, 96))
        self.outer, self.outer_bias = nn.Parameter(torch.randn(6, 96, 64) / 10), nn.Parameter(torch.zeros(6, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.read(x))
        share = self.ask(x).softmax(1)
        hidden = F.relu(torch.baddbmm(self.inner_bias, x.expand(6, -1, -1), self.inner))
        answers = torch.baddbmm(self.outer_bias, hidden, self.outer)
        return torch.einsum("ne,ned->nd", share, answers.transpose(0, 1))


def specialists(steps: int) -> list[Tensor]:
    random = seeded()
    model = Specialists()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        x = torch.randn(256, 64, generator=random)
        loss = F.mse_loss(model(x), x.roll(1, 1).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Bags(nn.Module):
    """A value of a bag of any number of things, summed by the number of the bag."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 160), nn.Linear(160, 96)
        self.third, self.value = nn.Linear(96, 160), nn.Linear(160, 1)

    def forward(self, things: Tensor, bags: Tensor, count: int) -> Tensor:
        x = F.relu(self.first(things))
        x = F.relu(self.second(x))
        total = x.new_zeros(count, 96).index_add(0, bags, x)
        return self.value(F.relu(self.third(total))).squeeze(1)


def bags(steps: int) -> list[Tensor]:
    """Bags are of different sizes, which are made as a tensor and never asked."""
    random = seeded()
    model = Bags()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        things, numbers = torch.randn(700, 20, generator=random), torch.randint(0, 80, (700,), generator=random)
        wanted = torch.zeros(80).index_add(0, numbers, things[:, 0].abs())
        loss = F.huber_loss(model(things, numbers, 80), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(48, 192), nn.Linear(192, 192), nn.Linear(192, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x))
        y = F.gelu(self.second(y))
        return x + self.third(y)


def compiled_beforehand(steps: int) -> list[Tensor]:
    """Compiled once; learning rates change in the course of the training, shapes do not."""
    random = seeded()
    torch._dynamo.reset()
    model = Residual()
    forward = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + 0.01 * number)
        x = torch.randn(192, 48, generator=random)
        loss = F.mse_loss(forward(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Spectral(nn.Module):
    """A Fourier neural operator of one layer: low frequencies are multiplied by matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.here = nn.Conv1d(2, 32, 1), nn.Conv1d(32, 32, 1)
        self.matrices = nn.Parameter(torch.randn(24, 32, 32, dtype=torch.cfloat) / 32)
        self.wide, self.out = nn.Conv1d(32, 96, 1), nn.Conv1d(96, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        waves = torch.fft.rfft(x, dim=2)
        mixed = torch.bmm(waves[:, :, :24].permute(2, 0, 1), self.matrices).permute(1, 2, 0)
        back = torch.fft.irfft(mixed, n=x.size(2), dim=2)
        x = F.gelu(back + self.here(x))
        x = F.gelu(self.wide(x))
        return self.out(x)


def operators(steps: int) -> list[Tensor]:
    random = seeded()
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    grid = torch.linspace(0, 1, 256).expand(16, 1, 256)
    for _ in range(steps):
        start = torch.randn(16, 1, 256, generator=random).cumsum(2) / 16
        loss = F.mse_loss(model(torch.cat([start, grid], 1)), start.roll(8, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Points(nn.Module):
    """What a cloud of points shows, by the largest of each feature over all points."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.first, self.second = nn.Linear(3, 9), nn.Linear(3, 64), nn.Linear(64, 96)
        self.third, self.fourth, self.head = nn.Linear(96, 128), nn.Linear(128, 128), nn.Linear(128, 8)

    def forward(self, cloud: Tensor) -> Tensor:
        turned = torch.bmm(cloud, self.turn(cloud.mean(1)).view(-1, 3, 3) + torch.eye(3))
        x = F.relu(self.first(turned))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        x = F.relu(self.fourth(x.amax(1)))
        return self.head(x)


def point_clouds(steps: int) -> list[Tensor]:
    random = seeded()
    model = Points()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        clouds, labels = torch.randn(8, 192, 3, generator=random), torch.randint(0, 8, (8,), generator=random)
        loss = F.cross_entropy(model(clouds), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 96), nn.Linear(96, 96), nn.Linear(96, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.third(x)


def many_opinions(steps: int) -> list[Tensor]:
    """Eight networks of an ensemble at once, whose spread tells how sure they are."""
    random = seeded()
    models = [Guess().eval() for _ in range(8)]
    parameters, buffers = stack_module_state(models)
    base = Guess()

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(base, (parameters, buffers), (x,))

    of_all = vmap(one, in_dims=(0, 0, None))
    spreads = []
    with torch.no_grad():
        for _ in range(steps):
            x = torch.randn(320, 16, generator=random)
            opinions = of_all(parameters, buffers, x)
            spreads.append(opinions.std(0).mean(1))
    return [torch.stack(spreads)]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 24, 3, stride=2), nn.Conv2d(24, 48, 3, stride=2)
        self.third = nn.Conv2d(48, 64, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return F.relu(self.third(x)).mean((2, 3))


def only_the_head(steps: int) -> list[Tensor]:
    """A trained backbone stays as it is; only a head is trained, in double precision, on what it sees."""
    random = seeded()
    backbone = Backbone().eval().requires_grad_(False)
    wide, head = nn.Linear(64, 256).double(), nn.Linear(256, 5).double()
    parameters = [*wide.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
    for _ in range(steps):
        images, labels = torch.rand(16, 3, 56, 56, generator=random), torch.randint(0, 5, (16,), generator=random)
        with torch.no_grad():
            features = backbone(images).double()
        loss = F.cross_entropy(head(F.relu(wide(features))), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (outlines, 90),
        (channels_once, 100),
        (weather, 90),
        (mixer, 150),
        (specialists, 300),
        (bags, 600),
        (compiled_beforehand, 600),
        (operators, 90),
        (point_clouds, 250),
        (many_opinions, 400),
        (only_the_head, 300),
    )
]
