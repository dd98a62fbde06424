"""Thin forms of techniques to come, to hold core to what they need of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Phase, Seam
from shoestring.core.leases import Priority

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoestring.core.attachments import Attachments


def linears(attachments: Attachments) -> dict[str, nn.Module]:
    from torch import nn

    return {name: module for name, module in attachments.module.named_modules() if isinstance(module, nn.Linear)}


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

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from functools import partial

        from torch.nn import functional as F

        def forward(layer: nn.Module, inputs: Tensor) -> Tensor:
            return F.linear(inputs, self.sparse(layer.weight), layer.bias)

        for name, layer in linears(attachments).items():
            if name.endswith(self.part):
                attachments.patch(layer, partial(forward, layer))

    def export(self, weights, states):
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

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from functools import partial

        import torch
        from torch import nn
        from torch.nn import functional as F

        def forward(layer: nn.Module, inputs: Tensor) -> Tensor:
            return F.linear(inputs, layer.weight + layer.lora_b @ layer.lora_a, layer.bias)

        adapted = [layer for name, layer in linears(attachments).items() if name.endswith(self.part)]
        attachments.frozen("base", nn.ModuleList(adapted), "the model of the run")
        for layer in adapted:
            rows, columns = layer.weight.shape
            generator = torch.Generator().manual_seed(rows)
            draw = torch.randn(self.rank, columns, generator=generator) / columns**0.5
            layer.register_parameter("lora_a", nn.Parameter(draw.to(layer.weight)))
            layer.register_parameter("lora_b", nn.Parameter(layer.weight.new_zeros(rows, self.rank)))
            attachments.patch(layer, partial(forward, layer))
            attachments.exits.callback(self._take_off, layer)

    @staticmethod
    def _take_off(layer: nn.Module) -> None:
        del layer.lora_a, layer.lora_b

    def export(self, weights, states):
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

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from torch.nn import functional as F

        from shoestring.models.loading import open_model

        if seam is Seam.MODEL:
            dtype = next(attachments.module.parameters()).dtype
            attachments.frozen("teacher", open_model(self.teacher).to(dtype), self.teacher)
            return
        teacher, inner = attachments.frozen_modules["teacher"], attachments.loss

        def loss(output, batch):
            total, count = inner(output, batch)
            wanted = attachments.forward(teacher, batch)
            counted = (batch["targets"] != -100).flatten()
            distance = F.kl_div(
                output.flatten(0, -2).log_softmax(-1), wanted.flatten(0, -2).softmax(-1), reduction="none"
            )
            return (1 - self.share) * total + self.share * distance.sum(-1)[counted].sum(), count

        attachments.loss = loss


@dataclass(frozen=True, kw_only=True)
class ShardedState(Feature):
    """Each rank steps a part of every parameter, and all gather what the others stepped (as ZeRO stage 1 and 2)."""

    seams: ClassVar = (Seam.SHARD,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        if attachments.world.size > 1:
            Shards(attachments, self)


class Shards:
    """The parts of one rank, as DTensors cut along the first dimension; gradients are averaged as they are made."""

    def __init__(self, attachments: Attachments, settings: ShardedState) -> None:
        from functools import partial

        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        self.attachments, self.size, self.dist = attachments, attachments.world.size, dist
        mesh = init_device_mesh(attachments.world.device.type, (attachments.world.size,))
        self.parameters = {name: p for name, p in attachments.module.named_parameters() if p.requires_grad}
        for parameter in attachments.module.parameters():
            dist.broadcast(parameter.detach(), 0)
        self.shards = {
            name: distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None).clone().requires_grad_()
            for name, p in self.parameters.items()
        }
        attachments.shard(over=settings.over, trained=self.shards, refresh=self.refresh)
        attachments.at(Phase.PROJECT, self.refresh)
        for name, parameter in self.parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(partial(self.reduce, self.shards[name]))
            attachments.exits.callback(hook.remove)

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


@dataclass(frozen=True, kw_only=True)
class Offload(Feature):
    """Hold the optimizer's state in host memory between steps (as ZeRO-Offload does, Ren et al. 2021)."""

    pinned: bool = True
    """Lock the host's pages, so that copies from a GPU and to it do not wait; a CPU has nothing to lock them for."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, attachments: Attachments) -> None:
        if attachments.divided == "parameters":
            raise ConfigError(f"`{self.name}` moves whole tensors, and FSDP2 shards them", hint="use parallel.DDP()")

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        state = HostState(attachments, self)
        attachments.at(Phase.WAIT, state.fetch)
        attachments.at(Phase.PROJECT, state.store)
        attachments.exits.callback(state.release)


Offload.neutral = Offload()


class HostState:
    """The optimizer's state on the host, while a lease of `Priority.CACHE` is granted; else it stays where it is.

    The state's tensors of at least one dimension are exchanged for copies: on the host from `store` on, on their own
    device from `fetch` on. A checkpoint that is written or loaded between two steps sees those on the host.
    """

    LEASE = "optimizer state"

    def __init__(self, attachments: Attachments, settings: Offload) -> None:
        self.optimizer, self.memory, self.trace = attachments.optimizer, attachments.world.memory, attachments.trace
        self.pinned = settings.pinned and attachments.world.device.type == "cuda"
        self.host: dict[tuple[Tensor, str], Tensor] = {}  # (parameter, name of the state) -> its copy on the host

    def tensors(self) -> dict[tuple[Tensor, str], Tensor]:
        from torch import Tensor

        each = ((of, name, value) for of, state in self.optimizer.state.items() for name, value in state.items())
        return {(of, name): value for of, name, value in each if isinstance(value, Tensor) and value.ndim}

    def fetch(self) -> None:
        for (parameter, name), value in self.tensors().items():
            if value is self.host.get((parameter, name)):
                self.optimizer.state[parameter][name] = value.to(parameter.device, copy=True)

    def store(self) -> None:
        import torch

        tensors = self.tensors()
        nbytes = sum(value.nbytes for value in tensors.values())
        if not self.memory.take(self.LEASE, nbytes, Priority.CACHE):
            self.drop()
            return
        for (parameter, name), value in tensors.items():
            if (parameter, name) not in self.host:
                copy = torch.empty_like(value, device="cpu", pin_memory=self.pinned)
                self.host[parameter, name] = copy
            self.optimizer.state[parameter][name] = self.host[parameter, name].copy_(value)
        self.trace.facts["bytes_on_host"] = nbytes

    def drop(self) -> None:
        """Free the copies on the host, and then end their lease; called while none of them is in use."""
        self.host.clear()
        self.memory.give(self.LEASE)
        self.trace.facts["bytes_on_host"] = 0

    def release(self) -> None:
        self.fetch()
        self.drop()


@dataclass(frozen=True, kw_only=True)
class Tight(Feature):
    """Leave no host memory to lease, so that every lease that may be refused is."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        attachments.world.memory.budget = 0.0
