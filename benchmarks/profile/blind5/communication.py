"""Waiting for another rank, which could have been hidden or saved.

The other rank is a process on the same machine; what it computes itself is only waited for.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights

T = TypeVar("T")


def join(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2, timeout=timedelta(seconds=60))


def be_the_other(file: str, other: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    join(1, file)
    other()
    dist.destroy_process_group()


def on_two_ranks(first: Callable[[], T], other: Callable[[], None]) -> T:
    """What one rank returns, while another one runs in a process of its own."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        file = f"file://{folder}/ranks"
        process = multiprocessing.get_context("fork").Process(target=be_the_other, args=(file, other), daemon=True)
        process.start()
        join(0, file)
        try:
            return first()
        finally:
            dist.destroy_process_group()
            process.join()


class Half(nn.Module):
    """This rank's half of a model whose layers are split between two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 64)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for width in (256, 256, 64)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x) * self.scales[0])
        x = F.relu(self.second(x) * self.scales[1])
        return self.third(x) * self.scales[2]


def clipped_together(steps: int, in_turn: bool) -> list[Tensor]:
    """Gradients are clipped by their norm over both halves."""

    def first() -> list[Tensor]:
        random = seeded()
        model = Half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
        for _ in range(steps):
            x = torch.randn(160, 64, generator=random)
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            if in_turn:
                total = torch.zeros(())
                for gradient in gradients:
                    square = gradient.square().sum()
                    dist.all_reduce(square)  # fault: norms-reduced-in-turn
                    total += square
            else:
                total = torch.stack([gradient.square().sum() for gradient in gradients])
                dist.all_reduce(total)
                total = total.sum()
            torch._foreach_mul_(gradients, (0.1 / (total.sqrt() + 1e-6)).clamp(max=1))
            optimizer.step()
        return weights(model)

    def other() -> None:
        for number in range(steps):
            squares = torch.full((9,), 0.001 * (1 + number % 5))
            for part in squares.split(1) if in_turn else [squares]:
                dist.all_reduce(part.squeeze(0) if in_turn else part)

    return on_two_ranks(first, other)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 24, 3, stride=2), nn.Conv2d(24, 48, 3, stride=2)
        self.describe = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return F.normalize(self.describe(x.mean((2, 3))), dim=1)


class Caption(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.wide = nn.Embedding(400, 64), nn.Linear(64, 384)
        self.narrow, self.describe = nn.Linear(384, 64), nn.Linear(64, 32)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.narrow(F.gelu(self.wide(x)))
        return F.normalize(self.describe(x.mean(1)), dim=1)


def pictures_and_captions(steps: int, at_once: bool) -> list[Tensor]:
    """Captions are compared with the pictures of both ranks; the other rank has larger pictures and fewer captions."""

    def first() -> list[Tensor]:
        random = seeded()
        picture, caption = Picture(), Caption()
        parameters = [*picture.parameters(), *caption.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)
        sizes = [parameter.numel() for parameter in parameters]
        for _ in range(steps):
            images = torch.rand(24, 3, 40, 40, generator=random)
            words = torch.randint(0, 400, (24, 64), generator=random)
            shown = picture(images)
            everywhere = [torch.empty(24, 32), torch.empty(24, 32)]
            if at_once:
                dist.all_gather(everywhere, shown.detach())  # fault: pictures-gathered-before-captions
                written = caption(words)
            else:
                handle = dist.all_gather(everywhere, shown.detach(), async_op=True)
                written = caption(words)
                assert handle is not None
                handle.wait()
            scores = written @ torch.cat([shown, everywhere[1]]).T / 0.2
            loss = F.cross_entropy(scores, torch.arange(24))
            optimizer.zero_grad()
            loss.backward()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient))
            optimizer.step()
        return [parameter.detach().clone() for parameter in parameters]

    def other() -> None:
        random = torch.Generator().manual_seed(7)
        count = sum(parameter.numel() for part in (Picture(), Caption()) for parameter in part.parameters())
        for _ in range(steps):
            shown = F.normalize(torch.randn(24, 32, generator=random), dim=1)
            time.sleep(0.008)
            dist.all_gather([torch.empty(24, 32), torch.empty(24, 32)], shown)
            time.sleep(0.003)
            dist.all_reduce(torch.zeros(count))

    return on_two_ranks(first, other)


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(48, 384), nn.Linear(384, 384), nn.Linear(384, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.third(x)


def agreed_to_stop(steps: int, each_batch: bool) -> list[Tensor]:
    """The other rank watches for when to stop, which it only ever does after ten batches; it is quick by turns."""

    def first() -> list[Tensor]:
        random = seeded()
        model = Tabular()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        stop = torch.zeros((), dtype=torch.int32)
        for number in range(steps):
            x, labels = torch.randn(128, 48, generator=random), torch.randint(0, 8, (128,), generator=random)
            loss = F.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if each_batch or number % 10 == 9:
                dist.broadcast(stop, src=1)  # fault: stop-agreed-each-batch
            if number % 10 == 9 and stop:
                break
        return weights(model)

    def other() -> None:
        for number in range(steps):
            time.sleep(0.0085 if number % 2 else 0.0005)
            if each_batch or number % 10 == 9:
                dist.broadcast(torch.zeros((), dtype=torch.int32), src=1)

    return on_two_ranks(first, other)


def answers_gathered(steps: int, as_objects: bool) -> list[Tensor]:
    """What both ranks answer to a test set, batch by batch as lists of objects, or in the end as a tensor."""

    def first() -> list[Tensor]:
        random = seeded()
        model = Tabular().eval()
        answers, right = [], torch.zeros((), dtype=torch.long)
        with torch.inference_mode():
            for _ in range(steps):
                x, labels = torch.randn(192, 48, generator=random), torch.randint(0, 8, (192,), generator=random)
                answer = model(x).argmax(1)
                right += (answer == labels).sum()
                if as_objects:
                    gathered: list[Any] = [None, None]
                    dist.all_gather_object(gathered, {"answers": answer.tolist()})  # fault: answers-gathered-as-objects
                    answers += [torch.tensor(rank["answers"]) for rank in gathered]
                else:
                    answers.append(answer)
            if as_objects:
                return [torch.stack(answers[::2]), torch.stack(answers[1::2]), right]
            own = torch.stack(answers)
            both = [torch.empty_like(own), torch.empty_like(own)]
            dist.all_gather(both, own)
            return [*both, right]

    def other() -> None:
        answers = (torch.arange(steps).unsqueeze(1) + torch.arange(192)) % 8
        if as_objects:
            for answer in answers:
                dist.all_gather_object([None, None], {"answers": answer.tolist()})
        else:
            dist.all_gather([torch.empty_like(answers), torch.empty_like(answers)], answers)

    return on_two_ranks(first, other)


PROGRAMS = [
    Planted(name, "communication", run, fixed, steps, __name__, clock=time.perf_counter)
    for name, run, fixed, steps in (
        ("norms-reduced-in-turn", lambda n: clipped_together(n, True), lambda n: clipped_together(n, False), 120),
        (
            "pictures-gathered-before-captions",
            lambda n: pictures_and_captions(n, True),
            lambda n: pictures_and_captions(n, False),
            60,
        ),
        ("stop-agreed-each-batch", lambda n: agreed_to_stop(n, True), lambda n: agreed_to_stop(n, False), 200),
        ("answers-gathered-as-objects", lambda n: answers_gathered(n, True), lambda n: answers_gathered(n, False), 200),
    )
]
