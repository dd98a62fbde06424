"""Muon: momentum whose step is the nearest orthogonal matrix, by a Newton-Schulz iteration; AdamW beside it.

Matrices of one shape are orthogonalised together. Where ranks hold parts of matrices, each rank gets some matrices
whole, and sends the parts of their steps back: two all-to-alls of a gradient's bytes, and no work is done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shoestring._torch import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.task import Params
from shoestring.optim.groups import check_matched
from shoestring.optim.norms import local, local_gradient, shares
from shoestring.optim.standard import parameter_groups
from shoestring.optim.stepping import Stepping

if TYPE_CHECKING:
    from shoestring.optim.settings.muon import Muon

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the iteration X <- a X + b (X X^T) X + c (X X^T)^2 X: steepest at 0, so that few iterations do (Jordan)."""


def orthogonalized(matrices: Tensor, iterations: int) -> Tensor:
    """About U V^T of each matrix U S V^T: its singular values come to lie between 0.7 and 1.2.

    Args:
        matrices: (B, M, N) with M <= N; computed in bf16 on an accelerator and in its own type on a CPU.

    Returns:
        (B, M, N).
    """
    x = matrices.bfloat16() if matrices.device.type != "cpu" else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def orthogonalized_all(tensors: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """The same of tensors of any shapes with at least two dimensions, of which the first counts as rows."""
    found: dict[int, Tensor] = {}
    alike: dict[tuple[int, int], list[int]] = {}
    flat = [each.flatten(1) for each in tensors]
    flat = [each if each.shape[0] <= each.shape[1] else each.T for each in flat]
    for index, each in enumerate(flat):
        alike.setdefault((each.shape[0], each.shape[1]), []).append(index)
    for indices in alike.values():
        for index, each in zip(
            indices, orthogonalized(torch.stack([flat[i] for i in indices]), iterations), strict=True
        ):
            shape = tensors[index].shape
            turned = shape[0] > tensors[index].numel() // shape[0]
            found[index] = (each.T if turned else each).reshape(shape)
    return [found[index] for index in range(len(tensors))]


def _work(shape: torch.Size) -> int:
    """Multiplications of an iteration, as a measure."""
    rows, columns = shape[0], shape.numel() // shape[0]
    return min(rows, columns) ** 2 * max(rows, columns)


class MuonAdamW(Stepping):
    """Muon for groups with `muon`, AdamW for the others.

    Args:
        params: groups of parameters, each with `muon`, `lr` and `weight_decay`; those of Muon have two dimensions or
            more.
        match_adamw: steps of 0.2 sqrt(max(rows, columns)); otherwise of sqrt(max(1, rows / columns)).
        sharers: ranks that hold the same tensors, divide the matrices among them, and exchange the steps.
    """

    def __init__(
        self,
        params: Any,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
        match_adamw: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        sharers: dist.ProcessGroup | None = None,
    ) -> None:
        self.momentum, self.nesterov, self.iterations = momentum, nesterov, iterations
        self.match_adamw, self.sharers = match_adamw, sharers
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.1, "muon": True, "betas": betas, "eps": eps})

    def _update(self) -> None:
        matrices: list[tuple[dict[str, Any], Tensor]] = []
        for group in self.param_groups:
            tensors = [each for each in group["params"] if each.grad is not None]
            if group["muon"]:
                matrices += [(group, each) for each in tensors]
            elif tensors:
                self._adamw(group, tensors)
        if matrices:
            self._muon(matrices)

    def _muon(self, matrices: list[tuple[dict[str, Any], Tensor]]) -> None:
        tensors = [each for _, each in matrices]
        for each in tensors:
            if not self.state[each]:
                self.state[each]["momentum_buffer"] = torch.zeros_like(each, memory_format=torch.preserve_format)
        gradients = [local_gradient(each) for each in tensors]
        velocities = [local(self.state[each]["momentum_buffer"]) for each in tensors]
        foreach_lerp_(velocities, gradients, 1 - self.momentum)
        ahead = foreach_lerp(gradients, velocities, self.momentum) if self.nesterov else velocities
        steps = self._orthogonalized(tensors, list(ahead))
        weights = [local(each) for each in tensors]
        rates = [group["lr"] for group, _ in matrices]
        foreach_mul_(
            weights, [1 - rate * group["weight_decay"] for rate, (group, _) in zip(rates, matrices, strict=True)]
        )
        foreach_mul_(steps, [-rate * self._length(each.shape) for rate, each in zip(rates, tensors, strict=True)])
        foreach_add_(weights, steps)

    def _length(self, shape: torch.Size) -> float:
        """What an orthogonal step is multiplied by beside the learning rate."""
        rows, columns = shape[0], shape.numel() // shape[0]
        return 0.2 * max(rows, columns) ** 0.5 if self.match_adamw else max(1.0, rows / columns) ** 0.5

    def _orthogonalized(self, tensors: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Of this rank's parts, those of the whole tensors' orthogonal steps."""
        groups: dict[Any, list[int]] = {}
        for index, each in enumerate(tensors):
            groups.setdefault(_sharders(each), []).append(index)
        found: dict[int, Tensor] = {}
        for group, indices in groups.items():
            own = [parts[index] for index in indices]
            if group is not None:
                made = self._by_owners([tensors[index] for index in indices], own, group)
            elif self.sharers is not None:
                made = self._by_sharers(own, self.sharers)
            else:
                made = orthogonalized_all(own, self.iterations)
            found.update(zip(indices, made, strict=True))
        return [found[index] for index in range(len(tensors))]

    def _by_sharers(self, whole: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Each rank makes its share and sends it to all."""
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        shared = shares([_work(each.shape) for each in whole], ranks)
        sizes = [sum(whole[index].numel() for index in share) for share in shared]
        mine = orthogonalized_all([whole[index] for index in shared[rank]], self.iterations)
        sent = torch.cat([each.flatten() for each in mine] or [whole[0].new_zeros(0)])
        all_of = whole[0].new_empty(ranks * max(sizes))
        dist.all_gather_into_tensor(all_of, nn.functional.pad(sent, (0, max(sizes) - len(sent))), group=group)
        found: dict[int, Tensor] = {}
        for share, size, row in zip(shared, sizes, all_of.view(ranks, -1), strict=True):
            pieces = row[:size].split([whole[index].numel() for index in share])
            for index, piece in zip(share, pieces, strict=True):
                found[index] = piece.view(whole[index].shape)
        return [found[index] for index in range(len(whole))]

    def _by_owners(self, tensors: list[Tensor], parts: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Each matrix goes whole to one rank, and its step back to all that hold a part of its rows."""
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        owned = shares([_work(each.shape) for each in tensors], ranks)
        rows = [[len(chunk) for chunk in torch.arange(each.shape[0]).chunk(ranks)] for each in tensors]
        rows = [each + [0] * (ranks - len(each)) for each in rows]
        widths = [each.shape.numel() // each.shape[0] for each in tensors]
        sends = [sum(parts[index].numel() for index in share) for share in owned]
        takes = [sum(rows[index][source] * widths[index] for index in owned[rank]) for source in range(ranks)]
        sent = torch.cat([parts[index].flatten() for share in owned for index in share])
        taken = sent.new_empty(sum(takes))
        dist.all_to_all_single(taken, sent, takes, sends, group=group)
        pieces: dict[int, list[Tensor]] = {index: [] for index in owned[rank]}
        for source, chunk in enumerate(taken.split(takes)):
            sizes = [rows[index][source] * widths[index] for index in owned[rank]]
            for index, piece in zip(owned[rank], chunk.split(sizes), strict=True):
                pieces[index].append(piece.view(rows[index][source], *tensors[index].shape[1:]))
        made = orthogonalized_all([torch.cat(pieces[index]) for index in owned[rank]], self.iterations)
        back = [each.split(rows[index]) for index, each in zip(owned[rank], made, strict=True)]
        sent = torch.cat([taken.new_zeros(0), *(each[to].flatten() for to in range(ranks) for each in back)])
        taken = sent.new_empty(sum(sends))
        dist.all_to_all_single(taken, sent, sends, takes, group=group)
        found: dict[int, Tensor] = {}
        for share, chunk in zip(owned, taken.split(sends), strict=True):
            for index, piece in zip(share, chunk.split([parts[index].numel() for index in share]), strict=True):
                found[index] = piece.view(parts[index].shape)
        return [found[index] for index in range(len(tensors))]

    def _adamw(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        for each in tensors:
            if not (state := self.state[each]):
                state["step"] = torch.zeros((), dtype=torch.float32, device=each.device)
                state["exp_avg"] = torch.zeros_like(each, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(each, memory_format=torch.preserve_format)
        states = [self.state[each] for each in tensors]
        adamw(
            [local(each) for each in tensors],
            [local_gradient(each) for each in tensors],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _sharders(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold parts of its rows."""
    if not isinstance(tensor, DTensor):
        return None
    shards = {at: placement for at, placement in enumerate(tensor.placements) if isinstance(placement, Shard)}
    if len(shards) > 1 or any(placement.dim != 0 for placement in shards.values()):
        raise ConfigError(f"`optim.muon` knows matrices whose rows are split once, not {tensor.placements}")
    return tensor.device_mesh.get_group(next(iter(shards))) if shards else None


# -- as a feature ------------------------------------------------------------------------------------------------------


def build_muon(job: Job, settings: Muon) -> None:
    def build(parameters: Params) -> Optimizer:
        check_matched(settings.groups, job.trained)
        aside = not_matrices(job.module) | {
            name for name in job.trained if any(fnmatchcase(name, pattern) for pattern in settings.adamw)
        }
        matrices = {name: each for name, each in job.trained.items() if each.ndim >= 2 and name not in aside}
        rest = {name: each for name, each in job.trained.items() if name not in matrices}
        if not matrices:
            raise ConfigError("`optim.muon` finds no matrix to train", hint="take [optim.adamw]")
        lr = settings.adamw_lr or settings.lr
        tables = [
            table | {"muon": muon}
            for muon, named, rate in ((True, matrices, settings.lr), (False, rest, lr))
            for table in parameter_groups(named, rate, settings.weight_decay, settings.groups)
        ]
        return MuonAdamW(
            tables,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            iterations=settings.iterations,
            match_adamw=settings.match_adamw,
            betas=settings.betas,
            eps=settings.eps,
            sharers=job.world.group(job.replicas) if settings.share else None,
        )

    job.build_with(build)


def not_matrices(model: nn.Module) -> set[str]:
    """Names of the weights that look tokens up: embeddings, and output heads with a row for each token."""
    modules = dict(model.named_modules())
    tables = [each for each in modules.values() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    tokens = {each.num_embeddings for each in tables}
    aside = {id(each.weight) for each in tables} | {
        id(each.weight) for each in modules.values() if isinstance(each, nn.Linear) and each.out_features in tokens
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in aside}
