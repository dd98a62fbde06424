"""One rank under torchrun: trains the same model under several ways of sharing its state, in turn.

    python -m benchmarks.memory.zero_worker OUT --methods ddp,zero --steps 5 --rounds 3

Rank 0 writes JSON to OUT: for each method its losses, and seconds a step in each round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm.worker import sent_bytes
from shoestring.core.compose import attach
from shoestring.memory import Zero
from shoestring.models.gpt import GPT, GPTConfig

SHAPE = GPTConfig(vocab_size=2048, dim=384, layers=6, heads=6, kv_heads=6, hidden=1024, context=64)
LR = 1e-3
Step = Callable[[Tensor], Tensor]


def build_model(dtype: torch.dtype) -> GPT:
    """The same model on all ranks and in all runs."""
    torch.manual_seed(0)
    return GPT(SHAPE).to(dtype)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def by_loop(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    """A plain training loop's step."""

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def under_ddp(dtype: torch.dtype) -> Step:
    model = DistributedDataParallel(build_model(dtype), gradient_as_bucket_view=True)
    return by_loop(model, adamw(model))


def under_fsdp(dtype: torch.dtype) -> Step:
    """FSDP2 that keeps gathered parameters until the backward pass: what it has that is nearest to stage 2."""
    model = build_model(dtype)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    return by_loop(model, adamw(model))


def under_zero(dtype: torch.dtype, **settings: Any) -> Step:
    model = build_model(dtype)
    job = attach(model, adamw(model), Zero(**settings))
    return by_loop(model, job.optimizer)


def under_deepspeed(dtype: torch.dtype) -> Step:
    """DeepSpeed's stage 2 with its defaults, but for buckets of the size of DDP's."""
    import deepspeed

    model = build_model(dtype)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": 6_500_000,
            "allgather_bucket_size": 6_500_000,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


METHODS: dict[str, Callable[[torch.dtype], Step]] = {
    "ddp": under_ddp,
    "fsdp": under_fsdp,
    "zero": under_zero,
    "deepspeed": under_deepspeed,
}


def run(methods: Sequence[str], dtype: torch.dtype, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """Each method `rounds` times `steps` steps, in turn; the first round is of the warm-up and not counted."""
    rank = dist.get_rank()
    made = {name: METHODS[name](dtype) for name in methods}
    result: dict[str, Any] = {name: {"seconds": [], "losses": [], "bytes": []} for name in methods}
    numbers = dict.fromkeys(methods, 0)
    for number in range(rounds + 1):
        for name, step in made.items():
            gc.collect()
            dist.barrier()
            began, before = time.perf_counter(), sent_bytes()
            for _ in range(steps):
                generator = torch.Generator().manual_seed(1000 * numbers[name] + rank)
                numbers[name] += 1
                tokens = torch.randint(SHAPE.vocab_size, (batch, SHAPE.context + 1), generator=generator)
                result[name]["losses"].append(float(step(tokens)))
            dist.barrier()
            if number:
                result[name]["seconds"].append((time.perf_counter() - began) / steps)
                result[name]["bytes"].append((sent_bytes() - before) / steps)
    result["parameters"] = sum(parameter.numel() for parameter in build_model(dtype).parameters())
    return result


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("out", type=Path)
    flags.add_argument("--methods", default="ddp,zero")
    flags.add_argument("--dtype", default="float32")
    flags.add_argument("--batch", type=int, default=1)
    flags.add_argument("--steps", type=int, default=3)
    flags.add_argument("--rounds", type=int, default=3)
    known = flags.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    found = run(known.methods.split(","), getattr(torch, known.dtype), known.batch, known.steps, known.rounds)
    if dist.get_rank() == 0:
        known.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
