"""ZeRO's two collectives over a matrix of one row a rank; each sends (N - 1)/N of the matrix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import all_gather_single, reduce_scatter_single
from shoestring.core.trace import span

P = ParamSpec("P")
ACROSS = 1 << 19  # tag of messages across groups
CHUNK = 2**16  # elements that are added up at a time, so that they stay in the cache and their sum in float32 is small


class Collectives:
    """Collectives over one process group, which all ranks start in the same order. Without a group: one rank alone.

    Args:
        across: of the ranks that hold the same rows in other groups, over which means, flags and broadcasts go on.
    """

    def __init__(self, group: dist.ProcessGroup | None, across: Collectives | None = None) -> None:
        self.group, self.across = group, across
        self.size, self.rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
        self._sent = 0
        self.exposed = 0.0  # seconds that something waited for them

    @property
    def sent(self) -> int:
        """Bytes that have left this rank."""
        return self._sent + (self.across.sent if self.across is not None else 0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as exposed communication."""
        began = time.perf_counter()
        with span("exposed", "wait"):
            yield
        self.exposed += time.perf_counter() - began

    def start_mean(self, matrix: Tensor) -> Callable[[torch.dtype], Tensor]:
        """Start averaging this rank's row of all ranks' matrices; the part across groups begins with the wait.

        Args:
            matrix: (ranks, width); it must not change before the end.

        Returns:
            A function that waits and returns the mean, (width,), in the data type that it is given. Rows are added in
            float32 or wider, in the order of the ranks; NCCL adds by itself, in the matrix's type and its own order.
        """
        within = self._start_mean(matrix)
        if (across := self.across) is None:
            return within
        return lambda dtype: across.mean_of_whole(within(matrix.dtype), dtype)

    def mean_of_whole(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean of all ranks' tensors, (width,), the same bits on each; it waits.

        Each rank averages a row of it, so what is sent is an all-reduce's bytes in the tensor's own type.
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
        # Gloo's reduce-scatter is an all-reduce, which sends twice as much.
        received = torch.empty_like(matrix)
        work = dist.all_to_all_single(received, matrix, group=self.group, async_op=True)
        return _after(work, lambda dtype: mean_of_rows(received, dtype), matrix)

    def start_gather(self, matrix: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start filling the other ranks' rows of `matrix` with theirs, in place; returns a function that waits.

        Args:
            tag: a number of its own for each that is under way.
        """
        if self.group is None:
            return lambda: matrix
        self._sent += matrix.nbytes // self.size * (self.size - 1)
        if matrix.is_cuda:
            work = all_gather_single(matrix.view(-1), matrix[self.rank], group=self.group, async_op=True)
            return _after(work, lambda: matrix)
        # Gloo's all-gather holds a copy of all rows until its end. Messages arrive where they belong.
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
        """Start finding, for each of this rank's flags (uint8), whether any rank has it set."""
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
        """Give all ranks the first one's tensors; those of one type travel together."""
        tensors = list(tensors)
        if self.across is not None:
            self.across.broadcast(tensors)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_type.values() if self.group is not None else ():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(flat, group=self.group, group_src=0)
            for tensor, values in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def mean_of_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows added one after the other, in float32 or wider, and divided by their number; in another tensor."""
    mean = torch.empty(matrix.shape[1], dtype=dtype)
    for columns, target in zip(matrix.split(CHUNK, dim=1), mean.split(CHUNK), strict=True):
        total = columns[0].to(torch.promote_types(matrix.dtype, torch.float32), copy=True)
        for row in columns[1:]:
            total += row
        target.copy_(total.mul_(1 / len(matrix)))
    return mean


def _after(work: dist.Work | None, result: Callable[P, Tensor], *held: Tensor) -> Callable[P, Tensor]:
    """Wait for the work; `held` is what it reads until then."""
    assert work is not None

    def wait(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        work.wait()
        return result(*args, **kwargs)

    wait.__dict__["held"] = held
    return wait
