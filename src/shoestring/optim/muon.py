"""Muon: momentum orthogonalised by a Newton-Schulz iteration, for matrices; AdamW for all other parameters.

Matrices of the same shape are orthogonalised in one batch. If matrices are sharded, each rank gathers all shards of
some matrices, orthogonalises these matrices, and scatters the steps back to the shards. Two all-to-alls are needed,
each as large as the gradient, and no matrix is orthogonalised twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shoestring._torch import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.task import Params
from shoestring.optim.groups import check_matched
from shoestring.optim.norms import local_gradient, sharers, shares
from shoestring.optim.standard import parameter_groups
from shoestring.optim.stepping import Stepping
from shoestring.sharded import is_sharded, local_part, shard_dims

if TYPE_CHECKING:
    from shoestring.optim.settings.muon import Muon

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients (a, b, c) of the iteration X <- a X + b (X X^T) X + c (X X^T)^2 X. Jordan et al. chose the coefficients
for the steepest slope at 0: small singular values then grow fast, so that few iterations suffice."""


def orthogonalized(matrices: Tensor, iterations: int) -> Tensor:
    """Approximate U V^T of each matrix U S V^T; the singular values of the result lie between 0.7 and 1.2.

    Args:
        matrices: (B, M, N) with M <= N. The products are computed in bf16 on an accelerator, and in the matrices' own
            data type on a CPU.

    Returns:
        The approximations, with shape (B, M, N).
    """
    x = matrices.bfloat16() if matrices.device.type != "cpu" else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def orthogonalized_all(tensors: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """Orthogonalise tensors of any shapes, in one batch for each shape.

    A tensor with more than two dimensions, such as a convolution's weight, is flattened to a matrix whose rows are the
    first dimension.
    """
    steps: dict[int, Tensor] = {}
    same_shape: dict[tuple[int, int], list[int]] = {}
    matrices = [tensor.flatten(1) for tensor in tensors]
    matrices = [matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T for matrix in matrices]
    for index, matrix in enumerate(matrices):
        same_shape.setdefault((matrix.shape[0], matrix.shape[1]), []).append(index)
    for indices in same_shape.values():
        batch = orthogonalized(torch.stack([matrices[index] for index in indices]), iterations)
        for index, step in zip(indices, batch, strict=True):
            shape = tensors[index].shape
            transposed = shape[0] > tensors[index].numel() // shape[0]
            steps[index] = (step.T if transposed else step).reshape(shape)
    return [steps[index] for index in range(len(tensors))]


def _work(shape: torch.Size) -> int:
    """Number of multiplications in one iteration, up to a constant factor; matrices are divided among ranks by this
    cost."""
    rows, columns = shape[0], shape.numel() // shape[0]
    return min(rows, columns) ** 2 * max(rows, columns)


class MuonAdamW(Stepping):
    """Muon for parameter groups whose `muon` is True, AdamW for the other groups.

    Args:
        params: parameter groups, each with `muon`, `lr` and `weight_decay`. Parameters of a group whose `muon` is True
            have at least two dimensions.
        match_adamw: scale orthogonal steps by 0.2 sqrt(max(rows, columns)), so that they are as large as AdamW's steps;
            if false, scale by sqrt(max(1, rows / columns)).
        sharers: group of ranks that hold the same tensors, divide the matrices among them, and exchange the steps.
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
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if group["muon"]:
                matrices += [(group, tensor) for tensor in tensors]
            elif tensors:
                self._adamw(group, tensors)
        if not matrices:
            return
        tensors = [tensor for _, tensor in matrices]
        for tensor in tensors:
            if not self.state[tensor]:
                self.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        gradients = [local_gradient(tensor) for tensor in tensors]
        velocities = [local_part(self.state[tensor]["momentum_buffer"]) for tensor in tensors]
        foreach_lerp_(velocities, gradients, 1 - self.momentum)
        ahead = foreach_lerp(gradients, velocities, self.momentum) if self.nesterov else velocities
        steps = self._orthogonalized(tensors, list(ahead))
        weights = [local_part(tensor) for tensor in tensors]
        rates = [group["lr"] for group, _ in matrices]
        foreach_mul_(
            weights, [1 - rate * group["weight_decay"] for rate, (group, _) in zip(rates, matrices, strict=True)]
        )
        foreach_mul_(steps, [-rate * self._length(tensor.shape) for rate, tensor in zip(rates, tensors, strict=True)])
        foreach_add_(weights, steps)

    def _length(self, shape: torch.Size) -> float:
        """Factor that multiplies an orthogonal step in addition to the learning rate; depends on the shape of the
        matrix."""
        rows, columns = shape[0], shape.numel() // shape[0]
        return 0.2 * max(rows, columns) ** 0.5 if self.match_adamw else max(1.0, rows / columns) ** 0.5

    def _orthogonalized(self, tensors: list[Tensor], shards: list[Tensor]) -> list[Tensor]:
        """Orthogonalise whole matrices, given this rank's shards of them; returns this rank's shards of the results."""
        groups: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault(_sharders(tensor), []).append(index)
        steps: dict[int, Tensor] = {}
        for group, indices in groups.items():
            inputs = [shards[index] for index in indices]
            if group is not None:
                outputs = self._by_owners([tensors[index] for index in indices], inputs, group)
            elif self.sharers is not None:
                outputs = self._by_sharers(inputs, self.sharers)
            else:
                outputs = orthogonalized_all(inputs, self.iterations)
            steps.update(zip(indices, outputs, strict=True))
        return [steps[index] for index in range(len(tensors))]

    def _by_sharers(self, matrices: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Orthogonalise replicated matrices: each rank computes its share of the steps, and an all-gather exchanges
        them."""
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        shared = shares([_work(matrix.shape) for matrix in matrices], ranks)
        sizes = [sum(matrices[index].numel() for index in share) for share in shared]
        own = orthogonalized_all([matrices[index] for index in shared[rank]], self.iterations)
        sent = torch.cat([step.flatten() for step in own] or [matrices[0].new_zeros(0)])
        received = matrices[0].new_empty(ranks * max(sizes))
        dist.all_gather_into_tensor(received, nn.functional.pad(sent, (0, max(sizes) - len(sent))), group=group)
        steps: dict[int, Tensor] = {}
        for share, size, row in zip(shared, sizes, received.view(ranks, -1), strict=True):
            flat_steps = row[:size].split([matrices[index].numel() for index in share])
            for index, step in zip(share, flat_steps, strict=True):
                steps[index] = step.view(matrices[index].shape)
        return [steps[index] for index in range(len(matrices))]

    def _by_owners(self, tensors: list[Tensor], shards: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Orthogonalise sharded matrices: one rank (the owner) gathers each matrix, and scatters its step to all
        ranks."""
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        owned = shares([_work(tensor.shape) for tensor in tensors], ranks)
        # Number of rows of each tensor on each rank: `chunk` splits rows as DTensor does, and may leave the last ranks
        # without rows.
        rows = [[len(chunk) for chunk in torch.arange(tensor.shape[0]).chunk(ranks)] for tensor in tensors]
        rows = [counts + [0] * (ranks - len(counts)) for counts in rows]
        widths = [tensor.shape.numel() // tensor.shape[0] for tensor in tensors]
        # First all-to-all: this rank sends its shards to the owners of the matrices, and receives all shards of its own
        # matrices.
        to_owners = [sum(shards[index].numel() for index in share) for share in owned]
        to_me = [sum(rows[index][source] * widths[index] for index in owned[rank]) for source in range(ranks)]
        sent = torch.cat([shards[index].flatten() for share in owned for index in share])
        received = sent.new_empty(sum(to_me))
        dist.all_to_all_single(received, sent, to_me, to_owners, group=group)
        gathered: dict[int, list[Tensor]] = {index: [] for index in owned[rank]}
        for source, chunk in enumerate(received.split(to_me)):
            sizes = [rows[index][source] * widths[index] for index in owned[rank]]
            for index, shard in zip(owned[rank], chunk.split(sizes), strict=True):
                gathered[index].append(shard.view(rows[index][source], *tensors[index].shape[1:]))
        own = orthogonalized_all([torch.cat(gathered[index]) for index in owned[rank]], self.iterations)
        # Second all-to-all: steps return to the ranks that hold the shards, so the sizes sent and received are swapped.
        scattered = [step.split(rows[index]) for index, step in zip(owned[rank], own, strict=True)]
        flat = [step_shards[target].flatten() for target in range(ranks) for step_shards in scattered]
        sent = torch.cat([received.new_zeros(0), *flat])  # `cat` needs a tensor even if this rank owns no matrix
        received = sent.new_empty(sum(to_owners))
        dist.all_to_all_single(received, sent, to_owners, to_me, group=group)
        steps: dict[int, Tensor] = {}
        for share, chunk in zip(owned, received.split(to_owners), strict=True):
            for index, step in zip(share, chunk.split([shards[index].numel() for index in share]), strict=True):
                steps[index] = step.view(shards[index].shape)
        return [steps[index] for index in range(len(tensors))]

    def _adamw(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not (state := self.state[tensor]):
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                state["exp_avg"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        states = [self.state[tensor] for tensor in tensors]
        adamw(
            [local_part(tensor) for tensor in tensors],
            [local_gradient(tensor) for tensor in tensors],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
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
    """Return the process group over which a tensor's rows are sharded; None if this rank holds the whole tensor.

    Raises:
        ConfigError: the tensor's columns are sharded, or its rows are sharded over two mesh axes.
    """
    if not is_sharded(tensor):
        return None
    shards = shard_dims(tensor)
    if len(shards) > 1 or any(shards.values()):
        raise ConfigError(
            f"`optim.muon` needs matrices whose rows are sharded over one mesh axis, not {tensor.placements}"
        )
    return tensor.device_mesh.get_group(next(iter(shards))) if shards else None


# -- as a feature ------------------------------------------------------------------------------------------------------


def matrices_of(attachments: Attachments, settings: Muon) -> dict[str, Tensor]:
    """Return the parameters whose steps are orthogonalised, by name.

    Raises:
        ConfigError: no trained parameter qualifies.
    """
    trained = attachments.trained
    excluded = not_matrices(attachments.module) | {
        name for name in trained if any(fnmatchcase(name, pattern) for pattern in settings.adamw)
    }
    matrices = {name: tensor for name, tensor in trained.items() if tensor.ndim >= 2 and name not in excluded}
    if not matrices:
        raise ConfigError("`optim.muon` finds no matrix to train", hint="use [optim.adamw]")
    return matrices


def build_muon(attachments: Attachments, settings: Muon) -> None:
    """Attach Muon as the job's optimizer."""

    def build(parameters: Params) -> Optimizer:
        check_matched(settings.groups, attachments.trained)
        matrices = matrices_of(attachments, settings)
        rest = {name: tensor for name, tensor in attachments.trained.items() if name not in matrices}
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
            sharers=sharers(attachments) if settings.share_steps else None,
        )

    attachments.build_with(build)


def not_matrices(model: nn.Module) -> set[str]:
    """Return the names of weights with one row per token: embeddings, and linear layers with one output per row of an
    embedding.

    AdamW updates these weights (Jordan et al., 2024), because every row is the vector of one token and not a linear
    map.
    """
    modules = list(model.modules())
    embeddings = [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    vocabularies = {module.num_embeddings for module in embeddings}
    heads = [module for module in modules if isinstance(module, nn.Linear) and module.out_features in vocabularies]
    excluded = {id(module.weight) for module in (*embeddings, *heads)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in excluded}
