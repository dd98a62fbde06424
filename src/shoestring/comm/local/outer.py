"""Local steps: replicas train independently, and an outer optimizer applies their mean change.

After H steps every replica sends Delta = theta_old - theta. The outer optimizer treats the mean of these
pseudo-gradients as a gradient of theta_old, and all replicas continue from the result (DiLoCo, arXiv 2311.08105).
In the first `start` steps gradients are averaged instead, which is more effective while the loss falls fast (post-local
SGD, Lin et al., arXiv 1808.07217). While gradients are averaged, weights and optimizer state stay equal on all replicas
without being exchanged. Streaming (arXiv 2501.18512) merges one fragment of the layers after the other, and training
continues during each exchange. `delay` steps after the exchange began, a replica sets theta = alpha theta + (1 - alpha)
theta_new. Such mixing undoes a part of the steps made during the exchange. By default no step is undone: a replica adds
the difference between the merged weights and the weights that it had sent, theta = theta + theta_new - theta_sent (like
delayed averaging, DaSGD, arXiv 2006.00441).
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

from shoestring._torch import foreach_copy_, foreach_mul_
from shoestring.comm.codecs.codec import AllGather, Codec, Grads
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.traffic import ring_bytes
from shoestring.comm.exchange.coordinator import refuse_added
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.wire import Wire, all_finite, find_finite, naming_failures
from shoestring.comm.exchange.worker import Worker, WorkerTask
from shoestring.comm.local.fragments import FlatPool, Fragment, assign_fragments
from shoestring.comm.local.schedule import MergeSchedule, MergeTimes
from shoestring.comm.local.second_moment import SecondMoments
from shoestring.core.attachments import Attachments
from shoestring.core.errors import NonFiniteError
from shoestring.core.feature import DATA, HOSTS, Phase
from shoestring.core.trace import span
from shoestring.sharded import local_part

if TYPE_CHECKING:
    from shoestring.comm.settings.local_steps import LocalSteps

LOWER = "the last checkpoint is usable; resume with a lower learning rate or with [optim.clip]"

# Columns of the status row that every rank sends with each exchange: vote to stop; step of a non-finite loss, or 0;
# whether the tensors sent have non-finite entries; target tokens since the previous row; weight of the tensors sent:
# for gradients, the step's number of target tokens; for a merge, this rank's weight.
ASKED, FAILED, BROKEN, TOKENS, WEIGHT = range(5)


# -- exchanges --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PendingMerge:
    """Fragments whose pseudo-gradients are being exchanged; `means` holds the averages once the task `status` is
    done."""

    fragments: list[int]
    due: int  # step after which the fragments are merged
    plain: bool  # whether weights are averaged without the outer optimizer
    means: list[Tensor]
    buffers: list[Tensor]
    status: WorkerTask[Tensor]  # its result is the status rows of all ranks
    sent: list[Tensor]
    """This replica's weights theta_sent when the exchange began; empty unless the merge adds theta_new - theta_sent to
    the weights."""


class ReplicaChannel:
    """A thread that runs the exchanges between replicas in the order of submission."""

    def __init__(self, attachments: Attachments, sharded: bool) -> None:
        world = attachments.world
        # If a replica is sharded over the ranks of a host, each rank exchanges its own shard with other hosts.
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
        """Start replacing tensors by their means over replicas; the task's result is the status rows of all ranks, on
        the CPU.

        The means are weighted by the column WEIGHT of the rows, unless all weights are zero.
        """
        collectives = 2 + sum(2 * codec.stages + 2 for codec, _ in loads)
        task = WorkerTask[Tensor](
            f"the merge of the replicas that began at step {step}", collectives * self.status_wire.timeout
        )
        return self.worker.submit(task, partial(self._exchange, loads, row, step, task.what))

    def _exchange(self, loads: Sequence[tuple[Codec, Grads]], row: Tensor, step: int, what: str) -> Tensor:
        with naming_failures(what):
            (rows,) = self.status_wire.start([AllGather(row)])()
            rows = rows.cpu()
            if not any_failed(rows):  # non-finite entries must not reach a residual
                if (share := rows[:, WEIGHT] / rows[:, WEIGHT].mean()).isfinite().all():
                    for grads in filter(None, (grads for _, grads in loads)):  # there may be no buffers
                        foreach_mul_(list(grads.values()), float(share[self.status_wire.rank]))
                for codec, grads in loads:
                    nonempty = {name: grad for name, grad in grads.items() if grad.numel()}
                    if nonempty and not self.route.run(codec, nonempty, step):
                        raise NonFiniteError(f"the mean of the replicas' steps overflowed at step {step}", hint=LOWER)
            return rows


class OuterOptimizer:
    """Runs the outer optimizer on one rank, and merges the replicas."""

    def __init__(self, attachments: Attachments, settings: LocalSteps) -> None:
        self.attachments, self.settings = attachments, settings
        self.sharded = attachments.divided == "parameters" and settings.replica == "host"
        self.channel = ReplicaChannel(attachments, self.sharded)
        self.codec, self.dense = settings.make_codec(), DenseCodec()
        self.gradient_codec = settings.make_gradient_codec()
        self.schedule: MergeTimes = MergeSchedule(settings.every, settings.final_every, settings.fragments)
        self.equal = True  # whether weights and optimizer state are equal on all replicas, as they are when attached
        parameters = dict(attachments.module.named_parameters())
        groups = assign_fragments(attachments.module, settings.fragments, settings.layout)
        momentum = settings.outer[1] > 0
        with torch.no_grad():
            self.fragments = [
                Fragment({name: parameters[name] for name in names if settings.merges(name)}, momentum)
                for names in groups
            ]
        self.known = {name for names in groups for name in names}  # trained parameters, merged or not
        self.weight = 0.0  # weight of this rank in the next merge, relative to the others; all zero: equal weights
        self.pool = FlatPool(self.fragments)
        persistent = attachments.module.state_dict(keep_vars=True)
        named = attachments.module.named_buffers()
        buffers = [buffer for name, buffer in named if name in persistent and settings.merges(name)]
        floating = [b for b in buffers if b.is_floating_point() and b.itemsize > 1]  # torch cannot add 8-bit floats
        # A mask whose entries are infinite, or the lowest finite number, has no finite sum over ranks, so it is not
        # averaged. All ranks leave out the same buffers, because buffers are equal on all ranks when attached.
        self.buffers = [b for b in floating if all_finite([b * attachments.world.ranks_over(DATA)])]
        self.pending: list[PendingMerge] = []
        self.asked = self.agreed = False  # votes to stop: by this rank; by any rank, as agreed at a merge
        self.error: NonFiniteError | None = None
        self.failed = 0  # step of `error`
        self.reported_tokens = attachments.progress.tokens  # target tokens up to this rank's latest status row
        self.tokens_before = attachments.progress.tokens  # number of target tokens before the current step
        self.metrics = _MergeMetrics(attachments, settings, self.channel)
        replicas = attachments.world.ranks_over(settings.over)
        self.alone = replicas == 1
        estimated = settings.second_moment == "global" and replicas > 1
        self.moments = SecondMoments(attachments, replicas) if estimated else None

    def close(self) -> None:
        self.channel.close()

    def refuse(self, error: NonFiniteError) -> None:
        """Record a non-finite loss. Training continues without optimizer steps until the next merge, where all ranks
        raise an error."""
        if self.error is None:
            self.error, self.failed = error, self.attachments.progress.step + 1

    @property
    def starting(self) -> bool:
        """Whether the next step is among the first `start` steps."""
        return self.attachments.progress.position < self.settings.start

    @torch.no_grad()
    def before_step(self) -> None:
        """Called in Phase.CLIP: average the gradients in the first `start` steps.

        In a run resumed with a larger `start`, replicas already differ, so weights are averaged instead.

        Raises:
            ConfigError: a parameter that was frozen or missing when the feature was attached is trained now.
        """
        # The estimate changes the moments, so it must run after checkpoints have copied them. It is appended here,
        # because the callback of checkpoints may be registered after `install`.
        waits = self.attachments.phases[Phase.WAIT]
        if self.moments is not None and self.estimate_moments not in waits:
            waits.append(self.estimate_moments)
        trained = [name for name, tensor in self.attachments.module.named_parameters() if tensor.requires_grad]
        refuse_added(self.settings.name, [name for name in trained if name not in self.known])
        if self.equal:
            for fragment in self.fragments:
                fragment.rebase()
            if self.starting and self.channel.status_wire.size > 1:
                # Local steps have not begun yet, so gradients are averaged at every step.
                self.asked |= self.attachments.stopping
                flats = [fragment.gradient() for fragment in self.fragments]
                grads: Grads = {}
                for fragment, flat in zip(self.fragments, flats, strict=True):
                    grads |= fragment.split_named(flat)
                row = self._status_row(flats)
                unread = self.attachments.progress.unread  # counts of this step, on an accelerator
                row[WEIGHT] = self.attachments.progress.tokens - self.tokens_before if unread is None else unread[1]
                status = self.channel.send([(self.gradient_codec, grads)], row, self.attachments.progress.step + 1)
                with self.metrics.exposed():
                    self._check_status(status.result(), "gradients")
                for fragment, flat in zip(self.fragments, flats, strict=True):
                    fragment.set_gradient(flat)

    def estimate_moments(self) -> None:
        """Adjust Adam's second moments; called at the end of Phase.WAIT, when the gradients no longer change."""
        assert self.moments is not None
        self.moments.before_step(averaged=self.equal and self.starting)

    @torch.no_grad()
    def after_step(self) -> None:
        """Called in Phase.OUTER: apply the merges that are due, and send the fragments that are due."""
        if self.moments is not None:
            self.moments.after_step()
        progress, settings = self.attachments.progress, self.settings
        step = progress.step + 1
        self.asked |= self.attachments.stopping
        late = self._finish([merge for merge in self.pending if merge.due <= step])
        merged: list[int] = []
        self.equal &= self.starting
        if not self.equal:  # gradients are no longer averaged, so free the residuals
            self.gradient_codec.state.clear()
        merges_all = progress.last or (self.starting and not self.equal)
        due = self.schedule.due(progress.position, progress.position + progress.gain, progress.total)
        # A fragment that is due can still be in an exchange only if the end of the run has changed.
        due = [i for i in due if all(i not in merge.fragments for merge in self.pending)]
        if due and not (merges_all or self.agreed or self.equal):
            self._send(due, step, step + settings.delay, keep=settings.delay > 0 and settings.late_merge == "move")
            if not settings.delay:
                merged = self._finish(self.pending)
        if merges_all or self.agreed:
            self._merge_all(step, late, merged)
        self.attachments.stopping = self.agreed
        whole = bool(merged) and self.settings.inexact == "replicas"
        self.tokens_before = progress.tokens
        self.attachments.merged = self.alone or self.equal or merges_all or self.agreed or whole
        self.metrics.publish()

    def _merge_all(self, step: int, late: Sequence[int], merged: Sequence[int]) -> None:
        """Merge each fragment's steps since its last exchange, so that replicas become equal and no step is lost.

        If replicas are equal already, only buffers are averaged.

        Args:
            late: fragments whose exchange began at an earlier step, and has just ended with an outer step. The steps
                since that exchange began are averaged without the outer optimizer, because the outer velocity must not
                be applied twice.
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
        """Start the exchange of the pseudo-gradients Delta = theta_old - theta of `fragments`.

        Buffers are sent with the first fragment, or alone if there are no fragments.
        """
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
        """Build this rank's status row on the device, without reading it, so that the host does not wait for an
        accelerator."""
        tokens = self.attachments.progress.tokens
        status = [self.asked, self.failed, 0, tokens - self.reported_tokens, self.weight]
        row = torch.tensor(status, dtype=torch.float64, device=self.attachments.world.device)
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
                        self.fragments[i].adopt(self.settings.own_weight if self.settings.delay else 0.0)
            if self.settings.delay:  # without a delay, memory is freed between merges instead
                self.pool.give_back([*merge.means, *merge.sent])
            if merge.buffers:
                foreach_copy_(self.buffers, merge.buffers)
            merged += merge.fragments
        return merged

    def _check_status(self, rows: Tensor, what: str) -> None:
        """Check the status rows of all ranks, and adopt votes to stop and the token counts of other ranks.

        Args: what: name of the tensors that were exchanged with the rows, for messages.

        Raises:
            NonFiniteError: a replica has failed. All ranks raise this error; the rank whose loss failed raises its own
                error.
        """
        if self.error is not None and any_failed(rows):
            raise self.error
        for rank, row in enumerate(rows.tolist()):
            if row[FAILED]:
                raise NonFiniteError(f"rank {rank} had no finite loss at step {row[FAILED]:.0f}", hint=LOWER)
            if row[BROKEN]:
                raise NonFiniteError(f"the {what} of rank {rank} are not finite", hint=LOWER)
        self.agreed |= bool(rows[:, ASKED].any())
        world = self.attachments.world
        share = world.ranks_over(self.settings.over) / world.ranks_over(DATA)
        others = round(float(rows[:, TOKENS].sum()) * share - float(rows[world.index_over(DATA), TOKENS]))
        self.attachments.progress.tokens += others
        self.reported_tokens += others


def any_failed(rows: Tensor) -> bool:
    return bool(rows[:, [FAILED, BROKEN]].any())


def number_tensors(tensors: Sequence[Tensor]) -> Grads:
    """Name tensors by numbers, for a codec without state."""
    return {f"{index}": tensor for index, tensor in enumerate(tensors)}


class _MergeMetrics:
    """Publishes metrics of steps and of the run: bytes sent, bytes of a dense exchange, exposed communication time."""

    def __init__(self, attachments: Attachments, settings: LocalSteps, channel: ReplicaChannel) -> None:
        self.attachments, self.channel = attachments, channel
        self.before, self.waited = channel.sent, 0.0
        replicas = attachments.world.ranks_over(settings.over)
        whole = sum(
            local_part(parameter).nbytes for parameter in attachments.module.parameters() if parameter.requires_grad
        )
        zeros = dict.fromkeys(("outer_bytes", "outer_steps", "outer_syncs", "outer_exposed"), 0.0)
        attachments.trace.facts |= {**zeros, "outer_without": ring_bytes("all-reduce", whole, replicas)}

    @contextmanager
    def exposed(self) -> Iterator[None]:
        began = time.perf_counter()
        with span("exposed", "wait"):
            yield
        self.waited += time.perf_counter() - began
        self.attachments.trace.facts["outer_syncs"] += 1

    def publish(self) -> None:
        sent, facts = self.channel.sent, self.attachments.trace.facts
        self.attachments.numbers |= {"wire_mb": (sent - self.before) / 1e6, "exposed_seconds": self.waited}
        facts["outer_bytes"] += sent - self.before
        facts["outer_exposed"] += self.waited
        facts["outer_steps"] += 1
        self.before, self.waited = sent, 0.0
