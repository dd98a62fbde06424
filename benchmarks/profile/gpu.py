"""What a profile costs on a GPU, and whether its kernels are those of Kineto."""

from __future__ import annotations

from functools import cache

import torch
from torch.profiler import ProfilerActivity

from benchmarks.harness import Bar, Measured, paired
from benchmarks.profile.workloads import Workload, build
from shoestring.profile import profiled
from shoestring.profile.kineto import EVERY, ran
from shoestring.profile.tree import NodeKind

STEPS = 20


def cost() -> Measured:
    """A step of the GPT on a GPU with an exact profile over one without."""
    torch.set_default_device("cuda")
    try:
        workload = build("gpt")
    finally:
        torch.set_default_device("cpu")

    def plain() -> None:
        run(workload)

    def watched() -> None:
        with profiled():
            run(workload)

    return paired(watched, plain).measured()


def run(workload: Workload) -> None:
    for _ in range(STEPS):
        workload.step()
    torch.cuda.synchronize()


@cache
def kernels() -> tuple[tuple[int, int], tuple[int, int]]:
    """Number and nanoseconds of what the GPU ran in some steps, by the profile and by Kineto alone."""
    torch.set_default_device("cuda")
    try:
        workload = build("gpt")
    finally:
        torch.set_default_device("cpu")
    run(workload)
    with profiled() as result:
        for _ in range(EVERY):
            run(workload)
    tree = result.profile.tree
    ours = tree.kind == NodeKind.KERNEL
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as theirs:
        for _ in range(EVERY):
            run(workload)
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
