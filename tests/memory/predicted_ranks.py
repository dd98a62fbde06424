"""Steps whose peak was predicted, traced on the ranks of a pool."""

import gc

import torch

import shoestring as ss
from shoestring import memory, optim, parallel
from shoestring.core.world import World
from shoestring.models.gpt import tiny

SHARED = {"ddp": parallel.DDP(), "fsdp": parallel.FSDP(), "zero": memory.Zero(), "zero1": memory.Zero(stage=1)}


def batches(rows, tokens, count):
    drawn = [torch.randint(512, (rows, tokens)) for _ in range(count)]
    return [{"inputs": each, "targets": each.clone()} for each in drawn]


def step_on_ranks(name, folder, accumulate):
    """Two traced steps on each rank of a pool."""
    gc.collect()  # the models of calls before
    job = ss.Job(tiny(vocab_size=512), world=World.current())
    job.progress.total = 2
    with job, ss.compose(job, [SHARED[name], optim.AdamW(), memory.Tracing(folder=folder)]):
        for _ in range(2):
            job.step(*batches(3, 48, accumulate))
