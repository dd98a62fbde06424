"""Thin forms of techniques to come, to hold core to what they need of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.feature import Feature, Phase, Seam

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoestring.core.job import Job


def linears(job: Job) -> dict[str, nn.Module]:
    from torch import nn

    return {name: module for name, module in job.module.named_modules() if isinstance(module, nn.Linear)}


@dataclass(frozen=True, kw_only=True)
class Sparse(Feature):
    """Compute with the larger two of four weights, and train all of them (as S-STE does)."""

    part: str = ".up"
    """End of the names of the layers that are sparse."""

    seams: ClassVar = (Seam.MODEL,)

    def sparse(self, weight: Tensor) -> Tensor:
        groups = weight.detach().reshape(-1, 4).abs()
        mask = (groups >= groups.topk(2, dim=1).values[:, 1:]).reshape(weight.shape)
        return weight + (weight * mask - weight).detach()  # straight through

    def apply(self, job: Job, seam: Seam) -> None:
        from functools import partial

        from torch.nn import functional as F

        def forward(layer: nn.Module, inputs: Tensor) -> Tensor:
            return F.linear(inputs, self.sparse(layer.weight), layer.bias)

        for name, layer in linears(job).items():
            if name.endswith(self.part):
                job.patch(layer, partial(forward, layer))

    def export(self, weights, kept):
        return {
            name: self.sparse(weight) if name.endswith(f"{self.part}.weight") else weight
            for name, weight in weights.items()
        }


@dataclass(frozen=True, kw_only=True)
class Adapter(Feature):
    """Train a product of low rank beside the weights of some layers, which are frozen (LoRA, Hu et al. 2021)."""

    rank: int = 4
    """Rank of the product."""
    part: str = ".up"
    """End of the names of the layers that are adapted."""

    seams: ClassVar = (Seam.MODEL,)
    adds_parameters: ClassVar = True

    def apply(self, job: Job, seam: Seam) -> None:
        from functools import partial

        import torch
        from torch import nn
        from torch.nn import functional as F

        def forward(layer: nn.Module, inputs: Tensor) -> Tensor:
            return F.linear(inputs, layer.weight + layer.lora_b @ layer.lora_a, layer.bias)

        adapted = [layer for name, layer in linears(job).items() if name.endswith(self.part)]
        job.frozen("base", nn.ModuleList(adapted), "the model of the run")
        for layer in adapted:
            rows, columns = layer.weight.shape
            generator = torch.Generator().manual_seed(rows)
            draw = torch.randn(self.rank, columns, generator=generator) / columns**0.5
            layer.register_parameter("lora_a", nn.Parameter(draw.to(layer.weight)))
            layer.register_parameter("lora_b", nn.Parameter(layer.weight.new_zeros(rows, self.rank)))
            job.patch(layer, partial(forward, layer))
            job.exits.callback(self._take_off, layer)

    @staticmethod
    def _take_off(layer: nn.Module) -> None:
        del layer.lora_a, layer.lora_b

    def export(self, weights, kept):
        merged = {name: weight for name, weight in weights.items() if ".lora_" not in name}
        for name in weights:
            if name.endswith(".lora_a"):
                layer = name.removesuffix(".lora_a")
                merged[f"{layer}.weight"] = weights[f"{layer}.weight"] + weights[f"{layer}.lora_b"] @ weights[name]
        return merged


@dataclass(frozen=True, kw_only=True)
class Smooth(Feature):
    """Learn from the logits of a teacher as well (distillation, Hinton et al. 2015)."""

    teacher: str = "shoestring.testing.jobs:tiny"
    """The teacher, as `open_model` takes it."""
    share: float = 0.3
    """Share of the teacher in the loss."""

    seams: ClassVar = (Seam.MODEL, Seam.LOSS)

    def apply(self, job: Job, seam: Seam) -> None:
        from torch.nn import functional as F

        from shoestring.models.loading import open_model

        if seam is Seam.MODEL:
            dtype = next(job.module.parameters()).dtype
            job.frozen("teacher", open_model(self.teacher).to(dtype), self.teacher)
            return
        teacher, inner = job.frozen_modules["teacher"], job.loss

        def loss(output, batch):
            total, count = inner(output, batch)
            wanted = job.forward(teacher, batch)
            counted = (batch["targets"] != -100).flatten()
            distance = F.kl_div(
                output.flatten(0, -2).log_softmax(-1), wanted.flatten(0, -2).softmax(-1), reduction="none"
            )
            return (1 - self.share) * total + self.share * distance.sum(-1)[counted].sum(), count

        job.loss = loss


@dataclass(frozen=True, kw_only=True)
class ShardedState(Feature):
    """Each rank steps a part of every parameter, and all gather what the others stepped (as ZeRO stage 1 and 2)."""

    seams: ClassVar = (Seam.SHARD,)

    def apply(self, job: Job, seam: Seam) -> None:
        if job.world.size > 1:
            Shards(job, self)


class Shards:
    """The parts of one rank, as DTensors cut along the first dimension; gradients are averaged as they are made."""

    def __init__(self, job: Job, settings: ShardedState) -> None:
        from functools import partial

        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        self.job, self.size, self.dist = job, job.world.size, dist
        mesh = init_device_mesh(job.world.device.type, (job.world.size,))
        self.parameters = {name: p for name, p in job.module.named_parameters() if p.requires_grad}
        for parameter in job.module.parameters():
            dist.broadcast(parameter.detach(), 0)
        self.shards = {
            name: distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None).clone().requires_grad_()
            for name, p in self.parameters.items()
        }
        job.shard(over=settings.over, trained=self.shards, refresh=self.refresh)
        job.at(Phase.PROJECT, self.refresh)
        for name, parameter in self.parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(partial(self.reduce, self.shards[name]))
            job.exits.callback(hook.remove)

    def reduce(self, shard, parameter):
        from torch.distributed.tensor import Shard, distribute_tensor

        self.dist.all_reduce(parameter.grad)
        mean = distribute_tensor(parameter.grad / self.size, shard.device_mesh, [Shard(0)], src_data_rank=None)
        shard.grad = mean if shard.grad is None else shard.grad + mean
        parameter.grad = None

    def refresh(self):
        import torch

        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.shards[name].full_tensor())
