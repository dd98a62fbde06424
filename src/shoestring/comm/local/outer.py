"""Replicas that train on their own, and an outer optimizer that steps along their mean change.

After H steps every replica sends Delta = theta_old - theta. The outer optimizer treats the mean of these
pseudo-gradients as a gradient of theta_old, and all replicas continue from the result (DiLoCo, arXiv 2311.08105).
In the first `start` steps gradients are averaged instead, which is worth more while the loss falls fast (post-local
SGD, Lin et al., arXiv 1808.07217): weights and optimizer state stay equal without being exchanged.
Streaming (arXiv 2501.18512) does so for one fragment of the layers after the other, and overlaps each exchange with
training: `delay` steps after it began, theta = alpha theta + (1 - alpha) theta_new. That undoes a part of those steps.
By default nothing is undone: a replica moves by what the merge makes of the weights that it had sent,
theta = theta + theta_new - theta_sent (as delayed averaging does, DaSGD, arXiv 2006.00441).
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
from shoestring.comm.exchange.coordinator import refuse_added
from shoestring.comm.exchange.replicas import local_shard
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.wire import Wire, all_finite, find_finite, naming_failures
from shoestring.comm.exchange.worker import Worker, WorkerTask
from shoestring.comm.local.fragments import FlatPool, Fragment, assign_fragments
from shoestring.comm.local.schedule import MergeSchedule
from shoestring.comm.local.second_moment import SecondMoments
from shoestring.core.errors import NonFiniteError
from shoestring.core.feature import DATA, HOSTS, Phase
from shoestring.core.job import Job
from shoestring.core.trace import span

if TYPE_CHECKING:
    from shoestring.comm.settings.local_steps import LocalSteps

LOWER = "the last checkpoint is usable; resume with a lower learning rate or with [optim.clip]"

# Columns of the row that every rank sends with each exchange: its vote to stop; the step of its non-finite loss, or 0;
# whether its weights are not finite; its target tokens since the last row.
ASKED, FAILED, BROKEN, TOKENS = range(4)


# -- exchanges --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PendingMerge:
    """Fragments whose pseudo-gradients are being exchanged; they are means once `status`, all ranks' rows, is there."""

    fragments: list[int]
    due: int  # the step after which they are merged
    plain: bool  # averaged without the outer optimizer
    means: list[Tensor]
    buffers: list[Tensor]
    status: WorkerTask[Tensor]
    sent: list[Tensor]
    """This replica's weights when the exchange began, where they are needed: theta_sent."""


class ReplicaChannel:
    """A thread that runs the exchanges between replicas, in the order of their submission."""

    def __init__(self, job: Job, sharded: bool) -> None:
        world = job.world
        # Where a replica is sharded over the ranks of its host, each rank exchanges its own shard with the other hosts.
        self.route = Route(world, (HOSTS,) if sharded else DATA, torus=True)
        reuse = self.route.outer.size == world.ranks_over(DATA)
        self.status_wire = self.route.outer if reuse else Wire(world.group(DATA), world.device)
        self.worker = Worker("shoestring-outer", world.device)

    def close(self) -> None:
        if self.worker.close():
            self.route.close()
            self.status_wire.close()

    @property
    def sent(self) -> int:
        wires = {self.route.outer, self.status_wire}
        return sum(wire.sent for wire in wires)

    def send(self, loads: Sequence[tuple[Codec, Grads]], row: Tensor, step: int) -> WorkerTask[Tensor]:
        """Replace tensors by their means over the replicas, later; the result is all ranks' rows, on the CPU."""
        collectives = 2 + sum(2 * codec.stages + 2 for codec, _ in loads)
        task = WorkerTask[Tensor](
            f"the merge of the replicas that began at step {step}", collectives * self.status_wire.timeout
        )
        return self.worker.submit(task, partial(self._exchange, loads, row, step, task.what))

    def _exchange(self, loads: Sequence[tuple[Codec, Grads]], row: Tensor, step: int, what: str) -> Tensor:
        with naming_failures(what):
            (rows,) = self.status_wire.start([AllGather(row)])()
            rows = rows.cpu()
            if not any_failed(rows):  # non-finite entries must not enter a residual
                for codec, grads in loads:
                    nonempty = {name: grad for name, grad in grads.items() if grad.numel()}
                    if nonempty and not self.route.run(codec, nonempty, step):
                        raise NonFiniteError(f"the mean of the replicas' steps overflowed at step {step}", hint=LOWER)
            return rows


