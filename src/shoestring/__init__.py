"""Train, shrink and serve large models on hardware you can afford.

This module has the public names; each is imported when it is first used:

    import shoestring as ss
    job = ss.compose(ss.Job(model), [ss.optim.Clip(max_norm=1.0)])
    for batch in loader:
        loss = job.step(batch)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoestring.areas import AREAS

if TYPE_CHECKING:
    from shoestring import (
        checkpoint,
        comm,
        decode,
        graph,
        memory,
        optim,
        parallel,
        precision,
        preference,
        profile,
        sparse,
    )
    from shoestring.core.attachments import Attachments
    from shoestring.core.compose import attach, compose
    from shoestring.core.feature import Curve, Feature, Phase, Seam, Table
    from shoestring.core.job import Job
    from shoestring.core.trace import span
    from shoestring.core.whole_batch import whole_batch
    from shoestring.core.world import World
    from shoestring.data import Data
    from shoestring.data.loader import Loader
    from shoestring.data.together import prepare
    from shoestring.distributed.join import join
    from shoestring.models.loading import load_model, open_model
    from shoestring.report.findings import Picture
    from shoestring.training.failures import stop_on_signals

_HOME = {
    "Attachments": "core.attachments",
    "Curve": "core.feature",
    "Table": "core.feature",
    "Feature": "core.feature",
    "Phase": "core.feature",
    "Seam": "core.feature",
    "Job": "core.job",
    "attach": "core.compose",
    "compose": "core.compose",
    "span": "core.trace",
    "whole_batch": "core.whole_batch",
    "World": "core.world",
    "Data": "data",
    "Loader": "data.loader",
    "prepare": "data.together",
    "Picture": "report.findings",
    "join": "distributed.join",
    "stop_on_signals": "training.failures",
    "load_model": "models.loading",
    "open_model": "models.loading",
}

__all__ = [
    "Attachments",
    "Curve",
    "Data",
    "Feature",
    "Job",
    "Loader",
    "Phase",
    "Picture",
    "Seam",
    "Table",
    "World",
    "attach",
    "checkpoint",
    "comm",
    "compose",
    "decode",
    "graph",
    "join",
    "load_model",
    "memory",
    "open_model",
    "optim",
    "parallel",
    "precision",
    "preference",
    "prepare",
    "profile",
    "span",
    "sparse",
    "stop_on_signals",
    "whole_batch",
]


def __getattr__(name: str) -> Any:
    if name in AREAS:
        return import_module(f"shoestring.{name}")
    if name in _HOME:
        return getattr(import_module(f"shoestring.{_HOME[name]}"), name)
    raise AttributeError(f"module `shoestring` has no attribute `{name}`")


def __dir__() -> list[str]:
    return __all__
