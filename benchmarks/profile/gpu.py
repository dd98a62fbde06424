"""What a profile costs on a GPU, and whether its kernels are those of Kineto.

The program is a plain loop that trains GPT-2's size: the workloads beside this make tensors where torch's default is,
and their steps are of an instant on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity

from benchmarks.harness import Bar, Measured, paired
from shoestring.models.gpt import GPT, gpt124m
from shoestring.profile import profiled
from shoestring.profile.kineto import EVERY, ran
from shoestring.profile.tree import NodeKind

RUN, RUNS, ROUNDS = EVERY, 8, 6
SEQUENCES, TOKENS = 8, 1024

Train = Callable[[int], None]


def program(
    make: Callable[[], GPT] = gpt124m, device: str = "cuda", shape: tuple[int, int] = (SEQUENCES, TOKENS)
) -> Train:
    """Trains a model in bf16 for some steps, and waits for them."""
    with torch.device(device):
        model = make().bfloat16()
        tokens = torch.randint(model.config.vocab_size, (shape[0], shape[1] + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def train(steps: int) -> None:
        for _ in range(steps):
            step()

    return train


def cost() -> Measured:
    """A step of the GPT on a GPU with an exact profile over one without."""
    train = program()

    def watched() -> None:
        with profiled():
            train(RUN)

    return paired(watched, partial(train, RUN), rounds=ROUNDS, warmup=1, order="AB").measured()


@cache
def kernels() -> tuple[tuple[int, int], tuple[int, int]]:
    """Number and nanoseconds of what the GPU ran in some steps, by the profile and by Kineto alone."""
    train = program()
    train(RUN)
    with profiled() as result:
        train(RUNS * RUN)
    tree = result.profile.tree
    ours = tree.kind == NodeKind.KERNEL
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as theirs:
        train(RUNS * RUN)
    assert theirs.profiler is not None and theirs.profiler.kineto_results is not None
    work = ran(theirs.profiler.kineto_results.events())
    seconds = sum(each.end - each.start for each in work)
    return (int(tree.count[ours].sum()), int(tree.device[ours].sum())), (len(work), seconds)


def difference(which: int) -> Measured:
    """Of the profile's number (0) or time (1) of kernels from Kineto's, as a part of Kineto's."""
    ours, theirs = (found[which] for found in kernels())
    return Measured(abs(ours / theirs - 1), f"{ours:,} and by Kineto {theirs:,}")


def rows() -> list[Bar]:
    return [
        Bar(
            "profile.gpu-kernel-time",
            "difference of the kernels' time from Kineto's, GPT on a GPU",
            "<=",
            0.01,
            lambda deadline: difference(1),
            gpu=True,
        ),
        Bar(
            "profile.gpu-kernel-count",
            "difference of the number of kernels from Kineto's, GPT on a GPU",
            "<=",
            0.001,
            lambda deadline: difference(0),
            gpu=True,
            kind="exact",
        ),
        Bar(
            "profile.gpu-exact",
            "time of training with an exact profile over that without, GPT on a GPU",
            "<=",
            1.03,
            lambda deadline: cost(),
            gpu=True,
        ),
    ]
