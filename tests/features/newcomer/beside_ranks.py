"""Both features on two ranks beside `comm.PowerSGD` and `checkpoint.Tiered`; run in a `Pool`."""

from __future__ import annotations

import shoestring as ss
from shoestring.testing.jobs import batch, sgd, tiny
from tests.features.newcomer.bf16_products import BF16Products
from tests.features.newcomer.lora import LoRA

STEPS = 6


def train(*, folder: str, stop: int = STEPS) -> list[float]:
    """The losses of the steps from the newest checkpoint in `folder` up to `stop`."""
    features = [
        LoRA(rank=4),
        ss.graph.Compile(backend="eager"),
        BF16Products(),
        ss.parallel.DDP(),
        ss.comm.PowerSGD(rank=1),
        ss.checkpoint.Tiered(folder=folder),
    ]
    job = ss.compose(ss.Job(tiny(), optimizer=sgd(), total=STEPS), features)
    world, losses = job.world, []
    with job:
        start = job.restore("auto") or 0
        for number in range(start, stop):
            losses.append(job.step(batch(number, world.rank, world.size)).item())
    return losses
