"""A training script that knows nothing of shoestring's jobs: python foreign.py FOLDER STEPS DIE_AT, under torchrun."""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoestring import checkpoint


class Counter:
    """A loader's position."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def main(folder, steps, die_at):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = Counter()
    torch.manual_seed(100 + rank)
    settings = checkpoint.Tiered(
        folder=str(folder / "saves"), memory_folder=str(folder / "memory"), memory_every=2, disk_every=5
    )
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with checkpoint.attach(state, own={"loader": loader}, settings=settings) as saves:
        began = saves.restore()
        for step in range(began, steps):
            if step == die_at and rank == 1 and not began:
                os._exit(9)
            loss = ddp(torch.randn(6, 8) + loader.at).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loader.at += 1
            saves.step(last=step == steps - 1)
        found = hashlib.sha256()
        for value in model.state_dict().values():
            found.update(value.numpy().tobytes())
        lr = schedule.get_last_lr()[0]
        (folder / f"end-{rank}").write_text(f"{began} {loader.at} {lr:.9f} {found.hexdigest()} {torch.rand(1).item()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
