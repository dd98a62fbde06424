"""Carries out codecs' requests: all requests of one yield are sent in at most one collective of each kind."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import groupby
from time import perf_counter
from typing import Self, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoestring._torch import all_gather_single, foreach_unscale_, name_groups_from, timeout_of
from shoestring.comm.codecs.codec import (
    AllGather,
    AllToAll,
    Codec,
    ExchangeContext,
    Grads,
    Mean,
    Request,
    advance,
    identity,
)
from shoestring.comm.codecs.traffic import ring_bytes
from shoestring.comm.codecs.verdict import ALWAYS, ExchangeVerdict
from shoestring.core.errors import ShoestringError
from shoestring.core.trace import span

T = TypeVar("T")
Answer = Callable[[], list[Tensor]]
Finish = Callable[[], Tensor | None]
Stages = Generator[bool, None, bool | Tensor]
SMALL = 2**19  # bytes below which a message is latency-bound
FIRST = torch.finfo(torch.float32).max  # bound of a first stage's results; ranks agree only on whether these are finite
LATER = 2.0**100  # bound of later stages' results, equal on all ranks; decoding values below it cannot overflow
ALIGNMENT = 16  # in bytes; packed tensors are aligned so that they can be viewed as any dtype


class StartedCollective:
    """A collective that has been started and may not have finished.

    In the trace, the collective's span begins when the collective starts and ends when `finish` returns, on the thread
    that calls `finish`. In a profile, the span begins at the call of `finish`.
    """

    def __init__(self, name: str, sent: float, finish: Finish, dtype: torch.dtype | None = None) -> None:
        self.name, self.sent, self.dtype, self.began = name, int(sent), dtype, perf_counter()
        self._finish = finish

    def finish(self, ranks: int) -> Tensor | None:
        """Wait for the collective. Returns a flag (1,), nonzero if the result is not finite; None if the result is
        unchecked."""
        with (
            span(self.name, "wire", self.sent) as work,
            naming_failures(f"{self.name} of {self.sent} bytes between {ranks} ranks"),
        ):
            work.began = self.began
            return self._finish()


class Answers(list[Tensor]):
    """The results of one stage's requests; some results have already been checked for non-finite entries.

    Args:
        unchecked: results that have not been checked.
        nonfinite: a flag (1,) for each checked collective, nonzero if an entry is not finite.
    """

    def __init__(self, answers: Sequence[Tensor], unchecked: Sequence[Tensor], nonfinite: Sequence[Tensor]) -> None:
        super().__init__(answers)
        self.unchecked, self.nonfinite = unchecked, nonfinite


class Wire:
    """Runs codecs on a separate process group with the ranks of `group`, so that no other collectives interfere.

    Collectives of a wire must be started from one thread, and in the same order on all ranks. All ranks of the world
    must create a wire at the same time, each for its own group.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.rank, self.size, self.device = 0, 1, device
        self.sent = 0  # bytes that this rank has sent, counted as ring collectives
        self.guards_on_cpu = False  # whether to use `Codec.guards` on a CPU too, where the host could check at once
        self.group = None
        if group is not None:
            self.group = duplicate_group(group, device)
            self.rank, self.size = dist.get_rank(self.group), self.group.size()

    @property
    def timeout(self) -> float:
        """Timeout of a collective in seconds."""
        return 0.0 if self.group is None else timeout_of(self.group).total_seconds()

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        codec: Codec,
        grads: Grads,
        step: int,
        sum_over_shards: Callable[[Tensor], Tensor] = identity,
        keep: Callable[[list[Tensor]], object] | None = None,
    ) -> bool | Tensor:
        """Run one whole exchange, after which `grads` are averages over ranks.

        Args:
            keep: called with the results of each stage's requests; `Codec.decode_average` takes the results of the last
                stage.

        Returns:
            True; or False, with NaN in all `grads`, if a gradient of any rank was not finite. If the codec handles
            failures itself (see `Codec.guards`), the value is a bool tensor on the device, so that the host does not
            wait for the device.
        """
        return exhaust(self.stages(codec, grads, step, sum_over_shards, keep))

    def stages(
        self,
        codec: Codec,
        grads: Grads,
        step: int,
        sum_over_shards: Callable[[Tensor], Tensor] = identity,
        keep: Callable[[list[Tensor]], object] | None = None,
    ) -> Stages:
        """Does what `run` does, as a generator that yields while the collectives of a stage are in progress, and may be
        continued in another thread.

        Yields:
            Whether the generator, once continued, will start further collectives while it waits for the results of this
            stage.
        """
        guarded = (self.device.type != "cpu" or self.guards_on_cpu) and codec.guards(grads)
        verdict = ExchangeVerdict() if guarded else ALWAYS
        context = ExchangeContext(self.rank, self.size, step, sum_over_shards, verdict)
        with closing(codec.code(grads, context)) as coding:
            with span("encode", "compute"):
                requests = advance(coding)
            largest = FIRST
            while requests is not None:
                wait = self.start(requests)
                yield self._starts_more(requests)
                answers = wait()
                with span("code", "compute"):
                    fine = find_finite(answers, largest)
                    if guarded:
                        verdict.fine = fine if verdict.fine is None else verdict.fine & fine
                    elif not fine:  # waits for the device
                        coding.close()  # closed first, because the codec may need the gradients to restore its state
                        for grad in grads.values():
                            grad.fill_(torch.nan)
                        return False
                    largest = LATER
                    if keep is not None:  # averages may be views of gradients, which decoding overwrites
                        memory = {grad.untyped_storage().data_ptr() for grad in grads.values()}
                        keep([a.clone() if a.untyped_storage().data_ptr() in memory else a for a in answers])
                    requests = advance(coding, answers)
        return True if verdict.fine is None else verdict.fine

    def start(self, requests: Sequence[Request]) -> Answer:
        """Start the collectives of all requests.

        Returns:
            A function that waits for the collectives and returns one result for each request.

        Both this method and the returned function raise torch's RuntimeError if a rank is lost or late.
        """
        if self.group is None and self.size > 1:
            raise ShoestringError("an exchange between ranks was started after its job was closed")
        answers: list[Tensor | None] = [None] * len(requests)
        collectives = [*self._start_means(requests, answers), *self._start_bytes(requests, answers)]
        self.sent += sum(collective.sent for collective in collectives)

        def wait() -> list[Tensor]:
            finished = [(collective, collective.finish(self.size)) for collective in collectives]
            nonfinite = [flag for _, flag in finished if flag is not None]
            checked = {collective.dtype for collective, flag in finished if flag is not None}
            pairs = [(answer, request) for answer, request in zip(answers, requests, strict=True) if answer is not None]
            unchecked = [
                answer for answer, request in pairs if not (isinstance(request, Mean) and answer.dtype in checked)
            ]
            return Answers([answer for answer, _ in pairs], unchecked, nonfinite)

        return wait

    def _starts_more(self, requests: Sequence[Request]) -> bool:
        """Whether waiting for the results of the requests starts further collectives, such as the second all-to-all of
        a small mean."""
        if self.group is None:
            return False
        nbytes: dict[torch.dtype, int] = {}
        for request in requests:
            if isinstance(request, Mean):
                nbytes[request.tensor.dtype] = nbytes.get(request.tensor.dtype, 0) + request.tensor.nbytes
        return any(self._is_small(total) for total in nbytes.values())

    def _start_means(self, requests: Sequence[Request], answers: list[Tensor | None]) -> Iterator[StartedCollective]:
        means = [(index, request.tensor) for index, request in enumerate(requests) if isinstance(request, Mean)]
        # One collective for each data type; types are sorted, so that the order is the same on all ranks.
        for _, group in groupby(sorted(means, key=lambda pair: str(pair[1].dtype)), key=lambda pair: pair[1].dtype):
            indices, tensors = zip(*group, strict=True)
            whole = len(tensors) == 1 and tensors[0].is_contiguous()
            flat = tensors[0].view(-1) if whole else torch.cat([tensor.reshape(-1) for tensor in tensors])
            for index, tensor, part in zip(indices, tensors, flat.split([t.numel() for t in tensors]), strict=True):
                answers[index] = part.view(tensor.shape)
            if self.group is not None:
                start = self._start_scattered_mean if self._is_small(flat.nbytes) else self._start_ring_mean
                nbytes = ring_bytes("all-reduce", flat.nbytes, self.size)
                yield StartedCollective("all-reduce", nbytes, start(flat), flat.dtype)

    def _is_small(self, nbytes: int) -> bool:
        """Whether a message is latency-bound on Gloo, whose ring then takes twice as long as sending to all ranks at
        once."""
        return self.device.type == "cpu" and nbytes <= SMALL

    def _start_scattered_mean(self, flat: Tensor) -> Finish:
        """Average `flat` by two all-to-alls: rank r averages the r-th shard, and sends it to all ranks."""
        shards = F.pad(flat, (0, -flat.numel() % self.size)).view(self.size, -1)
        received = torch.empty_like(shards)
        work = dist.all_to_all_single(received, shards, group=self.group, async_op=True)
        assert work is not None

        def finish() -> Tensor | None:
            work.wait()
            own = received.mean(0, dtype=torch.promote_types(received.dtype, torch.float32)).to(received.dtype)
            dist.all_to_all_single(received, own.expand_as(shards).contiguous(), group=self.group)
            flat.copy_(received.view(-1)[: flat.numel()])
            return None

        return finish

    def _start_ring_mean(self, flat: Tensor) -> Finish:
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None

        def finish() -> Tensor:
            work.wait()
            nonfinite = torch.zeros(1, device=flat.device)
            # This divides by the number of ranks and checks for non-finite entries, in one pass over memory.
            foreach_unscale_([flat], nonfinite, torch.full((), 1 / self.size, device=flat.device))
            return nonfinite

        return finish

    def _start_bytes(self, requests: Sequence[Request], answers: list[Tensor | None]) -> Iterator[StartedCollective]:
        """Start the all-gather and the all-to-all. Both collectives send plain bytes for any data type, because they
        only move data."""
        for kind in (AllGather, AllToAll):
            asked = [(index, request.tensor) for index, request in enumerate(requests) if isinstance(request, kind)]
            if not asked:
                continue
            rows = 1 if kind is AllGather else self.size
            padded = []  # tensors (rows, bytes), padded so that each result starts at a multiple of ALIGNMENT
            for _, tensor in asked:
                flat = tensor.contiguous().view(rows, -1)
                flat = flat.view(torch.uint8) if flat.numel() else flat.new_empty(rows, 0, dtype=torch.uint8)
                padded.append(F.pad(flat, (0, -flat.shape[1] % ALIGNMENT)))
            sent = torch.cat(padded, dim=1)
            padded.clear()  # frees the copies before memory for the results is allocated
            received = torch.empty(self.size, sent.shape[1], dtype=torch.uint8, device=sent.device)
            start = 0
            for index, tensor in asked:
                shape = tensor.shape if kind is AllGather else tensor.shape[1:]
                length = shape.numel() * tensor.element_size()
                answer = received[:, start : start + length].view(tensor.dtype).unflatten(1, shape or (1,))
                answers[index] = answer if shape else answer[:, 0]
                start += length + -length % ALIGNMENT
            if self.group is None:
                received.copy_(sent)
                continue
            if kind is AllGather and not self._is_small(sent.nbytes):
                work = all_gather_single(received.view(-1), sent.view(-1), group=self.group, async_op=True)
            else:
                rank_rows = sent.expand_as(received).contiguous()  # an all-gather sends the same row to every rank
                work = dist.all_to_all_single(received, rank_rows, group=self.group, async_op=True)
            assert work is not None
            nbytes = ring_bytes(kind.collective, sent.nbytes, self.size)
            yield StartedCollective(kind.collective, nbytes, partial(_wait_for, work))


