"""Bars of `memory.offload`: the bits of masters stepped by hand, its host memory, and its time on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Bar, Deadline, Measured, Paired, paired, stored
from benchmarks.intervals import of_mean
from benchmarks.memory.zero_worker import SHAPE, loss_of
from benchmarks.training import recipe, train_to_end
from shoestring.core.compose import attach, compose
from shoestring.core.job import Job
from shoestring.memory import Offload, Recompute, Zero
from shoestring.memory.offload.placement import LEASE
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.optim import AdamW, Clip

STEPS = 50
XL = GPTConfig(vocab_size=50304, dim=1600, layers=48, heads=25, kv_heads=25, hidden=4288, context=1024)
"""GPT2-XL's width, depth and vocabulary: 1.6 billion parameters."""
SEQUENCES = 32  # of 1,024 tokens in a step
ROUNDS = 6  # of a step each way, of one to two seconds


LATE, LATE_STEPS, SEEDS = 0.9, 300, (0, 1, 2)
LOW_RATE, LOW_RATE_SEEDS = 3e-4, (3, 4, 5)


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE).bfloat16()


def _tokens(step: int) -> Tensor:
    return torch.randint(SHAPE.vocab_size, (2, 17), generator=torch.Generator().manual_seed(step))


def differing(_: Deadline) -> Measured:
    """The largest difference from float32 masters that torch's fused AdamW steps on the CPU."""
    offloaded, by_hand = _model(), _model()
    job = attach(offloaded, torch.optim.AdamW(offloaded.parameters(), fused=True), Offload())
    parameters = list(by_hand.parameters())
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, fused=True)
    with job:
        for step in range(STEPS):
            for model in (offloaded, by_hand):
                loss_of(model, _tokens(step)).backward()
            job.optimizer.step()
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad, parameter.grad = _float32(parameter.grad), None
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)
        offloaded.state_dict()
    apart = [(a - b).abs().max() for a, b in zip(offloaded.parameters(), parameters, strict=True)]
    return Measured(float(torch.stack(apart).max()), f"bf16 parameters, {STEPS} steps")


