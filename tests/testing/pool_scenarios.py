"""Scenarios for the tests of the pool."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any


def add(values: list[float]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(values)
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "sum": float(total.sum())}


def fail(ranks: list[int]) -> None:
    import torch.distributed as dist

    if dist.get_rank() in ranks:
        raise ValueError("on purpose")
    dist.barrier()


def die(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def hang() -> None:
    threading.Event().wait()


def listening() -> list[str]:
    """The addresses (hexadecimal, as the kernel writes them) on which this process listens."""
    mine = {str(entry.readlink()) for entry in Path("/proc/self/fd").glob("*") if entry.is_socket()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def start_state() -> dict:
    """What a rank begins with: its parent's threads, and an order that depends on the hashes of strings."""
    threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
    return {"threads of the parent": threads, "order": list({f"layer{number}" for number in range(20)})}
