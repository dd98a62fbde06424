"""Faults planted in a pipeline and in split layers that a comparison with one process notices."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from functools import cache, partial
from typing import Any

from benchmarks.harness import Bar, Deadline
from benchmarks.parallel.equal import CLOSE, worst
from benchmarks.rows import Measured
from shoestring.testing.pool import Pool, RankError
from tests.rigs import pipelines, planted

PIPELINE: Mapping[str, Any] = {"model": "tied", "pipeline": {"stages": 2}}
LAYERS: Mapping[str, Any] = {"model": "qwen3", "tensor": {"ways": 2}}


def noticed(faults: Collection[str], split: Mapping[str, Any], deadline: Deadline) -> Measured:
    """The number of faults with which a run differs from one process, or fails."""
    missed = []
    with Pool(4, timeout=120) as pool:
        for fault in faults:
            deadline.check()
            given: dict[str, Any] = {
                "fault": fault,
                "beside": "clip",
                **split,
                **planted.IN_OTHER_MODELS.get(fault, {}),
            }
            wanted = alone(given["model"])
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
    return Measured(len(faults) - len(missed), f"of {len(faults)}; not noticed: {missed or 'none'}")


@cache
def alone(model: str) -> Mapping[str, Any]:
    """What one process trains, with clipping."""
    return pipelines.train(model=model, beside="clip")


def rows() -> list[Bar]:
    """The bars of the two ways to split a model."""
    what = "faults planted in {}, beside two replicas, that a comparison with one process notices"
    stages, layers = partial(noticed, planted.FAULTS, PIPELINE), partial(noticed, planted.IN_LAYERS, LAYERS)
    return [
        Bar("parallel.noticed", what.format("a pipeline of two stages"), ">=", 15, stages, kind="exact"),
        Bar("parallel.noticed-layers", what.format("layers split in two"), ">=", 15, layers, kind="exact"),
    ]
