"""Differential checkpoints: whether replayed steps are those that were trained, what keeping them costs, and how much
faster than training replaying them is."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from benchmarks.checkpoint.kills import BATCH, in_batches
from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.intervals import of_median
from shoestring import comm, optim
from shoestring.checkpoint import Tiered
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.data.loader import Loader
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.parallel import DDP
from shoestring.testing import jobs
from shoestring.testing.pool import Pool
from shoestring.testing.scenarios import Encoded, decode, encode, here
from tests.rigs.checkpointing.kills import KillOutcome, at_random, undisturbed
from tests.rigs.checkpointing.trainee import REPLAYED, FaultyRun, digest

AROUND = (optim.Clip(max_norm=0.3), optim.Schedule(warmup=3), optim.EMA(decay=0.9))
WAYS: Mapping[str, Sequence[Feature]] = {
    "4 bits": (DDP(), comm.Quantize(bits=4)),
    "4 bits, clipped, scheduled, averaged": (DDP(), comm.Quantize(bits=4), *AROUND),
    "8 bits before the step": (comm.Quantize(bits=8, transport=comm.Transport(parts=3, channels=2)), *AROUND),
    "dense": (DDP(), comm.Dense()),
    "bf16": (comm.BF16(),),
    "random-k without feedback": (DDP(), comm.RandomK(density=0.2, feedback=False)),
    "Muon": (DDP(), comm.Quantize(bits=4), optim.Muon()),
    "LAMB": (DDP(), comm.Quantize(bits=4), optim.LAMB()),
    "schedule-free": (DDP(), comm.Quantize(bits=4), optim.ScheduleFree()),
    "SGD, LAWA": (DDP(), comm.Quantize(bits=4), optim.SGD(momentum=0.9), optim.LAWA(every=2)),
}
STEPS, STARTS = 60, 5
"""Steps of a run, and the times that it is killed."""
SEQUENCES, SEQUENCE, VOCABULARY = 8, 128, 2048
"""Of a rank in a step, and their length: few tokens, so that training is quick beside what is measured."""
KILLS = 200
EVERY, WARM, ROUNDS = 8, 3, 6
"""Steps between checkpoints where time is measured; steps at the start that are not; and runs."""


class Normed(nn.Module):
    """The tiny task's model with BatchNorm at its end, whose statistics each rank has its own of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = jobs.tiny(0.1), nn.BatchNorm1d(jobs.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.inner(tokens)
        return self.norm(logits.flatten(0, 1)).view_as(logits)


def samples() -> TensorDataset:
    """Inputs and targets, one sequence each; ranks count differently many of their targets."""
    batches = [jobs.batch(number, 0, 1, ragged=True) for number in range(24)]
    return TensorDataset(*(torch.cat([batch[name] for batch in batches]) for name in ("inputs", "targets")))


def trained(*, ways: Sequence[Encoded], folder: str, stops: Sequence[int]) -> list[Any]:
    """Train in starts that are each left after a step, as if they were killed; the losses, and what is left.

    Returns:
        The step that each start began from, all losses, and a digest of the state.
    """
    world, losses, began, left = here(), [], [], ""
    for stop in stops:
        gc.collect()
        tiered = Tiered(
            folder=f"{folder}/saves", memory_folder=f"{folder}/memory", differences=16, peers_every=0, disk_every=20
        )
        job = Job(Normed(), optimizer=partial(AdamW, lr=1e-2), progress=Progress(total=STEPS), world=world)
        with closing(compose(job, [*map(decode, ways), tiered])):
            torch.manual_seed(1000 + world.rank)
            loader = Loader(samples(), batch=8, rank=world.rank, size=world.size, accumulate=2, seed=1)
            job.keep("loader", loader)
            assert job.restore is not None
            job.restore("auto")
            began.append(job.progress.step)
            batches = iter(loader)
            while job.progress.step < stop:
                losses.append(float(job.step(*({"inputs": x, "targets": y} for x, y in next(batches)))))
            left = digest(job)
    return [began, losses, left]


def unequal(pool: Pool, ways: Sequence[Feature], folder: Path, seed: int) -> list[str]:
    """How a run that was killed several times differs from one that was not, or which steps it repeated."""
    draw = random.Random(seed)
    stops = sorted(draw.sample(range(6, STEPS - 1), STARTS))
    encoded = [encode(feature) for feature in ways]
    through = pool.call(trained, ways=encoded, folder=str(folder / "through"), stops=[STEPS - 1])
    struck = pool.call(trained, ways=encoded, folder=str(folder / "struck"), stops=[*stops, STEPS - 1])
    return [
        f"rank {rank}, left at {stops}, began at {began}"
        for rank, ((_, losses, whole), (began, again, end)) in enumerate(zip(through, struck, strict=True))
        if began != [0, *stops] or again != losses or end != whole
    ]


