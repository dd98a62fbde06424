"""Faults planted in a pipeline that a comparison with one process notices."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks.harness import Bar, Deadline
from benchmarks.parallel.equal import CLOSE, worst
from benchmarks.rows import Measured
from shoestring.testing.pool import Pool, RankError
from tests.rigs import pipelines, planted


def noticed(deadline: Deadline) -> Measured:
    """The number of faults with which a run differs from one process, or fails."""
    wanted, missed = pipelines.train(beside="clip"), []
    with Pool(4, timeout=120) as pool:
        for fault in planted.FAULTS:
            deadline.check()
            given: dict[str, Any] = {"fault": fault, "beside": "clip", "pipeline": {"stages": 2}}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    if fault in planted.IN_CHECKPOINTS:
                        pool.call(planted.train_with, folder=folder, stop=3, **given)
                        given |= {"folder": folder, "resume": True}
                    off = worst(pool.call(planted.train_with, **given), wanted)
                except RankError:
                    continue
            if off <= CLOSE:
                missed.append(fault)
    return Measured(len(planted.FAULTS) - len(missed), f"of {len(planted.FAULTS)}; not noticed: {missed or 'none'}")


def rows() -> list[Bar]:
    """The one bar."""
    what = "faults planted in a pipeline of two stages beside two replicas that a comparison with one process notices"
    return [Bar("parallel.noticed", what, ">=", 15, noticed, kind="exact")]
