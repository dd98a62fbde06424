"""Models in use, without any of the nine faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from benchmarks.profile.planted.program import Clean, seeded, weights


def half_checkpoint(steps: int) -> list[Tensor]:
    """Weights were stored in half precision; they are cast once, and pictures of bytes once each."""
    random = seeded()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 48, 3)
    ).eval()
    stored = {name: value.half() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.float() for name, value in stored.items()})
    first, second, third = model[0], model[2], model[4]
    found = []
    with torch.inference_mode():
        for _ in range(steps):
            photos = torch.randint(0, 256, (8, 3, 64, 64), generator=random, dtype=torch.uint8)
            x = photos.float().div_(255)
            x = F.relu(first(x))
            x = F.relu(second(x))
            x = third(x)
            found.append(x.mean((2, 3)))
    return found


class Decoder(nn.Module):
    """One layer that keeps the keys and values of all it has read."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(300, width), nn.Linear(width, 300)
        self.query, self.both = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.expand, self.contract = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.keys, self.values = (nn.Buffer(torch.zeros(16, longest, width)) for _ in range(2))

    def forward(self, tokens: Tensor, position: int) -> Tensor:
        x = self.embed(tokens)
        key, value = self.both(x).chunk(2, dim=1)
        self.keys[:, position], self.values[:, position] = key, value
        query = self.query(x).unsqueeze(1)
        seen = slice(0, position + 1)
        x = x + F.scaled_dot_product_attention(query, self.keys[:, seen], self.values[:, seen]).squeeze(1)
        x = x + self.contract(F.gelu(self.expand(x)))
        return self.head(x)


def answering(steps: int) -> list[Tensor]:
    """Answers of a chat model; whether all have ended is asked after sixteen tokens."""
    random = seeded()
    model = Decoder(160, 48).eval()
    found = []
    with torch.inference_mode():
        for _ in range(steps):
            tokens = torch.randint(1, 300, (16,), generator=random)
            ended = torch.zeros(16, dtype=torch.bool)
            answer = []
            for position in range(48):
                tokens = model(tokens, position).argmax(1)
                ended |= tokens == 0
                answer.append(tokens)
                if position % 16 == 15 and bool(ended.all()):
                    break
            found.append(torch.stack(answer))
    return found


def voices(steps: int) -> list[Tensor]:
    """Which speaker a recording is of: spectra, a filter bank as a product, and means over time."""
    random = seeded()
    window, filters = torch.hann_window(400), torch.rand(129, 64, generator=random)
    read, hide, known = nn.Conv1d(64, 96, 5), nn.Conv1d(96, 96, 1), torch.randn(96, 50, generator=random)
    found = []
    with torch.inference_mode():
        for _ in range(steps):
            waves = torch.randn(8, 8000, generator=random)
            spectra = torch.stft(waves, 400, 160, window=window, return_complex=True)
            power = spectra.abs().square()[:, :129]
            loud = (power.mT @ filters).clamp_min(1e-6).log()
            x = F.relu(read(loud.mT))
            x = F.relu(hide(x))
            found.append((x.mean(2) @ known).argmax(1))
    return found


class Street(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inside, self.up = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 1, 1), nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.down(x))
        x = x + F.relu(self.inside(x))
        return F.interpolate(self.up(x), scale_factor=2, mode="bilinear")


