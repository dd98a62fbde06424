"""Trains small models whose operators are split over the ranks of a pool, and the same models on one rank."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import tomli_w
import torch
from torch import Tensor, nn

import shoestring as ss
from shoestring.core.feature import Feature
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.graph import Split
from shoestring.graph.costs import ring
from shoestring.models.gpt import tiny
from shoestring.run import load
from shoestring.testing import jobs
from shoestring.testing.scenarios import here
from shoestring.training.loop import train as train_file
from tests.graph.steps import Convolutional

STEPS = 6


def write_cluster(path: Path, ranks: int, latency: float = 1e-6) -> str:
    """Write a cluster file of ranks whose messages take about as long as what they could overlap with."""
    cluster = ring(ranks, latency=latency, bandwidth=2e9, flops=2e10, copy=4e9)
    path.write_text(tomli_w.dumps(asdict(cluster)))
    return str(path)


def gpt() -> nn.Module:
    return tiny(vocab_size=32, context=8, dim=16, layers=1, heads=4, kv_heads=2, hidden=32)


def batch(model: str, number: int, sizes: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """A batch that all ranks get.

    Args:
        sizes: numbers of samples of the first batches, if not all.
    """
    if number < len(sizes):
        return {name: tensor[: sizes[number]] for name, tensor in batch(model, number).items()}
    if model != "pictures":
        return jobs.batch(number, ragged=True)
    draw = torch.Generator().manual_seed(number)
    return {
        "inputs": torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=draw),
        "targets": torch.randint(4, (8,), generator=draw),
    }


def train(
    *,
    model: str,
    cluster: str = "",
    order: str = "traced",
    gib: float = 0.0,
    mesh: tuple[int, ...] = (),
    micro: int = 1,
    sizes: tuple[int, ...] = (),
    folder: str = "",
    stop: int = STEPS,
    resume: bool = False,
) -> dict:
    """Train in fp64 with clipping; returns losses, norms, the held-out loss, all weights, and what the plan says."""
    world = here()
    torch.manual_seed(world.rank)  # each rank begins with weights of its own
    features: list[Feature] = [ss.optim.Clip(max_norm=0.05)]
    features += [Split(cluster=cluster, order=order, gib=gib, mesh=mesh)] if cluster else []
    if folder:
        settings = {"memory_folder": f"{folder}/memory", "memory_every": 1, "disk_every": 1}
        features.append(ss.checkpoint.Tiered(folder=f"{folder}/checkpoints", **settings))

    def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    models = {"small": small, "gpt": gpt, "pictures": Convolutional}
    built = models[model]().double().train()
    job = Job(built, optimizer=adam, progress=Progress(total=STEPS), world=world, example=lambda: batch(model, 0))
    with ss.compose(job, features) as job:
        began = job.restore("auto") if resume and job.restore else 0
        attachments, losses, norms = attachments_of(job), [], []
        while not job.done and job.progress.step < stop:
            first = job.progress.step * micro
            losses.append(float(job.step(*(batch(model, first + number, sizes) for number in range(micro)))))
            norms.append(float(job.numbers["grad_norm"]))
        total, count = job.evaluate(batch(model, 1000 + number) for number in range(3))
        named = {name: attachments.whole(name, value) for name, value in attachments.weights().items()}
        text = next((one.explain(attachments) for one in attachments.features if isinstance(one, Split)), "")
        return {
            "began": began,
            "losses": losses,
            "norms": norms,
            "held_out": total / count,
            "weights": torch.cat([tensor.double().flatten() for tensor in named.values()]).tolist(),
            "plan": text,
            "facts": {name: number for name, number in job.trace.facts.items() if name.startswith("operators.")},
        }


class Small(nn.Module):
    """A language model with what features often handle wrongly: tied and frozen weights, biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(jobs.VOCABULARY, 16)
        self.scale = nn.Parameter(torch.full((16,), 2.0), requires_grad=False)
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, jobs.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def small(dropout: float = 0.0) -> nn.Module:
    """Build the small model; every call gives the same initial weights. It has no dropout, which is refused."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small()


def train_run(*, path: str, folder: str) -> list[dict]:
    """Train a run file on the ranks of a pool, or on this one; returns the rows of its metrics."""
    train_file(load(path, ["--run.folder", folder]), here())
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
