"""The peers, as their users attach them, and our coordinator with torch's arithmetic in it."""

# Without postponed annotations: torch compares those of a hook with its own types.
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring import comm
from shoestring._torch import GradBucket, foreach_copy_
from shoestring.comm.codecs.codec import Codec, Coding, ExchangeContext, Grads
from shoestring.comm.codecs.powersgd import PowerSGDCodec, average_tensors, orthogonalise


def bf16_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook, line by line but for its check that NCCL is there."""
    buffer = bucket.buffer()
    small = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def torch_powersgd(model: DistributedDataParallel, rank: int, start: int) -> None:
    """torch's PowerSGD hook; `start` is its start_powerSGD_iter: the steps before are plain all-reduces."""
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=start, min_compression_rate=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def has_epfml() -> bool:
    """Whether epfml's package is installed with code in it."""
    return find_spec("powersgd") is not None


class Epfml:
    """github.com/epfml/powersgd as its README attaches it, with clipping between the averages and the step.

    Raises:
        ImportError: the package is not installed; the wheel of that name on PyPI (0.0.2) holds no code.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, iterations: int) -> None:
        package: Any = import_module("powersgd")
        config = package.Config(
            rank=rank, min_compression_rate=2, num_iters_per_step=iterations, start_compressing_after_num_steps=0
        )
        self.parameters = list(parameters)
        self.aggregator = package.PowerSGD(self.parameters, config=config)

    def step(self, optimizer: Optimizer, clip: float) -> None:
        """What the package's optimizer_step does: its residuals stay behind as gradients, and are added to."""
        residuals = [parameter.grad for parameter in self.parameters]
        averages = self.aggregator.aggregate(residuals)
        for parameter, average in zip(self.parameters, averages, strict=True):
            parameter.grad = average
        nn.utils.clip_grad_norm_(self.parameters, clip)
        optimizer.step()
        for parameter, residual in zip(self.parameters, residuals, strict=True):
            parameter.grad = residual


class TorchArithmetic(PowerSGDCodec):
    """What torch's hook computes, for our coordinator: QR, a product a matrix, the residual of the global mean.

    After torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py: it clones the gradients, and computes the
    products of matrices of one shape in a batch.
    """

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        low = {name: grad.view(len(grad), -1) for name, grad in grads.items() if self._pays(grad)}
        whole = [grad for name, grad in grads.items() if name not in low]
        drawn = self.state.setdefault("Q", {})
        basis = [drawn[name] if name in drawn else self._drawn(name, grad) for name, grad in low.items()]
        M = [grad + self.get_state("residual", name, grad) for name, grad in low.items()]
        for Q in basis:
            Q.copy_(torch.linalg.qr(Q)[0])
        P = [each @ Q for each, Q in zip(M, basis, strict=True)]
        yield from average_tensors(P, whole)
        P = [torch.linalg.qr(each)[0] for each in P]
        Q = [each.t() @ left for each, left in zip(M, P, strict=True)]
        yield from average_tensors(Q, [])
        for (name, grad), each, left, right in zip(low.items(), M, P, Q, strict=True):
            torch.mm(left, right.t(), out=grad)
            torch.sub(each, grad, out=self.state["residual"][name])
            self.state.setdefault("Q", {})[name] = right

    def _drawn(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        return self._matrix(name, grad).basis.t().contiguous()


class TorchInBatches(PowerSGDCodec):
    """The same arithmetic for matrices of one shape at a time, as torch's hook has it with
    `batch_tensors_with_same_shape`; for ranks in lockstep on a GPU, where launching kernels takes longest.

    Bases are orthonormalised as ours are, which changes neither the spaces that they span nor the averages.
    State, by shape: "residual" (matrices, n, m), and "Q" (matrices, m, r).
    """

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        shapes: dict[str, list[torch.Tensor]] = {}
        whole = []
        for grad in grads.values():
            if context.step >= self.start and self._pays(grad):
                low = grad.view(len(grad), -1)
                shapes.setdefault(f"{low.shape[0]}x{low.shape[1]}", []).append(low)
            else:
                whole.append(grad)
        if not shapes:
            yield from average_tensors([], whole)
            return
        M = {shape: torch.stack(alike) for shape, alike in shapes.items()}
        residual, basis = self.state.setdefault("residual", {}), self.state.setdefault("Q", {})
        for shape, each in M.items():
            if shape in residual:
                each += residual[shape]
            if shape not in basis:
                drawn = torch.randn(len(each), each.shape[2], self.rank, generator=torch.Generator().manual_seed(0))
                basis[shape] = drawn.to(each.device)
        orthogonalise([basis[shape] for shape in M])
        P = {shape: each @ basis[shape] for shape, each in M.items()}
        yield from average_tensors(list(P.values()), whole)
        orthogonalise(list(P.values()))
        for shape, each in M.items():
            basis[shape] = each.mT @ P[shape]
        yield from average_tensors([basis[shape] for shape in M], [])
        for shape, each in M.items():
            average = P[shape] @ basis[shape].mT
            residual[shape] = each.sub_(average)
            foreach_copy_(shapes[shape], list(average))


@dataclass(frozen=True, kw_only=True)
class TorchInOurs(comm.PowerSGD):
    """Torch's arithmetic in our coordinator: what is left between it and our PowerSGD are the kernels."""

    def make_codec(self) -> Codec:
        return TorchArithmetic(self.rank)