def streets(steps: int) -> list[Tensor]:
    """How well street scenes are segmented: counts of pixels, taken out at the end."""
    random = seeded()
    model = Street().eval()
    counts = torch.zeros(64, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(steps):
            scenes, labels = torch.rand(2, 3, 64, 64, generator=random), torch.randint(0, 8, (2, 64, 64))
            scores = model(scenes)
            guesses = scores.argmax(1)
            counts += torch.bincount((labels * 8 + guesses).flatten(), minlength=64)
    both = counts.view(8, 8).float()
    overlap = both.diagonal() / (both.sum(0) + both.sum(1) - both.diagonal()).clamp(min=1)
    return [torch.tensor(overlap.tolist())]


def small_tables(steps: int) -> list[Tensor]:
    """Offers from tables of bytes, whose rows become floats when they are looked up."""
    random = seeded()
    table = torch.randint(-128, 128, (5000, 64), generator=random).to(torch.int8)
    scales = torch.rand(5000, 1, generator=random) / 128
    first, second = nn.Linear(192, 256), nn.Linear(256, 128)
    third, score = nn.Linear(128, 128), nn.Linear(128, 1)
    found = []
    with torch.inference_mode():
        for _ in range(steps):
            rows = torch.randint(0, 5000, (768,), generator=random)
            vectors = table.index_select(0, rows).float() * scales.index_select(0, rows)
            x = F.relu(first(vectors.view(256, 192)))
            x = F.relu(second(x))
            x = F.relu(third(x))
            found.append(score(x).squeeze(1).topk(10).indices)
    return found


class Velocity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.mix, self.write = nn.Linear(33, 160), nn.Linear(160, 160), nn.Linear(160, 32)

    def forward(self, x: Tensor, time: float) -> Tensor:
        moment = x.new_full((len(x), 1), time)
        hidden = F.silu(self.read(torch.cat([x, moment], 1)))
        hidden = F.silu(self.mix(hidden))
        return self.write(hidden)


def flowing(steps: int) -> list[Tensor]:
    """Samples of a flow, by four evaluations to a step."""
    random = seeded()
    velocity = Velocity().eval()
    x = torch.randn(256, 32, generator=random)
    with torch.inference_mode():
        for number in range(steps):
            time = number / steps
            one = velocity(x, time)
            two = velocity(x + one / (2 * steps), time)
            three = velocity(x + two / (2 * steps), time)
            four = velocity(x + three / steps, time)
            x = x + (one + 2 * two + 2 * three + four) / (6 * steps)
    return [x]


def committee(steps: int) -> list[Tensor]:
    """Five models agree on tables, in one pass for all of them."""
    random = seeded()
    members = [nn.Sequential(nn.Linear(30, 96), nn.ReLU(), nn.Linear(96, 3)) for _ in range(5)]
    parameters, buffers = stack_module_state(members)

    def member(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(members[0], (parameters, buffers), (x,))

    together = vmap(member, in_dims=(0, 0, None))
    read, square = nn.Linear(60, 120), nn.Linear(120, 30)
    found = []
    with torch.no_grad():
        for _ in range(steps):
            raw = torch.randn(256, 60, generator=random)
            table = square(torch.tanh(read(raw)))
            chances = together(parameters, buffers, table).softmax(2)
            found.append(chances.mean(0).argmax(1))
    return found


class Reported(nn.Module):
    """A network one of whose values is noted by code that must not be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(256, 320), nn.Linear(320, 256), nn.Linear(256, 320)
        self.fourth = nn.Linear(320, 256)
        self.notes: list[Tensor] = []

    @torch._dynamo.disable
    def note(self, x: Tensor) -> None:
        self.notes.append(x.mean())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        self.note(x)
        x = F.relu(self.third(x))
        return self.fourth(x)


@cache
def reported() -> tuple[Reported, Callable[[Tensor], Tensor]]:
    """Compiled once in a process; the break is wanted, and costs little beside the products."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Reported().eval()
    return model, torch.compile(model, backend="eager")


def noting(steps: int) -> list[Tensor]:
    random = seeded()
    model, forward = reported()
    model.notes.clear()
    found = []
    with torch.no_grad():
        for _ in range(steps):
            found.append(forward(torch.randn(256, 256, generator=random)).mean(0))
    return [*found, *model.notes]


def archive_search(steps: int) -> list[Tensor]:
    """Texts that are like a question: one large product, as it must be, between layers of their own."""
    random = seeded()
    library = F.normalize(torch.randn(1500, 192, generator=random), dim=1).T.contiguous()
    read, hide, rank = nn.Linear(192, 768), nn.Linear(768, 192), nn.Linear(192, 192)
    found = []
    with torch.inference_mode():
        for _ in range(steps):
            asked = torch.randn(128, 192, generator=random)
            hidden = F.gelu(read(asked))
            vector = F.normalize(rank(hide(hidden)), dim=1)
            found.append((vector @ library).topk(5, dim=1).indices)
    return found


def guided(steps: int) -> list[Tensor]:
    """Pictures that a classifier is sure of, by the gradient at the pixels."""
    random = seeded()
    first, second, third = nn.Conv2d(1, 16, 3, 2), nn.Conv2d(16, 32, 3, 2), nn.Linear(32 * 36, 64)
    classify = nn.Linear(64, 10)
    pictures = torch.rand(16, 1, 28, 28, generator=random)
    for _ in range(steps):
        pixels = pictures.detach().requires_grad_()
        x = F.relu(first(pixels))
        x = F.relu(second(x)).flatten(1)
        x = F.relu(third(x))
        sure = classify(x).log_softmax(1)[:, 3].sum()
        (slope,) = torch.autograd.grad(sure, pixels)
        pictures = (pictures + 0.1 * slope).clamp(0, 1)
    return [pictures, *weights(classify)]


PROGRAMS = [
    Clean(run.__name__.replace("_", "-"), run, steps)
    for run, steps in (
        (half_checkpoint, 300),
        (answering, 20),
        (voices, 200),
        (streets, 150),
        (small_tables, 400),
        (flowing, 240),
        (committee, 300),
        (noting, 150),
        (archive_search, 120),
        (guided, 120),
    )
]
