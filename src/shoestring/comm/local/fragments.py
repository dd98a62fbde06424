"""Fragments: groups of parameters that are merged at the same time, with the outer optimizer's copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoestring._torch import foreach_add_, foreach_copy_
from shoestring.comm.codecs.dense import flatten, split_like, unflatten
from shoestring.models.blocks import repeated
from shoestring.sharded import is_sharded, local_part, part_like, placed_like


def group_parameters(model: nn.Module) -> list[list[str]]:
    """Group the names of trained parameters: one group per repeated layer, and one per parameter outside the layers."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers, left = [], dict(names)
    for block in repeated(model):
        layers.append([name for parameter in block.parameters() if (name := left.pop(parameter, None)) is not None])
    return [layer for layer in layers if layer] + [[name] for name in left.values()]


def assign_fragments(model: nn.Module, count: int, layout: str) -> list[list[str]]:
    """Assign a model's parameters to `count` fragments: layers by `layout`, other parameters to the smallest
    fragments."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers, groups = [unit for unit in group_parameters(model) if len(unit) > 1], [[] for _ in range(count)]
    others = [name for unit in group_parameters(model) if len(unit) == 1 for name in unit]
    for index, unit in enumerate(layers):
        groups[index % count if layout == "strided" else index * count // len(layers)] += unit
    for name in sorted(others, key=lambda name: -sizes[name]):  # largest first, for the best balance
        min(groups, key=lambda group: sum(sizes[member] for member in group)).append(name)
    return groups


class Fragment:
    """Parameters that replicas merge at the same time, and the outer optimizer's copy of this rank's shards of these
    parameters.

    Args:
        momentum: whether the outer optimizer has a velocity.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], momentum: bool) -> None:
        self.parameters = parameters
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters.values()) else torch.float32
        self.anchor = self.flat()  # theta_old, the weights after the previous outer step
        self.velocity = torch.zeros_like(self.anchor) if momentum else None

    @property
    def weights(self) -> list[Tensor]:
        """This rank's shard of each parameter. Shards are looked up at every call, because sharding may replace
        tensors."""
        return [local_part(parameter) for parameter in self.parameters.values()]

    def flat(self) -> Tensor:
        """The replica's weights theta as one new flat tensor."""
        return flatten(self.weights, self.dtype)

    def copy_to(self, flat: Tensor) -> Tensor:
        """Copy the replica's weights theta into a flat tensor, and return it."""
        foreach_copy_(split_like(flat, self.weights), self.weights)
        return flat

    def rebase(self) -> None:
        """Set the outer optimizer's copy to the replica's weights, which must be equal on all replicas."""
        self.copy_to(self.anchor)

    def gradient(self) -> Tensor:
        """The gradients as one flat tensor, with zeros for parameters without gradient."""
        flat = torch.zeros_like(self.anchor)
        for part, parameter in zip(split_like(flat, self.weights), self.parameters.values(), strict=True):
            if parameter.grad is not None:
                part.copy_(local_part(parameter.grad))
        return flat

    def set_gradient(self, flat: Tensor) -> None:
        """Copy a flat tensor into the gradients, the inverse of `gradient`; frozen parameters are skipped."""
        for part, parameter in zip(split_like(flat, self.weights), self.parameters.values(), strict=True):
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local_part(parameter.grad).copy_(part)

    def step_outer(self, mean: Tensor, lr: float, momentum: float, nesterov: bool) -> None:
        """Make one step of the outer optimizer, SGD as in torch; overwrites `mean`."""
        if self.velocity is not None and momentum:
            self.velocity.mul_(momentum).add_(mean)
            mean = mean.add_(self.velocity, alpha=momentum) if nesterov else self.velocity
        self.anchor.sub_(mean, alpha=lr)

    def adopt(self, alpha: float = 0.0) -> None:
        """Set the weights to alpha theta + (1 - alpha) theta_new, where theta_new is the outer optimizer's copy."""
        flat = self.anchor
        if alpha:
            flat = self.flat().lerp_(self.anchor, 1 - alpha)
        unflatten(flat, self.weights)

    def move(self, sent: Tensor) -> None:
        """Add theta_new - `sent` to the weights, where `sent` holds the weights before the exchange; overwrites
        `sent`."""
        torch.sub(self.anchor, sent, out=sent)
        foreach_add_(self.weights, split_like(sent, self.weights))

    def split_named(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat tensor into views, keyed by parameter name."""
        return dict(zip(self.parameters, split_like(flat, self.weights), strict=True))

    def to_saved(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat tensor into tensors for a checkpoint, sharded like the parameters."""
        saved = self.split_named(flat)
        for name, parameter in self.parameters.items():
            if is_sharded(parameter):
                saved[name] = placed_like(saved[name], parameter)
        return saved

    def load(self, flat: Tensor, saved: dict[str, Tensor]) -> None:
        """Copy saved tensors into `flat`; the inverse of `to_saved`."""
        parts = []  # this rank's shards
        for name, parameter in self.parameters.items():
            part = saved[name]
            if is_sharded(parameter):
                part = part_like(part.to(parameter.device), parameter).to_local()
            parts.append(part)
        foreach_copy_(split_like(flat, self.weights), parts)


class FlatPool:
    """Reuses flat tensors with the size of the largest fragment, for merges that overlap with training.

    Without reuse, a CPU allocator may return the memory of a large tensor to the system. Mapping pages for the next
    tensor then takes several times as long as writing to it.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.largest = max(len(fragment.anchor) for fragment in fragments)
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """Take an uninitialised tensor of the size and type of `like`."""
        for index, flat in enumerate(self._free):
            if flat.dtype == like.dtype and len(flat) >= len(like):
                return self._free.pop(index)[: len(like)]
        return like.new_empty(self.largest)[: len(like)]

    def give_back(self, flats: Sequence[Tensor]) -> None:
        """Return tensors obtained from `take` to the pool, once nothing reads them any more."""
        self._free += [flat if flat._base is None else flat._base for flat in flats]
