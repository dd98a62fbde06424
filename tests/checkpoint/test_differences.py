"""Differential checkpoints: steps replayed from what was exchanged are those that were trained, bit for bit."""

from __future__ import annotations

import differing_ranks
import pytest

from shoestring import comm, optim, parallel
from shoestring.testing.pool import Pool
from shoestring.testing.scenarios import encode


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as ranks:
        yield ranks


AROUND = [optim.Clip(max_norm=0.3), optim.Schedule(warmup=3), optim.EMA(decay=0.9)]
CASES = {
    "four bits": [parallel.DDP(), comm.Quantize(bits=4)],
    "before the step": [comm.Quantize(bits=4, parts=3, channels=2), *AROUND],
    "dense": [parallel.DDP(find_unused=True), comm.Dense(), *AROUND],
    "bf16": [comm.BF16()],
    "random entries": [parallel.DDP(), comm.RandomK(density=0.2, feedback=False)],
    "Muon": [parallel.DDP(), comm.Quantize(bits=8), optim.Muon()],
    "LAMB": [parallel.DDP(), comm.Quantize(bits=8), optim.LAMB()],
    "schedule-free": [parallel.DDP(), comm.Quantize(bits=8), optim.ScheduleFree()],
    "SGD, LAWA": [parallel.DDP(), comm.Quantize(bits=8), optim.SGD(momentum=0.9), optim.LAWA(every=2)],
}
QUICK = {"four bits", "before the step"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.parametrize("statistics", [False, True], ids=["", "BatchNorm"])
def test_a_run_that_was_killed_repeats_no_step(pool, tmp_path, name, statistics):
    """Also when it is killed a second time, before there is another checkpoint."""
    given = {"features": [encode(feature) for feature in CASES[name]], "statistics": statistics}

    def trained(place, steps, **more):
        return pool.call(differing_ranks.train, folder=str(tmp_path / place), steps=steps, **given, **more)

    through, struck = trained("through", 20), trained("struck", 15)
    again = trained("struck", 16, resume=True, memory_every=8)
    rest = trained("struck", 20, resume=True)
    for whole, before, between, after in zip(through, struck, again, rest, strict=True):
        assert between["began"] == 15 and between["first"] == before["last"]
        assert after["began"] == 16 and after["first"] == between["last"]
        assert after["losses"] == whole["losses"][16:] and after["last"] == whole["last"]
