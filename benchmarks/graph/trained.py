"""Training by searched plans on two ranks of this machine, beside DDP, FSDP and split layers: seconds of a step.

Each rank has one thread. The plan follows from what `shoestring probe` has measured on the same ranks just before.
Steps of all ways alternate in one launch, and a ratio is one of neighbouring steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoestring as ss
from benchmarks.harness import Bar, Deadline
from benchmarks.intervals import of_median
from benchmarks.rows import Measured
from shoestring.core.feature import DATA, Feature
from shoestring.core.job import attachments_of
from shoestring.core.kept import Progress
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.testing.pool import Pool
from shoestring.testing.scenarios import here

RANKS, BLOCKS = 2, 15
OTHERS = {"ddp": "DDP", "fsdp": "FSDP", "layers": "split layers"}


class Wide(nn.Module):
    """A classifier whose weights are large beside its batch."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (1024, 4096, 4096, 1024)
        layers = (nn.Linear(before, after) for before, after in pairwise(sizes))
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


GPT_SHAPE = {"vocab_size": 4096, "dim": 256, "layers": 4, "heads": 8, "kv_heads": 8, "hidden": 704, "context": 128}


def _tokens(draw: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(4096, (8, 129), generator=draw)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def _rows(draw: torch.Generator) -> dict[str, Tensor]:
    return {"inputs": torch.randn(32, 1024, generator=draw), "targets": torch.randint(1024, (32,), generator=draw)}


MODELS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[torch.Generator], dict[str, Tensor]]]] = {
    "gpt": ("GPT of 5.3 M weights, 1,024 tokens a step", lambda: GPT(GPTConfig(**GPT_SHAPE)), _tokens),
    "wide": ("three layers of 25 M weights, 32 samples a step", Wide, _rows),
}
"""Name -> what it is, how it is built, and how a step's batch is drawn."""
LAYERS: dict[str, Any] = {"gpt": {}, "wide": {"columns": ("layers.0",), "rows": ("layers.2",)}}
"""Name of a model -> settings of its split layers; of GPT they are known."""


def seconds_of(*, model: str, cluster: str, blocks: int) -> dict[str, Any]:
    """Train in all ways on the ranks of a pool, step by step in turn; returns seconds of steps, and the plan."""
    world = here()
    torch.set_num_threads(1)
    _, build, batch = MODELS[model]
    ways: dict[str, Feature] = {
        "split": ss.graph.Split(cluster=cluster),
        "ddp": ss.parallel.DDP(),
        "fsdp": ss.parallel.FSDP(),
        "layers": ss.parallel.Tensor(**LAYERS[model]),
    }
    jobs, draws, told = {}, {}, ""
    for name, feature in ways.items():
        torch.manual_seed(0)
        example = lambda: batch(torch.Generator().manual_seed(0))  # noqa: E731
        adam = partial(torch.optim.AdamW, lr=1e-4, fused=True)
        job = ss.Job(build(), optimizer=adam, progress=Progress(total=10_000), world=world, example=example)
        jobs[name], draws[name] = ss.compose(job, [feature]), torch.Generator().manual_seed(0)
        if name == "split":
            told = feature.explain(attachments_of(jobs[name]))
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(blocks + 1):
        for name, job in jobs.items():
            own = job.world
            drawn = batch(draws[name])
            mine = {key: value[own.index_over(DATA) :: own.ranks_over(DATA)] for key, value in drawn.items()}
            dist.barrier()
            began = time.perf_counter()
            job.step(mine)
            dist.barrier()
            times[name].append(time.perf_counter() - began)
    for job in jobs.values():
        job.close()
    return {"seconds": {name: values[1:] for name, values in times.items()}, "plan": told}


@cache
def measured(model: str) -> dict[str, Any]:
    """What the first rank has measured."""
    from shoestring.cli import main

    with tempfile.TemporaryDirectory() as folder, Pool(RANKS, timeout=600) as pool:
        cluster = Path(folder) / "cluster.toml"
        assert main(["probe", "--out", str(cluster), "--workers", str(RANKS)]) == 0
        return pool.call(seconds_of, model=model, cluster=str(cluster), blocks=BLOCKS)[0]


def gain(model: str, other: str, deadline: Deadline) -> Measured:
    """Seconds of a step by the searched plan over those of another way."""
    deadline.check()
    result = measured(model)
    seconds = result["seconds"]
    ratios = [own / theirs for own, theirs in zip(seconds["split"], seconds[other], strict=True)]
    medians = ", ".join(f"{name} {statistics.median(values):.3g} s" for name, values in seconds.items())
    return of_median(ratios, f"medians of {BLOCKS} steps: {medians}; {result['plan']}")


def rows() -> list[Bar]:
    """The bars of training by searched plans."""
    return [
        Bar(
            f"graph.trained-{model}-{other}",
            f"seconds of a step by the searched plan over one of {told}, two ranks of a host; {MODELS[model][0]}",
            "<=",
            1.0,
            partial(gain, model, other),
            baseline=told,
        )
        for model in MODELS
        for other, told in OTHERS.items()
    ]
