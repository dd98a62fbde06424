"""Replicas that train on their own, and an outer optimizer that follows the mean of how far they came.

After H steps every replica sends Delta = theta_old - theta. The outer optimizer treats the mean of these
pseudo-gradients as a gradient of theta_old, and all replicas go on from where that takes it (DiLoCo, arXiv 2311.08105).
Streaming (arXiv 2501.18512) does so for one fragment of the layers after the other, and lets the replicas go on while
an exchange travels: `delay` steps after it began, theta = alpha theta + (1 - alpha) theta_new.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_
from shoestring.comm.codecs.codec import AllGather, Codec, Grads
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.traffic import ring_bytes
from shoestring.comm.exchange.replicas import local_shard
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.wire import Wire, naming_failures
from shoestring.comm.exchange.worker import Worker, WorkerTask
from shoestring.comm.local.fragments import Fragment, assign_fragments
from shoestring.core.errors import NonFiniteError
from shoestring.core.feature import DATA, HOSTS
from shoestring.core.job import Job
from shoestring.core.trace import span

if TYPE_CHECKING:
    from shoestring.comm.settings.local_steps import LocalSteps

LOWER = "the last save is good; resume with a lower learning rate or with [optim.clip]"

# What a rank tells all others with every exchange, as columns of one row.
ASKED, FAILED, BROKEN, TOKENS = range(4)  # to stop; its loss, at this step; its weights; targets since it last told


# -- exchanges --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PendingMerge:
    """Fragments whose pseudo-gradients travel; those become means once `told`, what all ranks said, is there."""

    fragments: list[int]
    due: int  # the step after which they are merged
    plain: bool  # averaged, without the outer optimizer
    means: list[Tensor]
    buffers: list[Tensor]
    told: WorkerTask[Tensor]


class ReplicaChannel:
    """Exchanges on a thread of its own, in the order in which they were asked for."""

    def __init__(self, job: Job, sharded: bool) -> None:
        world = job.world
        # Where a replica is sharded over the ranks of its host, each has its own part to exchange with other hosts.
        self.route = Route(world, (HOSTS,) if sharded else DATA, torus=True)
        spare = self.route.outer.size == world.ranks_over(DATA)
        self.council = self.route.outer if spare else Wire(world.group(DATA), world.device)
        self.worker = Worker("shoestring-outer", world.device)

    def close(self) -> None:
        if self.worker.close():
            self.route.close()
            self.council.close()

    @property
    def sent(self) -> int:
        wires = {self.route.outer, self.council}
        return sum(wire.sent for wire in wires)

    def send(self, loads: Sequence[tuple[Codec, Grads]], row: Tensor, step: int) -> WorkerTask[Tensor]:
        """Replace tensors by their means over the replicas, later; the result is all ranks' rows, on the CPU."""
        collectives = 2 + sum(2 * codec.stages + 2 for codec, _ in loads)
        task = WorkerTask[Tensor](
            f"the merge of the replicas that began at step {step}", collectives * self.council.timeout
        )
        return self.worker.submit(task, partial(self._exchange, loads, row, step, task.what))

    def _exchange(self, loads: Sequence[tuple[Codec, Grads]], row: Tensor, step: int, what: str) -> Tensor:
        with naming_failures(what):
            (rows,) = self.council.start([AllGather(row)])()
            rows = rows.cpu()
            if not any_failed(rows):  # what is not finite must not enter a residual
                for codec, grads in loads:
                    held = {name: grad for name, grad in grads.items() if grad.numel()}
                    if held and not self.route.run(codec, held, step):
                        raise NonFiniteError(f"the mean of the replicas' steps overflowed at step {step}", hint=LOWER)
            return rows


