"""Seconds of a checkpoint in one file beside those that write the same tensors without a checksum, and what a
checkpoint to memory adds to the steps around it, by a clock outside of the program."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.calm import was_calm
from benchmarks.checkpoint.stall import WIDTH, job_of
from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.intervals import of_median
from benchmarks.timing import paired
from shoestring.checkpoint import Plain
from shoestring.checkpoint.tiers.plain import Saver
from shoestring.checkpoint.tiers.staging import Copies
from shoestring.core.job import Job, attachments_of
from tests.rigs.checkpointing.trainee import fresh

LAYERS = 20
"""Layers of a model whose state, with that of Adam, has 252 MB."""
ROUNDS = 24
EVERY, SAVES = 3, 4
"""Steps from one checkpoint to the next, and checkpoints of a timed block of steps."""
Write = Callable[[dict[str, Any], Path], object]
"""Writes a state to a file."""


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a model's and an optimizer's state by names, as safetensors wants them."""
    moments = {f"{index}.{name}": one for index, of in state["optimizer"]["state"].items() for name, one in of.items()}
    return {**state["model"], **moments}


def with_safetensors(state: dict[str, Any], path: Path) -> None:
    save_file(flat(state), path)


def beside(write: Write, _: Deadline) -> Measured:
    """Seconds of a checkpoint over those of another way to write the state, which is synced too; both go to new files,
    and the last file but one is deleted."""
    with TemporaryDirectory(dir="/dev/shm") as root, job_of(Path(root), overlap=False, layers=LAYERS) as job:
        job.step((torch.randn(64, WIDTH),))
        attachments = attachments_of(job)
        saver = Saver(attachments, Plain(folder=f"{root}/ours", keep=2))
        state = {"model": attachments.module.state_dict(), "optimizer": job.optimizer.state_dict()}
        theirs, numbers = fresh(Path(root, "theirs")), count()

        def ours() -> None:
            attachments.progress.step += 1
            saver.save()

        def other() -> None:
            path = theirs / str(next(numbers))
            write(state, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            (theirs / str(int(path.name) - 2)).unlink(missing_ok=True)

        return paired(ours, other, rounds=ROUNDS).measured()


def outside(_: Deadline) -> Measured:
    """Seconds that a checkpoint to memory adds to a block of steps, over those of a copy of the same bytes."""
    with (
        TemporaryDirectory(dir="/dev/shm") as root,
        job_of(Path(root, "saved"), overlap=True) as saved,
        job_of(Path(root, "plain"), overlap=True, every=0) as plain,
    ):
        tensors = [one.detach() for one in attachments_of(saved).module.parameters() for _ in range(3)]
        copies = Copies([torch.empty_like(one) for one in tensors], [one.clone() for one in tensors])
        steps(saved, 3 * EVERY + EVERY - 1)  # each slot is filled once; the next step takes a checkpoint
        steps(plain, 3 * EVERY + EVERY - 1)
        copies.do()
        shares, added = [], []
        was_calm()
        while len(shares) < ROUNDS:
            time.sleep(0.2)
            works = [partial(steps, saved, SAVES * EVERY), partial(steps, plain, SAVES * EVERY), copies.do]
            order = (0, 1, 2) if len(shares) % 2 else (2, 1, 0)
            taken = {number: seconds(works[number]) for number in order}
            if was_calm():
                added.append((taken[0] - taken[1]) / SAVES)
                shares.append(added[-1] / taken[2])
    note = f"{1e3 * sorted(added)[ROUNDS // 2]:.1f} ms a checkpoint, one of {EVERY} steps"
    return of_median(shares, note)


def steps(job: Job, number: int) -> None:
    batch = (torch.zeros(64, WIDTH),)
    for _ in range(number):
        job.step(batch)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""
    what = "seconds of a checkpoint in one file, with a checksum, over those of {}, both synced; 252 MB in memory"
    return [
        Bar(
            "checkpoint.plain-safetensors",
            what.format("safetensors' save_file of the same tensors"),
            "<=",
            1.2,
            partial(beside, with_safetensors),
            peers=("safetensors",),
            baseline="safetensors.torch.save_file",
        ),
        Bar(
            "checkpoint.plain-torch",
            what.format("torch.save of the same state"),
            "<=",
            1.0,
            partial(beside, torch.save),
            baseline="torch.save",
        ),
        Bar(
            "checkpoint.stall-outside",
            "seconds that a checkpoint to memory adds to the steps around it, by a clock outside of the program, over "
            "those of a copy of the same tensors",
            "<=",
            1.25,
            outside,
        ),
    ]
