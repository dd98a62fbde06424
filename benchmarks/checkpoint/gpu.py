"""The bar that needs a GPU: what a checkpoint of a large model's training state stops training for."""

from __future__ import annotations

import gc
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Bar, Deadline, Measured

if TYPE_CHECKING:
    from torch import nn

    from shoestring.core.feature import Feature
    from shoestring.core.job import Job

XL = {"dim": 1600, "layers": 48, "heads": 25, "kv_heads": 25, "hidden": 4280}  # 1.558 B parameters, as GPT2-XL
MICRO_BATCHES, SEQUENCES, TOKENS = 4, 4, 1024  # of a step: half a second of an H100, a thirtieth of GPT-2's batch
EVERY, SAVES = 2, 12
SLOTS = 3


@dataclass(eq=False)
class Training:
    """A run whose steps say when the GPU had nothing to do for lack of work, or for copies it must wait for."""

    job: Job
    batches: Sequence[Any]
    _marks: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def mark(self, moment: str) -> None:
        """Of the GPU, not of the host, which runs ahead of it."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks[moment].append(event)

    def steps(self, count: int) -> tuple[float, float]:
        """Mean seconds of a step, and those in which the GPU had nothing to do before it or before its optimizer."""
        import torch

        self._marks.clear()
        for _ in range(count + 1):  # between the first and the last beginning lie `count` steps
            self.mark("begun")
            self.job.step(*self.batches)
        torch.cuda.synchronize()
        begun, asked, told, stepped = (self._marks[name] for name in ("begun", "asked", "told", "stepped"))
        idle = [before.elapsed_time(after) for before, after in zip(stepped, begun[1:], strict=False)]
        waits = [before.elapsed_time(after) for before, after in zip(asked[1:], told[1:], strict=True)]
        return begun[0].elapsed_time(begun[-1]) / count / 1e3, (fmean(idle) + fmean(waits)) / 1e3

    @property
    def copied(self) -> float:
        return self.job.trace.facts.get("checkpoint_bytes", 0.0)


@contextmanager
def training(model: nn.Module, features: Sequence[Feature]) -> Iterator[Training]:
    import torch
    from torch.optim import AdamW

    from shoestring.core.compose import compose
    from shoestring.core.feature import Phase
    from shoestring.core.job import Job
    from shoestring.precision import Autocast

    tokens = torch.randint(50_000, (MICRO_BATCHES, SEQUENCES, TOKENS), device="cuda")
    job = Job(model, optimizer=partial(AdamW, lr=1e-4, fused=True))
    found = Training(job, [(each, each) for each in tokens])
    job.at(Phase.WAIT, lambda: found.mark("asked"))
    job.at(Phase.CAPTURE, lambda: found.mark("stepped"))
    with compose(job, [Autocast(dtype="bf16"), *features]):
        job.at(Phase.WAIT, lambda: found.mark("told"))
        yield found


def stall(deadline: Deadline) -> Measured:
    """Every second step of a GPT of GPT2-XL's size is saved, checksums on.

    What counts is time in which the GPU has nothing to do, by its own clock: before a step, for the host is busy with
    a checkpoint, and before the optimizer, for copies are not through. The same without checkpoints is subtracted.
    """
    import torch

    from shoestring.checkpoint import Tiered
    from shoestring.checkpoint.format.checksum import crc32
    from shoestring.models.gpt import gpt1b

    with torch.device("cuda"):
        model = gpt1b(context=TOKENS, **XL)
    with training(model, []) as plain:
        plain.steps(6)
        seconds, idle = plain.steps(EVERY * SAVES)
    del plain  # and with it its optimizer's state
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        settings = Tiered(folder=f"{place}/saves", memory=place, memory_every=EVERY, disk_every=0, slots=SLOTS)
        with training(model, [settings]) as saved:
            first = 0.0
            while saved.copied < (SLOTS + 1) * first or not first:  # until every slot was filled once
                deadline.check()
                saved.job.step(*saved.batches)
                first = first or saved.copied
            before, told = saved.copied, saved.job.trace.facts["checkpoint_stall"]
            beside, stopped = saved.steps(EVERY * SAVES)
            told = saved.job.trace.facts["checkpoint_stall"] - told
            saves = (saved.copied - before) / first
    if saves < SAVES:
        raise RuntimeError(f"only {saves:.0f} of {SAVES} checkpoints in {EVERY * SAVES} steps of {1e3 * beside:.0f} ms")
    note = (
        f"{first / 1e9:.1f} GB every {EVERY} steps of {1e3 * seconds:.0f} ms, {1e3 * beside:.0f} beside checkpoints; "
        f"{1e3 * told / saves:.1f} ms of the host, which runs ahead; checksums by {crc32.__module__.partition('.')[0]}"
    )
    return Measured(1e3 * EVERY * (stopped - idle), note)


def rows() -> list[Bar]:
    """The bar."""
    what = "milliseconds for which a checkpoint of GPT2-XL's training state, every second step, stops training"
    return [Bar("checkpoint.gpu-stall", what, "<=", 10.0, stall, gpu=True)]