class OuterOptimizer:
    """The outer optimizer of one rank."""

    def __init__(self, job: Job, settings: LocalSteps) -> None:
        self.job, self.settings = job, settings
        self.sharded = job.engine == "fsdp" and settings.replica == "host"
        self.link = ReplicaChannel(job, self.sharded)
        self.codec, self.dense = settings.make_codec(), DenseCodec()
        parameters = dict(job.module.named_parameters())
        groups = assign_fragments(job.module, settings.fragments, settings.layout)
        momentum = settings.outer[1] > 0
        with torch.no_grad():
            self.fragments = [
                Fragment({name: parameters[name] for name in names}, settings.every * (i + 1) // len(groups), momentum)
                for i, names in enumerate(groups)
            ]
        persistent = job.module.state_dict(keep_vars=True)
        self.buffers = [b for n, b in job.module.named_buffers() if n in persistent and b.is_floating_point()]
        self.flights: list[PendingMerge] = []
        self.asked = self.agreed = False  # to stop: by this rank; by all, at a merge
        self.error: NonFiniteError | None = None
        self.failed = 0  # the step of that
        self.told = job.progress.tokens  # when this rank last told how many it has seen
        self.meter = _MergeMetrics(job, settings, self.link)

    def close(self) -> None:
        self.link.close()

    def refuse(self, error: NonFiniteError) -> None:
        """Instead of ending alone: go on without steps of the optimizer until all replicas meet, and end together."""
        if self.error is None:
            self.error, self.failed = error, self.job.progress.step + 1

    @torch.no_grad()
    def after_step(self) -> None:
        """Work for Phase.OUTER."""
        step, settings = self.job.progress.step + 1, self.settings
        self.asked |= self.job.stopping
        late = self._land([flight for flight in self.flights if flight.due <= step])
        merged: list[int] = []
        level = self.job.progress.last or step <= settings.start
        due = [i for i, each in enumerate(self.fragments) if (step - each.phase) % settings.every == 0]
        if due and not level and not self.agreed:
            self._send(due, step, step + settings.delay)
            if not settings.delay:
                merged = self._land(self.flights)
        if level or self.agreed:
            self._level(step, late, merged)
        self.job.stopping = self.agreed
        self.meter.read()

    def _level(self, step: int, late: Sequence[int], merged: Sequence[int]) -> None:
        """Merge what replicas have done since they last sent it, so that all are equal and no step is lost.

        Args:
            late: fragments whose outer step was made at this step, from an exchange that began before. What replicas
                did meanwhile is averaged: the outer optimizer's velocity must not move them twice.
            merged: fragments that were sent and merged at this step.
        """
        late = [*late, *self._land(self.flights)]
        rest = [i for i in range(len(self.fragments)) if i not in late and i not in merged]
        for fragments, plain in ((rest, step <= self.settings.start), (late, True)):
            if fragments:
                self._send(fragments, step, step, plain=plain)
        self._land(self.flights)
        for fragment in self.fragments:
            fragment.adopt()

    def _send(self, fragments: list[int], step: int, due: int, *, plain: bool = False) -> None:
        means = [self.fragments[i].behind() for i in fragments]
        buffers = [buffer.clone() for buffer in self.buffers] if 0 in fragments else []
        grads: Grads = {}
        for i, mean in zip(fragments, means, strict=True):
            grads |= self.fragments[i].named(mean)
        loads = [(self.dense if plain else self.codec, grads), (self.dense, number_tensors(buffers))]
        told = self.link.send(loads, self._row(means), step)
        self.flights.append(PendingMerge(fragments, due, plain, means, buffers, told))

    def _row(self, means: Sequence[Tensor]) -> Tensor:
        """What this rank tells; read by others only, so that an accelerator is not waited for."""
        tokens = self.job.progress.tokens
        said = [self.asked, self.failed, 0, tokens - self.told]
        row = torch.tensor(said, dtype=torch.float64, device=means[0].device)
        row[BROKEN] = (~torch.stack([mean.isfinite().all() for mean in means]).all()).double()
        self.told = tokens
        return row

    def _land(self, flights: Sequence[PendingMerge]) -> list[int]:
        """Wait for flights, and merge what they bring; the fragments that were merged."""
        landed: list[int] = []
        for flight in list(flights):
            with self.meter.exposed():
                self._judge(flight.told.result())
            self.flights.remove(flight)
            outer = (1.0, 0.0, False) if flight.plain else self.settings.outer
            with span("outer", "compute"):
                for i, mean in zip(flight.fragments, flight.means, strict=True):
                    self.fragments[i].advance(mean, *outer)
                    self.fragments[i].adopt(self.settings.alpha if self.settings.delay else 0.0)
            if flight.buffers:
                foreach_copy_(self.buffers, flight.buffers)
            landed += flight.fragments
        return landed

    def _judge(self, rows: Tensor) -> None:
        """End everywhere where a replica is lost; take note of votes to stop, and of what the others have seen.

        Raises:
            NonFiniteError: on all ranks alike, but that one whose loss it was gives its own error.
        """
        if self.error is not None and any_failed(rows):
            raise self.error
        for rank, row in enumerate(rows.tolist()):
            if row[FAILED]:
                raise NonFiniteError(f"rank {rank} had no finite loss at step {row[FAILED]:.0f}", hint=LOWER)
            if row[BROKEN]:
                raise NonFiniteError(f"the weights of rank {rank} are not finite", hint=LOWER)
        self.agreed |= bool(rows[:, ASKED].any())
        world = self.job.world
        share = world.ranks_over(self.settings.over) / world.ranks_over(DATA)
        others = round(float(rows[:, TOKENS].sum()) * share - float(rows[world.index_over(DATA), TOKENS]))
        self.job.progress.tokens += others
        self.told += others


def any_failed(rows: Tensor) -> bool:
    return bool(rows[:, [FAILED, BROKEN]].any())


def number_tensors(tensors: Sequence[Tensor]) -> Grads:
    """Tensors that need no names, for a codec without state."""
    return {f"{index}": tensor for index, tensor in enumerate(tensors)}


class _MergeMetrics:
    """The numbers of a step and of the run: bytes sent, what they would have been, and time that nothing hid."""

    def __init__(self, job: Job, settings: LocalSteps, link: ReplicaChannel) -> None:
        self.job, self.link = job, link
        self.before, self.waited = link.sent, 0.0
        replicas = job.world.ranks_over(settings.over)
        whole = sum(local_shard(parameter).nbytes for parameter in job.module.parameters() if parameter.requires_grad)
        zeros = dict.fromkeys(("outer_bytes", "outer_steps", "outer_syncs", "outer_exposed"), 0.0)
        job.trace.facts |= {**zeros, "outer_without": ring_bytes("all-reduce", whole, replicas)}

    @contextmanager
    def exposed(self) -> Iterator[None]:
        began = time.perf_counter()
        with span("exposed", "wait"):
            yield
        self.waited += time.perf_counter() - began
        self.job.trace.facts["outer_syncs"] += 1

    def read(self) -> None:
        sent, facts = self.link.sent, self.job.trace.facts
        self.job.numbers |= {"wire_mb": (sent - self.before) / 1e6, "exposed_seconds": self.waited}
        facts["outer_bytes"] += sent - self.before
        facts["outer_exposed"] += self.waited
        facts["outer_steps"] += 1
        self.before, self.waited = sent, 0.0
