"""AST: fine-tunes a dense model to 2:4, with a growing decay of masked weights, and adapters that make up for the
masked weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring.models import slorb
from shoestring.sharded import local_part
from shoestring.sparse.masked import Masks
from shoestring.sparse.masks import row_mask
from shoestring.sparse.report import ADAPTERS
from shoestring.sparse.shards import summed

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.sparse.settings import AST

MEMORY = 0.9
"""Weight of the previous mean when a measurement updates the running mean square of each input."""


class AnnealedMasks(Masks):
    """Masks of AST; see `attached.SparseMethod`.

    With Wanda's metric, mean squares of the inputs are measured in the last step before each refresh of the masks.
    """

    def __init__(self, attachments: Attachments, settings: AST) -> None:
        super().__init__(attachments, settings)
        self.ast = settings
        self.factor = 0.0
        self.squares: dict[str, Tensor] = {}  # running mean square of each input, relative to the layer's mean
        self.seen: dict[str, Tensor] = {}  # sums of squares of each input in a measuring step
        self.measuring, self.measured = False, 0  # whether this step measures inputs; number of measurements
        self.ratios: dict[str, Tensor] = {}  # |gradient| / |weight| of each layer in this step

    def prepare(self, name: str, weight: Tensor) -> None:
        super().prepare(name, weight)
        layer = self.attachments.module.get_submodule(name)
        if self.ast.metric == "wanda":
            wide = torch.promote_types(weight.dtype, torch.float32)
            self.squares[name] = torch.ones(weight.shape[1], dtype=wide, device=weight.device)
            self.seen[name] = torch.zeros_like(self.squares[name])
            self.attachments.exits.callback(layer.register_forward_pre_hook(partial(self._measure, name)).remove)
        if self.ast.slorb:
            dropped = weight.detach().masked_fill(row_mask(weight), 0)
            means = slorb.block_means(dropped, slorb.block_size(weight.shape[1], self.ast.slorb))
            self.attachments.exits.callback(slorb.adapt(layer, nn.Parameter(means)))
            facts = self.attachments.trace.facts
            facts[ADAPTERS] = facts.get(ADAPTERS, 0.0) + means.numel()

    def forget(self, name: str) -> None:
        super().forget(name)
        if self.ast.slorb:  # a dense layer has no masked weights for an adapter to replace
            with torch.no_grad():
                local_part(self.attachments.trained[f"{name}.{slorb.NAME}"]).zero_()

    def _measure(self, name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of a layer: add up the squares of its inputs, in training only."""
        if self.measuring and layer.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.seen[name].add_(args[0].detach().to(self.seen[name]).square().flatten(0, -2).sum(0))

    def scores(self, name: str, weight: Tensor) -> Tensor:
        return weight * self.squares[name].sqrt() if name in self.squares else weight

    def before_step(self) -> None:
        progress = self.attachments.progress
        ramp = self.ast.masked_decay_warmup * progress.total
        self.factor = self.ast.masked_decay * (min(progress.position / ramp, 1.0) if ramp else 1.0)
        super().before_step()
        self.measuring = bool(self.squares) and (progress.step + 1) % self.ast.refresh == 0

    @torch.no_grad()
    def before_update(self) -> None:
        if self.ast.masked_decay_scale == "gradient" and self.factor:
            self.ratios = self._ratios()
        super().before_update()
        if self.measuring:
            self.measuring = False
            # Update the running means with this step's measurement, summed over the ranks that average gradients.
            group = self.attachments.world.group(self.attachments.alike)
            for name, seen in self.seen.items():
                if group is not None:
                    dist.all_reduce(seen, group=group)
                if (mean := seen.mean()) > 0:  # an expert that no token reached keeps its means
                    self.squares[name].lerp_(seen / mean, max(1 - MEMORY, 1 / (self.measured + 1)))
                seen.zero_()
            self.measured += 1

    def _ratios(self) -> dict[str, Tensor]:
        """‖gradient‖ / ‖weight‖ of each layer, over all rows of the weight."""
        trained = self.attachments.trained
        weights = {name: trained[f"{name}.weight"] for name in self.masks}
        weights = {name: weight for name, weight in weights.items() if weight.grad is not None}
        if not weights:
            return {}
        tensors = [
            local_part(tensor) for weight in weights.values() for tensor in (weight.grad, weight) if tensor is not None
        ]
        wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
        norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor, dtype in zip(tensors, wide, strict=True)]
        squares = torch.stack(norms).square().view(-1, 2)
        summed(squares, next(iter(weights.values())))  # one all-reduce: all layers are sharded over the same ranks
        ratios = (squares[:, 0] / squares[:, 1].clamp_min(torch.finfo(squares.dtype).tiny)).sqrt()
        return dict(zip(weights, ratios, strict=True))

    def scaled(self, name: str, dropped: Tensor) -> Tensor:
        return dropped * self.ratios[name] if self.ratios else dropped

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"squares": dict(self.squares), "measured": self.measured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.squares.keys() <= state_dict["squares"].keys():  # a run with `metric = "magnitude"` saves no squares
            self.measured = state_dict["measured"]
            for name, squares in self.squares.items():
                squares.copy_(state_dict["squares"][name])