def equal(kept: Path | None, deadline: Deadline) -> Measured:
    """Each way of training and exchanging; what was done is kept in a file, and resumed from there."""
    done: dict[str, list[str]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    with Pool(2, timeout=600) as pool, TemporaryDirectory() as place:
        for number, (name, ways) in enumerate(WAYS.items()):
            if name in done:
                continue
            deadline.check()
            done[name] = unequal(pool, ways, Path(place) / str(number), number)
            if kept:
                kept.write_text(json.dumps(done))
    wrong = {name: found for name, found in done.items() if found}
    told = "; ".join(f"{name}: {', '.join(found)}" for name, found in wrong.items())
    return Measured(1 - len(wrong) / len(WAYS), f"{len(WAYS)} ways, {STARTS} kills each; {told}".rstrip("; "))


def large(folder: str) -> Job:
    """A language model of 5.3 M parameters under DDP with 4 bits."""
    torch.manual_seed(0)
    shape = {"dim": 256, "layers": 6, "heads": 4, "kv_heads": 4, "hidden": 704}
    model = GPT(GPTConfig(**shape, vocab_size=VOCABULARY, context=SEQUENCE, init_std=0.04))
    intervals = {"differences": 2 * EVERY, "memory_every": EVERY, "peers_every": 0, "disk_every": 0}
    tiered = Tiered(folder=f"{folder}/saves", memory_folder=f"{folder}/memory", **intervals)
    job = Job(model, optimizer=partial(AdamW, lr=1e-4, fused=True), progress=Progress(total=1000), world=here())
    return compose(job, [DDP(), comm.Quantize(bits=4), tiered])


def timed(*, folder: str) -> dict[str, Any]:
    """Train until right before the second checkpoint, leave as if killed, and start again.

    Returns:
        Seconds of each step but the first ones, and of keeping its difference; bytes of one; steps replayed, and the
        seconds of all of them.
    """
    draws = torch.Generator().manual_seed(here().rank)
    seconds, keeping = [], []
    with closing(large(folder)) as job:
        for number in range(2 * EVERY - 1):
            tokens = torch.randint(VOCABULARY, (SEQUENCES, SEQUENCE + 1), generator=draws)
            before, began = job.trace.facts.get("checkpoint_differing", 0.0), perf_counter()
            job.step({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
            if number >= WARM:
                seconds.append(perf_counter() - began)
                keeping.append(job.trace.facts["checkpoint_differing"] - before)
        nbytes, parameters = job.trace.facts["checkpoint_differences"] / (2 * EVERY - 1), job.trace.parameters
    with closing(large(folder)) as job, job.trace:
        assert job.restore is not None
        job.restore("auto")
        replayed, total = job.progress.step - EVERY, job.trace.totals["replay", "compute"].seconds
    told = {"bytes": nbytes, "parameters": parameters, "replayed": replayed, "replaying": total}
    return {"seconds": seconds, "keeping": keeping, **told}


def rounds(kept: Path | None, deadline: Deadline) -> list[dict[str, Any]]:
    """What the first rank measured in each round; what was done is kept in a file, and resumed from there."""
    done: list[dict[str, Any]] = json.loads(kept.read_text()) if kept and kept.exists() else []
    while len(done) < ROUNDS:
        deadline.check()
        with Pool(2, timeout=600) as pool, TemporaryDirectory(dir="/dev/shm") as folder:
            done.append(pool.call(timed, folder=folder)[0])
        if kept:
            kept.write_text(json.dumps(done))
    return done


def cost(kept: Path | None, deadline: Deadline) -> Measured:
    """A step with its difference over the rest of it."""
    done = rounds(kept, deadline)
    ratios = sorted(1 + median(each["keeping"]) / (median(each["seconds"]) - median(each["keeping"])) for each in done)
    steps, keeping = (1e3 * median(median(each[name]) for each in done) for name in ("seconds", "keeping"))
    share = done[0]["bytes"] / done[0]["parameters"]
    told = f"{keeping:.2f} ms of a step of {steps:.0f} ms; {share:.2f} bytes a parameter, {8 * share:.1f} bits"
    return of_median(ratios, f"median of {ROUNDS} runs ({ratios[0]:.4f} to {ratios[-1]:.4f}): {told}")


def speed(kept: Path | None, deadline: Deadline) -> Measured:
    """Seconds of a step that is trained over those of one that is replayed."""
    done = rounds(kept, deadline)
    ratios = sorted(median(each["seconds"]) * each["replayed"] / each["replaying"] for each in done)
    replaying = 1e3 * median(each["replaying"] / each["replayed"] for each in done)
    told = f"{replaying:.0f} ms a step, {done[0]['replayed']} steps replayed, with looking for them and reading them"
    return of_median(ratios, f"median of {ROUNDS} runs ({ratios[0]:.1f} to {ratios[-1]:.1f}): {told}")


def struck(number: int) -> KillOutcome:
    """A batch of random kills of ranks that keep differences, in memory and on disk."""
    with TemporaryDirectory() as folder:
        task = FaultyRun(folder=str(Path(folder) / "task"), under=REPLAYED)
        return at_random(task, BATCH, undisturbed(task), random.Random(number))


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""
    equally, timings, kills = (cache and cache / f"differences-{name}.json" for name in ("equal", "rounds", "kills"))
    what = f"two ranks of {SEQUENCES * SEQUENCE} tokens each on one host, 5.3 M parameters, AdamW, 4 bits"
    return [
        Bar(
            "checkpoint.differences-equal",
            f"two ranks with dropout, BatchNorm, unequal counts and two micro-batches, killed in effect {STARTS} times "
            "in 59 steps: share of ways to exchange and step with which no step is repeated and losses and state are "
            "equal bit for bit",
            ">=",
            1.0,
            partial(equal, equally),
            kind="exact",
        ),
        Bar(
            "checkpoint.differences-kills",
            f"SIGKILL at {KILLS} random moments: runs of two ranks that repeated a step that both had done, loaded "
            "something torn, or ended with other bits than the run that was not killed",
            "<=",
            0,
            partial(in_batches, kills, KILLS, struck),
            kind="exact",
        ),
        Bar(
            "checkpoint.differences-cost",
            f"a step with its difference kept in memory over the same step without; {what}",
            "<=",
            1.03,
            partial(cost, timings),
        ),
        Bar(
            "checkpoint.differences-replay",
            f"seconds of a step that is trained over those of one that is replayed; {what}",
            ">=",
            5.0,
            partial(speed, timings),
        ),
    ]
