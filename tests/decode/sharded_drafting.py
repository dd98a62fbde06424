"""What each rank of a pool runs: distillation from caches that hold different samples on each rank."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import shoestring as ss
from shoestring.core.feature import Feature
from shoestring.core.kept import Progress
from shoestring.decode.drafter_training import CACHED, COMPUTED
from shoestring.parallel import DDP, FSDP
from shoestring.testing import jobs
from shoestring.testing.scenarios import decode, here

STEPS = 3


def train(*, feature: dict[str, Any], folder: str, sharded: bool, warm: bool) -> dict[str, Any]:
    """Losses, and the samples that the teacher read and did not.

    Args:
        warm: the first rank has trained on its share before, and no other one.
    """
    world = here()
    own = replace(decode(feature), cache_folder="teacher")  # settings are alike; the folder is of each rank's own disk
    disk = Path(folder, str(world.rank))
    disk.mkdir(parents=True)
    with chdir(disk):
        if warm and world.first:
            _run([own], ss.World())
        return _run([own, FSDP() if sharded else DDP()], world)


def _run(features: list[Feature], world: ss.World) -> dict[str, Any]:
    here_first = world.size == 1
    job = ss.Job(jobs.tiny().double(), optimizer=jobs.sgd(), world=world, progress=Progress(total=STEPS))
    with ss.compose(job, features) as composed:
        batches = [jobs.batch(number, 0 if here_first else world.rank, 2) for number in range(STEPS)]
        losses = [float(composed.step(batch)) for batch in batches]
        facts = composed.trace.facts
        return {"losses": losses, "computed": facts.get(COMPUTED, 0.0), "cached": facts.get(CACHED, 0.0)}
