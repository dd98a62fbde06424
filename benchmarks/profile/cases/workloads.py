"""Changes to the frozen workloads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.profile.cases.case import Case, Step, with_changes
from benchmarks.profile.workloads import build
from benchmarks.profile.workloads.torch_models import diffusion, dlrm, encoder, gnn


def workload(name: str) -> Step:
    return build(name).step


def fused(name: str) -> Step:
    """With one call for all parameters in each step of the optimizer."""
    with (
        patch.object(torch.optim, "Adam", partial(torch.optim.Adam, fused=True)),
        patch.object(torch.optim, "AdamW", partial(torch.optim.AdamW, fused=True)),
    ):
        return workload(name)


class FusedLayerNorm(encoder.LayerNorm):
    """The workload's own normalization by the operator for it: the deviation is the biased one, and eps is squared."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.a_2, self.b_2, self.eps)


def encoder_after() -> Step:
    with patch.object(encoder, "LayerNorm", FusedLayerNorm):
        return fused("encoder")


class WholeBatches(DataLoader[Any]):
    """Takes a batch out of the data set by one index, in place of row after row."""

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        assert shuffle
        super().__init__(dataset, sampler=BatchSampler(RandomSampler(dataset), batch_size, drop_last), batch_size=None)


def dlrm_after() -> Step:
    with patch.object(dlrm, "DataLoader", WholeBatches):
        return workload("dlrm")


def fast_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose random bits are taken sixteen at a time from an integer generator, and not one float for each."""
    if not training or p == 0.0:
        return x
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.int16)[: x.numel()].view(x.shape) >= round(p * 2**16) - 2**15
    return x * kept.to(x.dtype).mul_(1 / (1 - p))


def index_select_messages(self: gnn.SAGEConv, x: Tensor, edge_index: Tensor) -> Tensor:
    src, dst = edge_index
    out = self.aggregate(self.message(x.index_select(0, src)), dst, x.size(0))
    return self.lin_l(out) + self.lin_r(x)


def gnn_after() -> Step:
    step = with_changes(fused("gnn"), F, dropout=fast_dropout)
    return with_changes(step, gnn.SAGEConv, forward=index_select_messages)


def vit_after() -> Step:
    return with_changes(fused("vit"), F, dropout=fast_dropout)


@torch.no_grad()
def average_at_once(self: diffusion.EMA, model: nn.Module) -> None:
    torch._foreach_lerp_(list[Tensor](self.model.parameters()), list[Tensor](model.parameters()), 1 - self.decay)


def diffusion_after() -> Step:
    return with_changes(fused("diffusion"), diffusion.EMA, update=average_at_once)


def _case(name: str, after: Callable[[], Step], steps: int) -> Case:
    return Case(f"workload-{name}", partial(workload, name), after, steps)


CASES = [
    _case("encoder", encoder_after, steps=4),
    _case("conformer", partial(fused, "conformer"), steps=5),
    _case("llama", partial(fused, "llama"), steps=4),
    _case("diffusion", diffusion_after, steps=8),
    _case("dlrm", dlrm_after, steps=10),
    _case("gnn", gnn_after, steps=6),
    _case("vit", vit_after, steps=4),
]
