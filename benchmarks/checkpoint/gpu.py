"""Bars that need a GPU: what checkpoints of a large model's training state cost training."""

from __future__ import annotations

import gc
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Bar, Deadline, Measured
from shoestring.checkpoint.format.checksum import crc32

if TYPE_CHECKING:
    from torch import nn

    from shoestring.core.feature import Feature
    from shoestring.core.job import Job, attachments_of

XL = {"dim": 1600, "layers": 48, "heads": 25, "kv_heads": 25, "hidden": 4280}  # 1.558 B parameters, as GPT2-XL
MICRO_BATCHES, SEQUENCES, TOKENS = 4, 4, 1024  # of a step: half a second of an H100, a thirtieth of GPT-2's batch
EVERY = (0, 4, 2)  # steps between two checkpoints, in turn
WARM, STEPS, ROUNDS = 4, 8, 2
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
    attachments_of(job).at(Phase.WAIT, lambda: found.mark("asked"))
    attachments_of(job).at(Phase.CAPTURE, lambda: found.mark("stepped"))
    with compose(job, [Autocast(dtype="bf16"), *features]):
        attachments_of(job).at(Phase.WAIT, lambda: found.mark("told"))
        yield found


@dataclass
class Block:
    """Steps in turn with others: the mean of a step, and of the time in which the GPU had nothing to do, in seconds."""

    seconds: float
    idle: float


@dataclass
class Turns:
    """Blocks of steps without checkpoints (0) and with one every so many steps, round after round in one run."""

    blocks: dict[int, list[Block]]
    nbytes: float
    """Of a checkpoint."""
    told: float
    """Seconds of the host for a checkpoint every second step."""

    def seconds(self, every: int) -> float:
        return median(block.seconds for block in self.blocks[every])

    def idle(self, every: int) -> float:
        return median(block.idle for block in self.blocks[every])

    @property
    def note(self) -> str:
        rounds = "; ".join(
            " ".join(f"{1e3 * block.seconds:.1f}" for block in blocks) + f" ms a step with one every {every} steps"
            if every
            else " ".join(f"{1e3 * block.seconds:.1f}" for block in blocks) + " ms a step without"
            for every, blocks in self.blocks.items()
        )
        return f"{self.nbytes / 1e9:.1f} GB; {rounds}; checksums by {crc32.__module__.partition('.')[0]}"


@cache
def turns(rounds: int = ROUNDS) -> Turns:
    """A GPT of GPT2-XL's size in training, checksums on.

    What counts as idle is time in which the GPU has nothing to do, by its own clock: before a step, for the host is
    busy with a checkpoint, and before the optimizer, for copies are not through.
    """
    import torch

    from shoestring.checkpoint import Tiered
    from shoestring.checkpoint.tiers.save_schedule import MEMORY, CheckpointSchedule
    from shoestring.models.gpt import gpt1b

    with torch.device("cuda"):
        model = gpt1b(context=TOKENS, **XL)
    found = Turns({every: [] for every in EVERY}, 0.0, 0.0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        settings = Tiered(folder=f"{place}/saves", memory_folder=place, memory_every=2, disk_every=0, slots=SLOTS)
        with training(model, [settings]) as run:
            while run.copied < (SLOTS + 1) * found.nbytes or not found.nbytes:  # until every slot was filled once
                run.job.step(*run.batches)
                found.nbytes = found.nbytes or run.copied
            schedule = run.job.kept["checkpoint"].state
            assert isinstance(schedule, CheckpointSchedule)
            for _, every in product(range(rounds), EVERY):
                schedule.steps[MEMORY] = every
                run.steps(WARM)
                before, told = run.copied, run.job.trace.facts["checkpoint_stall"]
                found.blocks[every].append(Block(*run.steps(STEPS)))
                due, made = STEPS // every if every else 0, (run.copied - before) / found.nbytes
                if not due <= made <= due + (every > 0):
                    raise RuntimeError(f"{made:.0f} checkpoints in place of {due}, one every {every} steps")
                if every == 2:
                    found.told = (run.job.trace.facts["checkpoint_stall"] - told) / due
    del model, run
    gc.collect()
    torch.cuda.empty_cache()
    return found


def stall(_: Deadline) -> Measured:
    """Idle time of the GPU for a checkpoint every second step, more than without."""
    found = turns()
    note = f"{1e3 * found.told:.1f} ms of the host, which runs ahead; {found.note}"
    return Measured(1e3 * 2 * (found.idle(2) - found.idle(0)), note)


def slowdown(every: int, _: Deadline) -> Measured:
    """Mean time of a step beside checkpoints over that without."""
    found = turns()
    return Measured(found.seconds(every) / found.seconds(0), found.note)


def rows() -> list[Bar]:
    """The bars."""
    what = "milliseconds for which a checkpoint of GPT2-XL's training state, every second step, stops training"
    slower = "mean time of a step with a checkpoint of GPT2-XL's training state {} over that without"
    return [
        Bar("checkpoint.gpu-stall", what, "<=", 10.0, stall, gpu=True),
        Bar("checkpoint.gpu-every-2", slower.format("every second step"), "<=", 1.025, partial(slowdown, 2), gpu=True),
        Bar("checkpoint.gpu-every-4", slower.format("every fourth step"), "<=", 1.013, partial(slowdown, 4), gpu=True),
    ]
