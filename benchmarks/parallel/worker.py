"""One rank of a launch: python -m benchmarks.parallel.worker OUT BLOCKS QUOTA-GROUP METHOD …, under torchrun.

The steps of all methods alternate; the first rank writes their seconds, block by block, to OUT.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import shoestring as ss
from benchmarks.parallel.quotas import join
from shoestring.core.feature import DATA, Feature
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.models.gpt import GPT, GPTConfig

SHAPE = {"vocab_size": 4096, "dim": 256, "layers": 8, "heads": 8, "kv_heads": 8, "hidden": 704, "context": 128}
"""A GPT of 7.5 million weights."""
SAMPLES, SEQUENCE = 16, 128
"""A step has 2,048 tokens."""
LOCAL = 8
"""Steps between merges of `local`."""


def features(method: str) -> tuple[list[Feature], int]:
    """The features of a method, and the number of micro-batches of a rank's step."""
    match method.split("-"):
        case ["ddp"]:
            return [ss.parallel.DDP()], 1
        case ["4bit"]:
            return [ss.comm.Quantize(bits=4)], 1
        case ["local"]:
            return [ss.comm.LocalSGD(every=LOCAL)], 1
        case ["pipeline", micro]:
            return [ss.parallel.Pipeline()], int(micro)
        case ["pipeline", micro, ahead]:
            return [ss.parallel.Pipeline(ahead=int(ahead))], int(micro)
        case ["interleaved", micro]:
            return [ss.parallel.Pipeline(chunks=2)], int(micro)
        case ["gpipe", micro]:
            return [ss.parallel.Pipeline(schedule="gpipe")], int(micro)
    raise ValueError(method)


class Method:
    """A job of its own, and its batches."""

    def __init__(self, name: str, world: World) -> None:
        own, self.micro = features(name)
        torch.manual_seed(0)
        model = GPT(GPTConfig(**SHAPE))
        adam = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True)  # noqa: E731
        self.job = ss.compose(Job(model, optimizer=adam, progress=Progress(total=10_000), world=world), own)
        self.draw = torch.Generator().manual_seed(0)

    def step(self) -> float:
        world = self.job.world
        tokens = torch.randint(SHAPE["vocab_size"], (SAMPLES, SEQUENCE + 1), generator=self.draw)
        mine = tokens[world.index_over(DATA) :: world.ranks_over(DATA)]
        return float(self.job.step(*map(batch_of, mine.chunk(self.micro))))


def batch_of(tokens: Tensor) -> dict[str, Tensor]:
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def main(out: Path, blocks: int, group: str, methods: list[str]) -> None:
    if group:
        join(group)
    with ss.join() as world:
        jobs = {name: Method(name, world) for name in methods}
        for one in jobs.values():
            one.step()  # the first step builds buffers, and tells shapes
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        losses: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(blocks):
            for name, one in jobs.items():
                steps = LOCAL if name == "local" else 1  # all steps of a period
                dist.barrier()
                began = time.perf_counter()
                losses[name] += [one.step() for _ in range(steps)]
                dist.barrier()
                seconds[name].append((time.perf_counter() - began) / steps)
        if world.first:
            out.write_text(json.dumps({"seconds": seconds, "losses": losses}))
        for one in jobs.values():
            one.job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
