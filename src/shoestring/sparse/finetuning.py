"""Masks of a dense model that is fine-tuned to 2:4 (AST): their decay grows, and adapters replace what they drop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring.models import slorb
from shoestring.sparse.masked import Masks
from shoestring.sparse.masks import row_mask
from shoestring.sparse.report import ADAPTERS
from shoestring.sparse.shards import local, summed

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.sparse.settings import AST

MEMORY = 0.9
"""The share of the former mean square of each input in the running one, at each measurement."""


class AnnealedMasks(Masks):
    """See `attached.SparseMethod`.

    With Wanda's metric, the last step before masks are refreshed measures the squares of the inputs of each layer.
    """

    def __init__(self, job: Job, settings: AST) -> None:
        super().__init__(job, settings)
        self.ast = settings
        self.factor = 0.0
        self.squares: dict[str, Tensor] = {}  # of each input of a layer: their running mean, up to a factor a layer
        self.seen: dict[str, Tensor] = {}  # of the step that measures
        self.measuring, self.measured = False, 0
        self.ratios: dict[str, Tensor] = {}  # of the norms of gradient and weight, in this step

    def prepare(self, name: str, weight: Tensor) -> None:
        super().prepare(name, weight)
        layer = self.job.module.get_submodule(name)
        if self.ast.metric == "wanda":
            wide = torch.promote_types(weight.dtype, torch.float32)
            self.squares[name] = torch.ones(weight.shape[1], dtype=wide, device=weight.device)
            self.seen[name] = torch.zeros_like(self.squares[name])
            self.job.exits.callback(layer.register_forward_pre_hook(partial(self._measure, name)).remove)
        if self.ast.slorb:
            dropped = weight.detach().masked_fill(row_mask(weight), 0)
            means = slorb.block_means(dropped, slorb.block_size(weight.shape[1], self.ast.slorb))
            self.job.exits.callback(slorb.adapt(layer, nn.Parameter(means)))
            facts = self.job.trace.facts
            facts[ADAPTERS] = facts.get(ADAPTERS, 0.0) + means.numel()

    def forget(self, name: str) -> None:
        super().forget(name)
        if self.ast.slorb:  # nothing is dropped
            with torch.no_grad():
                local(self.job.trained[f"{name}.{slorb.NAME}"]).zero_()

    def _measure(self, name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self.measuring and torch.is_grad_enabled():  # an evaluation is none of the training
            with torch.no_grad():
                self.seen[name].add_(args[0].detach().to(self.seen[name]).square().flatten(0, -2).sum(0))

    def scores(self, name: str, weight: Tensor) -> Tensor:
        return weight * self.squares[name].sqrt() if name in self.squares else weight

    def before_step(self) -> None:
        progress = self.job.progress
        ramp = self.ast.anneal * progress.total
        self.factor = self.ast.decay * (min(progress.position / ramp, 1.0) if ramp else 1.0)
        super().before_step()
        self.measuring = bool(self.squares) and (progress.step + 1) % self.ast.refresh == 0

    @torch.no_grad()
    def before_update(self) -> None:
        if self.ast.scale == "gradient" and self.factor:
            self.ratios = self._ratios()
        super().before_update()
        if self.measuring:
            self.measuring = False
            self._remember()

    def _ratios(self) -> dict[str, Tensor]:
        """‖gradient‖ / ‖weight‖ of each layer, over all ranks with rows of it; FSDP2 spreads all layers alike."""
        trained = self.job.trained
        weights = {name: trained[f"{name}.weight"] for name in self.masks}
        weights = {name: weight for name, weight in weights.items() if weight.grad is not None}
        if not weights:
            return {}
        pairs = [(local(weight.grad), local(weight)) for weight in weights.values() if weight.grad is not None]
        squares = torch.stack([torch.stack([_square_sum(tensor) for tensor in pair]) for pair in pairs])
        summed(squares, next(iter(weights.values())))
        ratios = (squares[:, 0] / squares[:, 1].clamp_min(torch.finfo(squares.dtype).tiny)).sqrt()
        return dict(zip(weights, ratios, strict=True))

    def scaled(self, name: str, out: Tensor) -> Tensor:
        return out * self.ratios[name] if self.ratios else out

    def _remember(self) -> None:
        """Blend what ranks that train together have measured into the running means."""
        group = self.job.world.group(self.job.replicas)
        for name, seen in self.seen.items():
            if group is not None:
                dist.all_reduce(seen, group=group)
            if (mean := seen.mean()) > 0:  # a layer that no token reached keeps its norms
                self.squares[name].lerp_(seen / mean, max(1 - MEMORY, 1 / (self.measured + 1)))
            seen.zero_()
        self.measured += 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"squares": dict(self.squares), "measured": self.measured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.squares.keys() <= state_dict["squares"].keys():  # not of a run that went by magnitude alone
            self.measured = state_dict["measured"]
            for name, squares in self.squares.items():
                squares.copy_(state_dict["squares"][name])


def _square_sum(tensor: Tensor) -> Tensor:
    """In single precision at least; 0-d."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)).square()
