"""A run with everything that has state, stopped in the middle and resumed: bitwise equal to the run that was not."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from benchmarks.harness import Bar, Deadline, Measured
from shoestring import comm
from shoestring.checkpoint import Tiered
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.data.loader import Loader
from shoestring.parallel import DDP
from shoestring.testing import jobs
from shoestring.testing.pool import Pool
from shoestring.testing.scenarios import Encoded, decode, encode, here
from tests.rigs.checkpointing.trainee import digest

CODECS: Mapping[str, Feature | None] = {
    "none": None,
    "PowerSGD": comm.PowerSGD(rank=1),
    "PowerSGD, alternate": comm.PowerSGD(rank=1, alternate=True),
    "8 bits": comm.Quantize(bits=8),
    "4 bits, feedback": comm.Quantize(bits=4, rounding="nearest", feedback=True),
    "signs": comm.Sign(),
    "TernGrad": comm.TernGrad(),
    "top-k": comm.TopK(density=0.1),
    "top-k, 4 bits": comm.TopK(density=0.1, wire="int4"),
    "random-k": comm.RandomK(density=0.2),
    "layers, hypernetwork": comm.Dense(transport=comm.Transport(select="hypernetwork", kb_per_step=4.0)),
    "DGC": comm.DGC(density=0.1, lr=0.05),
    "local SGD": comm.LocalSGD(every=3),
    "DiLoCo, 4 bits, fragments": comm.DiLoCo(every=4, fragments=2, codec="4bit"),
    "SparseLoCo": comm.SparseLoCo(every=4, delay=1),
}


def samples() -> TensorDataset:
    """Inputs and targets, one sequence each."""
    batches = [jobs.batch(number, 0, 1) for number in range(24)]
    return TensorDataset(*(torch.cat([batch[name] for batch in batches]) for name in ("inputs", "targets")))


def trained(*, codec: Encoded | None, folder: str, steps: int, stop: int, resume: bool, **settings: Any) -> list[Any]:
    """Train with dropout, two micro-batches a step and a loader with two workers; the losses, and what is left.

    Args:
        stop: the step after which the run is killed, in effect: nothing is saved at its end; 0 for none.
    """
    gc.collect()  # a loader's worker, which is a fork, must not be the one that frees old process groups
    world = here()
    feature = decode(codec) if codec else None
    local = isinstance(feature, comm.LocalSGD | comm.DiLoCo | comm.SparseLoCo)
    features = [each for each in (None if local else DDP(), feature) if each is not None]
    features.append(Tiered(folder=f"{folder}/saves", memory_folder=f"{folder}/memory", **settings))
    progress = Progress(total=steps)
    job = compose(Job(jobs.tiny(0.1), optimizer=partial(AdamW, lr=1e-2), progress=progress, world=world), features)
    torch.manual_seed(1000 + world.rank)
    loader = Loader(samples(), batch=8, rank=world.rank, size=world.size, accumulate=2, seed=1, workers=2)
    job.keep("loader", loader)
    losses = []
    with job:
        if resume:
            assert job.restore is not None
            assert job.restore("auto")
        began = progress.step
        for micro in loader:
            losses.append(float(job.step(*({"inputs": x, "targets": y} for x, y in micro))))
            if progress.step in (stop, steps):
                break
    loader.close()
    return [began, losses, digest(job)]


def unequal(pool: Pool, feature: Feature | None, folder: Path, steps: int, stop: int) -> list[str]:
    """How a run that is resumed from memory differs from one that was not stopped."""
    task = {"codec": feature and encode(feature), "steps": steps, "memory_every": 3, "peers_every": 0, "disk_every": 10}
    through = pool.call(trained, **task, folder=str(folder / "through"), stop=0, resume=False)
    pool.call(trained, **task, folder=str(folder / "struck"), stop=stop, resume=False)
    rest = pool.call(trained, **task, folder=str(folder / "struck"), stop=0, resume=True)
    wrong = []
    for rank, ((_, losses, whole), (began, again, end)) in enumerate(zip(through, rest, strict=True)):
        if not stop // 2 < began <= stop or again != losses[began:] or end != whole:
            wrong.append(f"rank {rank} from step {began}")
    return wrong


def rows(cache: Path | None = None) -> list[Bar]:
    """The bar."""

    def measure(deadline: Deadline) -> Measured:
        wrong: dict[str, Sequence[str]] = {}
        with Pool(2, timeout=600) as pool, TemporaryDirectory() as place:
            for number, (name, feature) in enumerate(CODECS.items()):
                deadline.check()
                if found := unequal(pool, feature, Path(place) / str(number), 100, 57):
                    wrong[name] = found
        told = "; ".join(f"{name}: {', '.join(found)}" for name, found in wrong.items())
        return Measured(1 - len(wrong) / len(CODECS), f"{len(CODECS)} ways to exchange; {told}".rstrip("; "))

    what = (
        "100 steps of two ranks with dropout, two loader workers, two micro-batches and each codec's residual, left at "
        "step 57 and resumed from memory: share of codecs with which losses and state are equal bit for bit"
    )
    return [Bar("checkpoint.exact", what, ">=", 1.0, measure, kind="exact")]
