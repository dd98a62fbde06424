"""What a profile costs on a GPU. Kernels are not joined to the tree yet: those bars are declared with that."""

from __future__ import annotations

import torch

from benchmarks.harness import Bar, Measured, paired
from benchmarks.profile.workloads import Workload, build
from shoestring.profile import profiled

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


def rows() -> list[Bar]:
    return [
        Bar(
            "profile.gpu-exact",
            "time of training with an exact profile over that without, GPT on a GPU",
            "<=",
            1.03,
            lambda deadline: cost(),
            gpu=True,
        )
    ]