def duplicate_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Create another process group with the same ranks. Every rank of the world must call this, each with its own
    `group`.

    The new group has the timeout of the world's group; groups of a device mesh have torch's default of half an hour.
    """
    ranks, timeout = dist.get_process_group_ranks(group), timeout_of(dist.distributed_c10d._get_default_group())
    rows = torch.empty(dist.get_world_size(), 2, dtype=torch.int64, device=device)
    with naming_failures("creation of the process groups of an exchange, by all ranks at once"):
        all_gather_single(rows.view(-1), torch.tensor([ranks[0], secrets.randbits(32)], device=device))
    members: dict[int, list[int]] = {}
    for rank, first in enumerate(rows[:, 0].tolist()):
        members.setdefault(first, []).append(rank)
    # A store that outlives former processes still holds the addresses of their groups, so new groups need new names.
    name_groups_from(int(rows[0, 1]) + 1_000_000)
    # Every rank creates every group. Torch could create only the rank's own group (use_local_synchronization), but
    # would then reuse the name of a destroyed group.
    with naming_failures("connection of the process groups of an exchange"):
        groups = {first: dist.new_group(same_group, timeout) for first, same_group in members.items()}
        own = groups[ranks[0]]
        assert isinstance(own, dist.ProcessGroup)
        dist.barrier(own)  # a rank that closes its group early would cut off ranks that still connect
    return own


@contextmanager
def naming_failures(what: str) -> Iterator[None]:
    """Context that prefixes `what` to the error of a collective that fails because a rank is lost or late."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise type(error)(f"{what}: {error}") from error


def _wait_for(work: dist.Work) -> None:
    work.wait()


def exhaust(stages: Generator[bool, None, T]) -> T:
    """Run a generator to its end, and return its value."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


def find_finite(answers: Sequence[Tensor], largest: float = FIRST) -> Tensor:
    """Whether all floating-point entries are at most `largest` in magnitude, and not NaN; a bool tensor on the
    device."""
    tensors, nonfinite = answers, []
    if isinstance(answers, Answers) and largest == FIRST:
        tensors, nonfinite = answers.unchecked, answers.nonfinite
    bounds = [bound for t in tensors if t.is_floating_point() and t.numel() for bound in t.aminmax()]
    small = [torch.stack([bound.float() for bound in bounds]).abs() <= largest] if bounds else []
    checks = [*small, *(flag == 0 for flag in nonfinite)]
    device = answers[0].device if answers else None
    return torch.cat(checks).all() if checks else torch.ones((), dtype=torch.bool, device=device)


def all_finite(tensors: Sequence[Tensor], largest: float = FIRST) -> bool:
    """The result of `find_finite` as a Python bool; waits for the device."""
    return bool(find_finite(tensors, largest))