def _float32(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.float()


def host_memory(_: Deadline) -> Measured:
    """Bytes taken of the host, as a part of 4 for masters, 8 for averages and 2 for what travels a parameter."""
    model = _model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with attach(model, torch.optim.AdamW(model.parameters(), fused=True), Offload()) as job:
        loss_of(model, _tokens(0)).backward()
        job.optimizer.step()
        leased = job.world.memory.leases[LEASE][0]
        state: Any = job.optimizer.state.values()
        averages = sum(value.untyped_storage().nbytes() for each in state for value in each.values())
    taken = leased - 8 * parameters + averages
    return Measured(taken / (14 * parameters), f"{taken / 1e6:.1f} MB for {parameters / 1e6:.1f} M parameters")


# -- late steps --------------------------------------------------------------------------------------------------------


def late_loss(runs: Path, deadline: Deadline, seeds: Sequence[int], rate: float = 0.0) -> Measured:
    """Held-out bits a byte with most elements stepped late, less those of runs in which nothing is late.

    Args:
        rate: a learning rate other than the recipe's.
    """

    def run(late: float, seed: int) -> float:
        document = recipe(LATE_STEPS, seed=seed, rate=rate)
        document["memory"] = {"offload": {"late": late}}

        def trained() -> dict[str, float]:
            with TemporaryDirectory() as folder:
                document["run"]["folder"] = f"{folder}/run"
                return {"bits": train_to_end(document, deadline.check)["held_out_bits_per_byte"]}

        name = f"late-{late:g}-{f'{rate:g}-' if rate else ''}{seed}.json"
        return stored(runs / name, deadline.check, trained)["bits"]

    gaps = [run(LATE, seed) - run(0.0, seed) for seed in seeds]
    return of_mean(gaps, "each seed: " + ", ".join(f"{gap:+.4f}" for gap in gaps))


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def xl_step(holder: Zero, clip: bool, sequences: int = SEQUENCES) -> tuple[Job, Any]:
    """A job over GPT2-XL's shapes with masters on the device or on the host, and its step."""
    with torch.device("cuda"):
        model: nn.Module = GPT(XL).bfloat16()
    features = [Recompute(), holder, AdamW(), *([Clip()] if clip else [])]
    job = compose(Job(model, loss=_loss), features)
    tokens = torch.randint(XL.vocab_size, (8, XL.context + 1), device="cuda")
    batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def step() -> None:
        job.step(*[batch] * (sequences // 8))
        torch.cuda.synchronize()

    return job, step


def _loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    targets = batch["targets"].flatten()
    return F.cross_entropy(output.flatten(0, 1), targets, reduction="sum"), torch.tensor(targets.numel()).to(targets)


def compared(offloaded: Callable[[], object], held: Callable[[], object]) -> Paired:
    return paired(offloaded, held, rounds=ROUNDS, order="AB")


def gpu_time(clip: bool, _: Deadline) -> Measured:
    """The time of a step of 32,768 tokens over that with all state on the device."""
    (held, inside), (offloaded, outside) = xl_step(Zero(), clip), xl_step(Offload(), clip)
    with held, offloaded:
        return compared(outside, inside).measured()


def gpu_time_late(_: Deadline) -> Measured:
    """The time of a step of 8,192 tokens, most of it one step late, over that with all state on the device."""
    steps = [xl_step(holder, False, 8) for holder in (Zero(), Offload(), Offload(late=LATE))]
    with steps[0][0], steps[1][0], steps[2][0]:
        inside, waiting, late = (step for _, step in steps)
        found, without = compared(late, inside), compared(waiting, inside)
        return found.measured(f"{found}; with nothing late {without}")


def gpu_peak(_: Deadline) -> Measured:
    """GiB that torch allocates at the peak of GPT2-XL's training with offloaded state."""
    torch.cuda.reset_peak_memory_stats()
    job, step = xl_step(Offload(), False)
    with job:
        step()
        step()
    return Measured(torch.cuda.max_memory_allocated() / 2**30)


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of this part, those of a GPU included."""
    stepped = "masters stepped by torch's fused AdamW on the CPU"
    return [
        Bar("memory.offload.equal", f"largest difference of a weight from {stepped}", "<=", 0, differing, kind="exact"),
        Bar("memory.offload.host", "host memory taken, of the bytes needed", "<=", 1.02, host_memory, kind="exact"),
        Bar(
            "memory.offload.late-loss",
            f"held-out bits a byte with {100 * LATE:g} % of the elements one step late, less those with nothing late; "
            f"the quickstart's GPT, {LATE_STEPS} steps",
            "<=",
            0.01,
            lambda _: late_loss(runs, deadline, SEEDS),
            seeds=SEEDS,
            kind="drawn",
        ),
        Bar(
            "memory.offload.late-loss-low-rate",
            f"the same at a learning rate of {LOW_RATE:g}, as fine-tuning has, in place of 4e-3",
            "<=",
            0.01,
            lambda _: late_loss(runs, deadline, LOW_RATE_SEEDS, LOW_RATE),
            seeds=LOW_RATE_SEEDS,
            kind="drawn",
        ),
        *gpu_rows(),
    ]


def gpu_rows() -> list[Bar]:
    """The bars that need a GPU."""
    what = "time of a step, of that with all state on the GPU: GPT2-XL's shapes, 32k tokens"
    return [
        Bar("memory.offload.gpu-time", what, "<=", 1.15, partial(gpu_time, False), gpu=True),
        Bar("memory.offload.gpu-time-clipped", f"{what}, clipping", "<=", 1.3, partial(gpu_time, True), gpu=True),
        Bar(
            "memory.offload.gpu-time-late",
            f"time of a step with {100 * LATE:g} % one step late, of that with all state on the GPU: GPT2-XL's shapes, "
            "8k tokens",
            "<=",
            1.15,
            gpu_time_late,
            gpu=True,
        ),
        Bar(
            "memory.offload.gpu-peak",
            "GiB at the peak: GPT2-XL's shapes, 32k tokens",
            "<=",
            12,
            gpu_peak,
            gpu=True,
            kind="exact",
        ),
    ]
