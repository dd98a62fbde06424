"""The bar that needs a GPU: what a save of a large model's training state stops training for."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import Bar, Deadline, Measured

PARAMETERS, PIECES = 1_557_611_200, 400  # of GPT2-XL; its state in fp32 is 18.7 GB
SAVES = 6


def stall(_: Deadline) -> Measured:
    """Every second step is saved; a step's work is products of matrices, of about half a second."""
    import torch
    from torch import nn
    from torch.optim import AdamW

    from shoestring.checkpoint import Tiered
    from shoestring.core.job import Job, compose

    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(PARAMETERS // PIECES, device="cuda") for _ in range(PIECES))
            self.square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for _ in range(200):
                batch = self.square @ batch
                batch = batch / batch.abs().max()
            return batch.float().mean() + sum(part[0] for part in self.parts)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        settings = Tiered(folder=str(Path(place) / "saves"), memory=place, memory_every=2, disk_every=0, slots=2)
        job = Job(
            State(),
            forward=lambda model, batch: model(batch),
            loss=lambda output, batch: (output, torch.tensor(1, device="cuda")),
            optimizer=partial(AdamW, lr=1e-4, fused=True),
        )
        with compose(job, [settings]):
            batch, stalls = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), []
            for step in range(8 + 2 * SAVES):
                before = job.trace.facts.get("checkpoint_stall", 0.0)
                job.step(batch)
                stalled = job.trace.facts["checkpoint_stall"] - before
                if step >= 8 and stalled:
                    stalls.append(stalled)
            copied = job.trace.facts["checkpoint_bytes"]
    return Measured(1e3 * median(stalls), f"{len(stalls)} saves; {copied / 1e9:.0f} GB copied in all")


def rows() -> list[Bar]:
    """The bar."""
    what = "milliseconds for which a save of GPT2-XL's training state, every second step, stops training"
    return [Bar("checkpoint.gpu-stall", what, "<=", 10.0, stall, gpu=True)]
