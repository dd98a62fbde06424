"""One optimizer step of a job: micro-batches, their exact mean over ranks, and the phases around torch's own step.

Losses come as (sum, count) and are divided once. The true divisor, the count over all micro-batches and ranks, is
known only after the backward pass has begun, and waiting for it would put a round trip on slow links into every step.
So the backward pass divides by the previous step's count, which all ranks agree on; the counts travel while it runs;
and gradients are corrected by the ratio where counts turn out to differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoestring._torch import foreach_mul_
from shoestring.core.errors import NonFiniteError
from shoestring.core.feature import Phase
from shoestring.core.task import Batch, sum_and_count
from shoestring.core.trace import span

if TYPE_CHECKING:
    from shoestring.core.job import Job


class Step:
    """The optimizer steps of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.stop_requested = False
        self._hooks_off = False

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """See `Job.step`."""
        job = self.job
        job.trace.step = job.progress.step
        self.run(Phase.FORWARD)
        sums = torch.zeros(3, dtype=torch.float64, device=job.world.device)  # loss, count, votes to stop
        sums[2] = float(self.stop_requested)
        work = None
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with job.sync(last):
                with job.computing():
                    with span("forward", "compute"):
                        total, count = sum_and_count(job.loss(job.forward(job.model, batch), batch))
                    sums[:2] += torch.stack([total.detach().double(), count.double()]) * self._weight()
                    work = self._all_reduce(sums) if last else None
                with span("backward", "compute"):
                    job.scaler.scale(total / self._divisor(count, len(batches))).backward()
        if work is not None:
            with span("loss", "wire", sums.nbytes):
                work.wait()
        job.check_gradients()
        self._settle(sums)
        loss = job.numbers["loss"] = (sums[0] / sums[1]).float()
        self._update(sums)
        return loss

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """See `Job.evaluate`."""
        job = self.job
        sums = torch.zeros(2, dtype=torch.float64, device=job.world.device)
        with job.evaluating(), span("evaluate", "compute"):
            for batch in batches:
                with job.computing():
                    total, count = sum_and_count(job.task_loss(job.forward(job.model, batch), batch))
                sums += torch.stack([total.double(), count.double()])
        sums *= self._weight()
        if job.world.size > 1:
            dist.all_reduce(sums)
        return float(sums[0]), int(sums[1])

    def verify(self) -> None:
        """See `Job.verify`."""
        progress = self.job.progress
        loss, count, _ = (0.0, 0.0, 0.0) if progress.unread is None else progress.unread.tolist()
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss became {loss} at step {progress.step}")
        progress.tokens, progress.unread = progress.tokens + int(count), None

    # -- loss and gradients ------------------------------------------------------------------------------------------

    def _all_reduce(self, sums: Tensor) -> dist.Work | None:
        """Start adding loss, count and votes over the ranks; it travels while the backward pass computes."""
        group = self.job.world.group((*self.job.replicas, *self._repeating()))
        return dist.all_reduce(sums, group=group, async_op=True) if group is not None else None

    def _repeating(self) -> list[str]:
        """Mesh axes along which ranks compute the same loss of the same samples (tensor parallel)."""
        job = self.job
        return [axis for axis in job.world.axes if axis not in job.data_axes and axis not in job.replicas]

    def _weight(self) -> float:
        """What this rank's losses and counts are multiplied by, so that those that several ranks compute count once.

        Not left out: 0 times a loss that is not finite is not finite, so all ranks refuse it.
        """
        return float(self.job.world.index_over(self._repeating()) == 0)

    def _divisor(self, count: Tensor, batches: int) -> Tensor | float:
        """What a micro-batch's loss is divided by before the backward pass.

        One process with one micro-batch knows the true divisor; others take the previous step's, and `_update`
        corrects the gradients. SHARD averages over `ranks`, hence its part in the divisor.
        """
        progress, ranks = self.job.progress, self.job.world.ranks_over(self.job.replicas)
        if ranks == batches == 1:
            progress.count = 0.0
            return count
        if not progress.count:
            counts = count.double() * batches
            if group := self.job.world.group(self.job.replicas):  # along it, nothing is repeated
                dist.all_reduce(counts, group=group)
            progress.count = max(float(counts), 1.0)
        return progress.count / ranks

    def _settle(self, sums: Tensor) -> None:
        """Read the sums where that is free: at once on a CPU, one step late on an accelerator."""
        job = self.job
        ready, job.progress.unread = (job.progress.unread, sums.clone()) if job.defers else (sums, None)
        if ready is None:
            return
        loss, count, votes = ready.tolist()
        if not (math.isfinite(loss) and count):
            job.built_optimizer.zero_grad(set_to_none=True)
            at = f"at step {job.progress.step + 1 - (ready is not sums)}"
            said = f"the loss became {loss} {at}"
            hint = "the last checkpoint is good; resume with a lower learning rate or with [optim.clip]"
            if not count:
                said, hint = f"there is no loss {at}: none of its targets count", ""
            job.refuse(NonFiniteError(said, hint=hint))
            return
        job.progress.tokens += int(count)
        job.stopping = votes > 0

    def _update(self, sums: Tensor) -> None:
        job = self.job
        job.scaler.unscale_(job.built_optimizer)
        if job.progress.count and (gradients := job.gradients):  # there are none after a refused loss
            self._correct(gradients, sums[1])
        with span("optimizer", "compute"):
            job.scaler.step(job.built_optimizer)
            job.scaler.update()
            job.built_optimizer.zero_grad(set_to_none=True)

    def _correct(self, gradients: list[Tensor], count: Tensor) -> None:
        """Turn gradients divided by the expected count into gradients divided by the true one."""
        progress = self.job.progress
        ratio = progress.count / count
        if count.device.type != "cpu":  # comparing would wait for the device
            foreach_mul_(gradients, ratio.float())
        elif float(ratio) != 1.0:
            foreach_mul_(gradients, float(ratio))
            progress.count = float(count)

    # -- phases ------------------------------------------------------------------------------------------------------

    def run(self, *phases: Phase) -> None:
        for phase in phases:
            for work in self.job.phases[phase]:
                work()

    @contextmanager
    def hooks_off(self) -> Iterator[None]:
        """Steps of the optimizer inside run no phases: torch lays out new state by a step of no gradients."""
        self._hooks_off = True
        try:
            yield
        finally:
            self._hooks_off = False

    def before_update(self, *_: object) -> None:
        """Hook before the optimizer's own step."""
        if not self._hooks_off:
            self.run(Phase.CLIP, Phase.RATE, Phase.GRAD, Phase.WAIT)

    def after_update(self, *_: object) -> None:
        """Hook after the optimizer's own step."""
        if not self._hooks_off:
            self.run(Phase.PROJECT, Phase.OUTER)
            self.job.progress.advance()
            self.run(Phase.CAPTURE)
            self.job.trace.step = self.job.progress.step


def no_sync(model: DistributedDataParallel) -> Callable[[bool], AbstractContextManager[Any]]:
    """For `Job.shard` with DDP: exchange gradients in the last micro-batch only."""
    return lambda last: nullcontext() if last else model.no_sync()


def raise_error(error: Exception) -> None:
    """The answer to a loss that is not finite, unless a feature gives another."""
    raise error