class OuterOptimizer:
    """The outer optimizer of one rank."""

    def __init__(self, job: Job, settings: LocalSteps) -> None:
        self.job, self.settings = job, settings
        self.sharded = job.engine == "fsdp" and settings.replica == "host"
        self.channel = ReplicaChannel(job, self.sharded)
        self.codec, self.dense = settings.make_codec(), DenseCodec()
        self.gradient_codec = settings.make_gradient_codec()
        self.schedule = MergeSchedule(settings.every, settings.final_every, settings.fragments)
        self.equal = True  # whether weights and optimizer state are equal on all replicas, as they are when attached
        parameters = dict(job.module.named_parameters())
        groups = assign_fragments(job.module, settings.fragments, settings.layout)
        momentum = settings.outer[1] > 0
        with torch.no_grad():
            self.fragments = [Fragment({name: parameters[name] for name in names}, momentum) for names in groups]
        self.merged = {name for names in groups for name in names}
        self.pool = FlatPool(self.fragments)
        persistent = job.module.state_dict(keep_vars=True)
        floating = [b for n, b in job.module.named_buffers() if n in persistent and b.is_floating_point()]
        # A mask of infinite entries, or of the lowest number, has no sum over the ranks and stays as it is. All ranks
        # leave out the same buffers, which are equal on all of them when attached.
        self.buffers = [b for b in floating if all_finite([b * job.world.ranks_over(DATA)])]
        self.pending: list[PendingMerge] = []
        self.asked = self.agreed = False  # votes to stop: of this rank; of any rank, agreed at a merge
        self.error: NonFiniteError | None = None
        self.failed = 0  # the step of that error
        self.reported_tokens = job.progress.tokens  # progress at this rank's last row
        self.metrics = _MergeMetrics(job, settings, self.channel)
        replicas = job.world.ranks_over(settings.over)
        estimated = settings.second_moment == "global" and replicas > 1
        self.moments = SecondMoments(job, replicas) if estimated else None

    def close(self) -> None:
        self.channel.close()

    def refuse(self, error: NonFiniteError) -> None:
        """Continue without optimizer steps until the next merge, so that all ranks end together."""
        if self.error is None:
            self.error, self.failed = error, self.job.progress.step + 1

    @property
    def starting(self) -> bool:
        """Whether the next step is one of the first `start` ones."""
        return self.job.progress.position < self.settings.start

    @torch.no_grad()
    def before_step(self) -> None:
        """Work for Phase.CLIP: average the gradients of the first steps.

        A run that resumes with a larger `start` has replicas that differ already, and averages their weights instead.

        Raises:
            ConfigError: a parameter is trained now but was not when the job was attached to.
        """
        last = self.job.phases[Phase.WAIT]  # after checkpoints, which are attached later, have copied the old moments
        if self.moments is not None and self.estimate_moments not in last:
            last.append(self.estimate_moments)
        trained = [name for name, each in self.job.module.named_parameters() if each.requires_grad]
        refuse_added(self.settings.name, [name for name in trained if name not in self.merged])
        if self.equal:
            for fragment in self.fragments:
                fragment.rebase()
            if self.starting and self.channel.status_wire.size > 1:
                self._average_gradients()

    def estimate_moments(self) -> None:
        """Work for the end of Phase.WAIT, where gradients are what the optimizer will use."""
        assert self.moments is not None
        self.moments.before_step(averaged=self.equal and self.starting)

    def _average_gradients(self) -> None:
        self.asked |= self.job.stopping
        flats = [fragment.gradient() for fragment in self.fragments]
        grads: Grads = {}
        for fragment, flat in zip(self.fragments, flats, strict=True):
            grads |= fragment.split_named(flat)
        row = self._status_row(flats)
        status = self.channel.send([(self.gradient_codec, grads)], row, self.job.progress.step + 1)
        with self.metrics.exposed():
            self._check_status(status.result(), "gradients")
        for fragment, flat in zip(self.fragments, flats, strict=True):
            fragment.set_gradient(flat)

    @torch.no_grad()
    def after_step(self) -> None:
        """Work for Phase.OUTER."""
        if self.moments is not None:
            self.moments.after_step()
        progress, settings = self.job.progress, self.settings
        step = progress.step + 1
        self.asked |= self.job.stopping
        late = self._finish([merge for merge in self.pending if merge.due <= step])
        merged: list[int] = []
        self.equal &= self.starting
        if not self.equal:
            self.gradient_codec.state.clear()
        merges_all = progress.last or (self.starting and not self.equal)
        due = self.schedule.due(progress.position, progress.position + progress.gain, progress.total)
        # Only where the end of the run has moved may a fragment be due that is still on the wire.
        due = [i for i in due if all(i not in merge.fragments for merge in self.pending)]
        if due and not (merges_all or self.agreed or self.equal):
            self._send(due, step, step + settings.delay, keep=settings.delay > 0 and settings.late_merge == "move")
            if not settings.delay:
                merged = self._finish(self.pending)
        if merges_all or self.agreed:
            self._merge_all(step, late, merged)
        self.job.stopping = self.agreed
        self.metrics.publish()

    def _merge_all(self, step: int, late: Sequence[int], merged: Sequence[int]) -> None:
        """Merge all steps since the last exchange of each fragment, so that replicas are equal and no step is lost.

        Where they are equal anyway, only buffers are averaged.

        Args:
            late: fragments whose outer step was made at this step, from an exchange that began earlier. The steps since
                then are averaged plainly, because the outer optimizer's velocity must not be applied twice.
            merged: fragments that were sent and merged at this step.
        """
        late = [*late, *self._finish(self.pending)]
        if self.equal:
            self._send([], step, step)
            self._finish(self.pending)
            return
        rest = [i for i in range(len(self.fragments)) if i not in late and i not in merged]
        for fragments, plain in ((rest, self.starting), (late, True)):
            if fragments:
                self._send(fragments, step, step, plain=plain)
        self._finish(self.pending)
        for fragment in self.fragments:
            fragment.adopt()

    def _send(self, fragments: list[int], step: int, due: int, *, plain: bool = False, keep: bool = False) -> None:
        """Send the pseudo-gradients Delta = theta_old - theta of fragments; the buffers go with the first fragment, or
        alone."""
        weights, means = list[Tensor](), list[Tensor]()
        for fragment in (self.fragments[i] for i in fragments):
            theta = fragment.copy_to(self.pool.take(fragment.anchor))
            means.append(torch.sub(fragment.anchor, theta, out=self.pool.take(theta) if keep else theta))
            weights.append(theta)
        buffers = [buffer.clone() for buffer in self.buffers] if 0 in fragments or not fragments else []
        grads: Grads = {}
        for i, mean in zip(fragments, means, strict=True):
            grads |= self.fragments[i].split_named(mean)
        loads = [(self.dense if plain else self.codec, grads), (self.dense, number_tensors(buffers))]
        status = self.channel.send(loads, self._status_row([*means, *buffers]), step)
        self.pending.append(PendingMerge(fragments, due, plain, means, buffers, status, weights if keep else []))

    def _status_row(self, sent: Sequence[Tensor]) -> Tensor:
        """This rank's status row; it is not read here, so that an accelerator is not waited for."""
        tokens = self.job.progress.tokens
        status = [self.asked, self.failed, 0, tokens - self.reported_tokens]
        row = torch.tensor(status, dtype=torch.float64, device=self.job.world.device)
        if sent:
            row[BROKEN] = (~find_finite(sent)).double()
        self.reported_tokens = tokens
        return row

    def _finish(self, pending: Sequence[PendingMerge]) -> list[int]:
        """Wait for pending merges and apply them; returns the fragments that were merged."""
        merged: list[int] = []
        for merge in list(pending):
            with self.metrics.exposed():
                self._check_status(merge.status.result(), "weights or buffers")
            self.pending.remove(merge)
            outer = (1.0, 0.0, False) if merge.plain else self.settings.outer
            with span("outer", "compute"):
                for index, i in enumerate(merge.fragments):
                    self.fragments[i].step_outer(merge.means[index], *outer)
                    if merge.sent:
                        self.fragments[i].move(merge.sent[index])
                    else:
                        self.fragments[i].adopt(self.settings.alpha if self.settings.delay else 0.0)
            if self.settings.delay:  # else nothing lies there while the next steps are made
                self.pool.give_back([*merge.means, *merge.sent])
            if merge.buffers:
                foreach_copy_(self.buffers, merge.buffers)
            merged += merge.fragments
        return merged

    def _check_status(self, rows: Tensor, what: str) -> None:
        """Check all ranks' rows, and note votes to stop and the others' progress; `what` was exchanged with them.

        Raises:
            NonFiniteError: a replica has failed. All ranks raise; the one whose loss failed raises its own error.
        """
        if self.error is not None and any_failed(rows):
            raise self.error
        for rank, row in enumerate(rows.tolist()):
            if row[FAILED]:
                raise NonFiniteError(f"rank {rank} had no finite loss at step {row[FAILED]:.0f}", hint=LOWER)
            if row[BROKEN]:
                raise NonFiniteError(f"the {what} of rank {rank} are not finite", hint=LOWER)
        self.agreed |= bool(rows[:, ASKED].any())
        world = self.job.world
        share = world.ranks_over(self.settings.over) / world.ranks_over(DATA)
        others = round(float(rows[:, TOKENS].sum()) * share - float(rows[world.index_over(DATA), TOKENS]))
        self.job.progress.tokens += others
        self.reported_tokens += others


def any_failed(rows: Tensor) -> bool:
    return bool(rows[:, [FAILED, BROKEN]].any())


def number_tensors(tensors: Sequence[Tensor]) -> Grads:
    """Give tensors numbers as names, for a codec without state."""
    return {f"{index}": tensor for index, tensor in enumerate(tensors)}


class _MergeMetrics:
    """Publishes metrics of steps and of the run: bytes sent, bytes of a dense exchange, exposed communication time."""

    def __init__(self, job: Job, settings: LocalSteps, channel: ReplicaChannel) -> None:
        self.job, self.channel = job, channel
        self.before, self.waited = channel.sent, 0.0
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

    def publish(self) -> None:
        sent, facts = self.channel.sent, self.job.trace.facts
        self.job.numbers |= {"wire_mb": (sent - self.before) / 1e6, "exposed_seconds": self.waited}
        facts["outer_bytes"] += sent - self.before
        facts["outer_exposed"] += self.waited
        facts["outer_steps"] += 1
        self.before, self.waited = sent, 0.0
