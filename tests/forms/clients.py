"""Ranks that have data of their own, of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SEEN: list[tuple[int, int]] = []
"""(rank whose data it is, number) of each sample that this process has trained on."""


class Client(Dataset):
    def __init__(self, rank: int, samples: int) -> None:
        self.rank, self.samples, self.fingerprint = rank, samples, f"{rank} {samples}"

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(100 * self.rank + index)
        inputs = torch.randn(3, generator=draw)
        return {"inputs": inputs, "targets": inputs.argmax(), "owner": torch.tensor(self.rank)}


def clients(rank: int, ranks: int) -> tuple[Client, Client]:
    return Client(rank, 6 + 4 * rank), Client(10 + rank, 3 + 6 * rank)


def undeclared() -> Client:
    return Client(0, 8 + torch.distributed.get_rank())


def only_first(rank: int, ranks: int) -> tuple[Client, Client | None]:
    return Client(rank, 8), Client(10, 4) if rank == 0 else None


def model() -> nn.Module:
    return nn.Linear(3, 3)


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    if torch.is_grad_enabled():
        SEEN.extend(zip(batch["owner"].tolist(), batch["ids"].tolist(), strict=True))
    return nn.functional.cross_entropy(output, batch["targets"], reduction="sum"), len(output)


def owners(trained: nn.Module, held_out) -> dict[str, float]:
    rows = held_out.gather(torch.cat([batch["owner"] for batch in held_out]))
    return {"rows": len(held_out), "owners": int("".join(str(owner - 10) for owner in rows.tolist()))}
