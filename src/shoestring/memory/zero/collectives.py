"""ZeRO's collectives over a matrix with a row for each of N ranks: a mean (reduce-scatter) and an all-gather.

In each collective, every rank sends (N - 1)/N of the matrix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import all_gather_single, reduce_scatter_single
from shoestring.collectives import bytes_of
from shoestring.core.trace import span

P = ParamSpec("P")
ACROSS = 1 << 19  # tag of messages between groups
CHUNK = 2**16  # number of elements summed at a time, so that they and their float32 sum fit in the CPU's cache


class Collectives:
    """Collectives over a process group, which is None for one rank. All ranks must start collectives in the same order.

    Args:
        across: collectives among the ranks that hold the same row in different groups; means, flags and broadcasts
            include these ranks. None if there is only one group.
    """

    def __init__(self, group: dist.ProcessGroup | None, across: Collectives | None = None) -> None:
        self.group, self.across = group, across
        self.size, self.rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
        self._sent = 0
        self.exposed = 0.0  # exposed communication time in seconds

    @property
    def sent(self) -> int:
        """Bytes sent by this rank so far."""
        return self._sent + (self.across.sent if self.across is not None else 0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as exposed communication."""
        began = time.perf_counter()
        with span("exposed", "wait"):
            yield
        self.exposed += time.perf_counter() - began

    def start_mean(self, matrix: Tensor) -> Callable[[torch.dtype], Tensor]:
        """Start to average this rank's row over all ranks; the exchange between groups starts when the caller waits.

        Args:
            matrix: (ranks, width); must not be changed until the mean is returned.

        Returns:
            A function (dtype) that waits, and returns the mean, (width,), in this data type. Rows are added in float32
            or wider, in the order of the ranks; NCCL adds in the matrix's data type and in its own order.
        """
        within = self._start_mean(matrix)
        if (across := self.across) is None:
            return within
        return lambda dtype: across.mean_of_whole(within(matrix.dtype), dtype)

    def mean_of_whole(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the mean of all ranks' tensors, bit-identical on every rank; waits for the result.

        Each rank averages one part of the tensor, so a rank sends as many bytes as in an all-reduce in the tensor's
        data type.
        """
        width = -(-tensor.numel() // self.size)
        matrix = tensor.new_zeros(self.size * width)
        matrix[: tensor.numel()] = tensor
        matrix = matrix.view(self.size, width)
        matrix[self.rank] = self.start_mean(matrix)(dtype).to(matrix.dtype)
        return self.start_gather(matrix, ACROSS)().view(-1)[: tensor.numel()].to(dtype)

    def _start_mean(self, matrix: Tensor) -> Callable[[torch.dtype], Tensor]:
        if self.group is None:
            return lambda dtype: matrix[0].to(dtype)
        self._sent += matrix.nbytes // self.size * (self.size - 1)
        if matrix.is_cuda:
            total = torch.empty_like(matrix[0])
            work = reduce_scatter_single(total, matrix.view(-1), group=self.group, async_op=True)
            return _after(work, lambda dtype: total.mul_(1 / self.size).to(dtype))
        # All-to-all instead of reduce-scatter, which Gloo implements by an all-reduce that sends twice as much.
        received = torch.empty_like(matrix)
        work = dist.all_to_all_single(received, matrix, group=self.group, async_op=True)
        return _after(work, lambda dtype: mean_of_rows(received, dtype), matrix)

    def start_gather(self, matrix: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start an all-gather in place: every rank's own row of `matrix` is sent to all other ranks.

        Args:
            tag: distinguishes the messages of all-gathers that run at the same time.

        Returns:
            A function that waits, and returns the matrix.
        """
        if self.group is None:
            return lambda: matrix
        self._sent += matrix.nbytes // self.size * (self.size - 1)
        if matrix.is_cuda:
            work = all_gather_single(matrix.view(-1), matrix[self.rank], group=self.group, async_op=True)
            return _after(work, lambda: matrix)
        # Messages arrive in place, whereas Gloo's all-gather holds a copy of all rows until it ends.
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [dist.irecv(matrix[rank], group=self.group, group_src=rank, tag=tag) for rank in reversed(others)]
        works += [dist.isend(matrix[self.rank], group=self.group, group_dst=rank, tag=tag) for rank in others]

        def wait() -> Tensor:
            for work in works:
                assert work is not None
                work.wait()
            return matrix

        return wait

    def start_any(self, flags: Tensor) -> Callable[[], Tensor]:
        """Start a logical OR over all ranks' flags (uint8); return a function that waits for and returns the result."""
        matrix = flags.expand(self.size, -1).contiguous()
        if self.group is None:
            return lambda: flags
        self._sent += flags.nbytes * (self.size - 1)
        received = torch.empty_like(matrix)
        work = dist.all_to_all_single(received, matrix, group=self.group, async_op=True)
        across = self.across
        if across is None:
            return _after(work, lambda: received.amax(0), matrix)
        return _after(work, lambda: across.start_any(received.amax(0))(), matrix)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast the first rank's tensors, in place, as one message."""
        tensors = [tensor for tensor in tensors if tensor.numel()]
        if self.across is not None:
            self.across.broadcast(tensors)
        if self.group is None or not tensors:
            return
        contents = [bytes_of(tensor) for tensor in tensors]
        flat = torch.cat(contents)
        dist.broadcast(flat, group=self.group, group_src=0)
        for tensor, content in zip(tensors, flat.split([len(content) for content in contents]), strict=True):
            # `clone`, because a view of another type needs aligned memory
            tensor.copy_(content.clone().view(tensor.dtype).view(tensor.shape))


def mean_of_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the mean of the rows as a new tensor; rows are added in order, in float32 or wider."""
    mean = torch.empty(matrix.shape[1], dtype=dtype)
    for columns, target in zip(matrix.split(CHUNK, dim=1), mean.split(CHUNK), strict=True):
        total = columns[0].to(torch.promote_types(matrix.dtype, torch.float32), copy=True)
        for row in columns[1:]:
            total += row
        target.copy_(total.mul_(1 / len(matrix)))
    return mean


def _after(work: dist.Work | None, result: Callable[P, Tensor], *held: Tensor) -> Callable[P, Tensor]:
    """Return a function that waits for the work and returns `result(…)`; holds references to tensors in use."""
    assert work is not None

    def wait(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        work.wait()
        return result(*args, **kwargs)

    wait.__dict__["held"] = held
    return wait
