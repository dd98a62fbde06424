"""One training step: micro-batches, the exact mean of their losses over ranks, and the optimizer step with its phases.

A loss function returns (sum, count), and the sum is divided once. The divisor is the count over all micro-batches
and ranks. This count is known only after the backward pass has begun, and waiting for it would add a round trip on slow
links to every step. So the backward pass divides by the previous step's count, which all ranks know. During the
backward pass the new counts are summed over ranks. If the sum differs from the previous count, gradients are multiplied
by the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import foreach_mul_, overflows
from shoestring.auxiliary import with_auxiliary
from shoestring.core.errors import ConfigError, NonFiniteError
from shoestring.core.feature import Phase
from shoestring.core.task import Batch, Output, Repeated, cross_entropy, sum_and_count
from shoestring.core.trace import span
from shoestring.core.whole_batch import is_over_whole_batch, joined, run_in_two_passes

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


def take(attachments: Attachments, batches: Sequence[Batch]) -> Tensor:
    """Do one optimizer step on micro-batches; see `Job.step`."""
    progress, scaler, optimizer = attachments.progress, attachments.scaler, attachments.optimizer
    attachments.trace.step = progress.step
    attachments.run(Phase.FORWARD)

    # Run the forward and backward passes. Gradients accumulate; in the last micro-batch SHARD averages them over ranks.
    micro = MicroBatches(attachments, batches)
    run = run_in_two_passes if micro.whole and len(batches) > 1 else run_in_order
    (attachments.run_micro_batches or run)(micro)
    sums = micro.summed()
    attachments.check_gradients()

    # Refuse a loss that is not finite before the optimizer steps. On an accelerator, where reading the newest loss
    # would wait for the device, read the previous step's loss instead, which is ready by now.
    due, progress.unread = (progress.unread, sums.clone()) if attachments.defers else (sums, None)
    if due is not None:
        total, count, votes = due.tolist()
        if math.isfinite(total) and count:
            progress.tokens += int(count)
            attachments.stopping = votes > 0
        else:
            optimizer.zero_grad(set_to_none=True)
            at = f"at step {progress.step + 1 - (due is not sums)}"
            message = f"the loss became {total} {at}"
            hint = "the last checkpoint is good; resume with a lower learning rate or with [optim.clip]"
            if not count:
                message, hint = f"there is no loss {at}: none of its targets count", ""
            attachments.refuse(NonFiniteError(message, hint=hint))
    loss = attachments.numbers["loss"] = (sums[0] / sums[1]).float()

    # Step the optimizer. First the gradients are corrected to the true divisor. The optimizer's pre-hook runs CLIP,
    # RATE, GRAD and WAIT; its post-hook runs PROJECT, OUTER and CAPTURE. Because these phases run in hooks, they also
    # run in the training loops of other programs.
    scaler.unscale_(optimizer)
    if scaler.is_enabled() and (parted := attachments.world.group(attachments.parted)) is not None:
        for overflow in overflows(scaler, optimizer):  # without this, some pipeline stages would step and others not
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=parted)
    if progress.count and (gradients := attachments.gradients):  # a refused loss leaves no gradients
        micro.correct(gradients, sums[1])
    with span("optimizer", "compute"):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return loss


class MicroBatches:
    """The micro-batches of one step or of one evaluation.

    The micro-batches are run by `run_in_order`, or by the function that a feature at the seam SHARD has set
    (`Attachments.shard`).
    """

    def __init__(
        self, attachments: Attachments, batches: Sequence[Batch], *, training: bool = True, repeated: bool = False
    ) -> None:
        self.attachments, self.batches, self.training, self.repeated = attachments, batches, training, repeated
        self.whole = is_over_whole_batch(attachments)
        self.owned = attachments.run_micro_batches is not None
        self.sums = torch.zeros(3, dtype=torch.float64, device=attachments.world.device)  # loss, count, votes to stop
        self.sums[2] = float(attachments.stop_requested and training)
        self._work: dist.Work | None = None
        # Along some mesh axes ranks compute the same loss of the same samples (tensor parallelism), so only the first
        # of these ranks counts its loss. The other ranks add their loss with weight 0. Since 0 times NaN or infinity is
        # NaN, all ranks still refuse the step if the loss is not finite on any of them. A feature that runs the
        # micro-batches itself calls `loss` on only one of the ranks along its axes, so every call of `loss` counts
        # there.
        world = attachments.world
        spread = (*attachments.data_axes, *attachments.replicas)
        self._repeating = [axis for axis in world.axes if axis not in spread]
        computing = [axis for axis in self._repeating if axis not in attachments.run_over]
        self._weight = float(world.index_over(computing) == 0)
        if self.whole:  # all ranks compute the same loss, and only the first rank counts it
            self._weight *= world.index_over(attachments.replicas) == 0
        elif repeated:
            self._weight = 0.0
        self._first = training and not attachments.progress.count
        if self.owned and self._first:
            attachments.progress.count = 1.0  # a provisional divisor: not every rank computes a loss
        if self.owned and attachments.scaler.is_enabled():
            attachments.scaler.scale(self.sums)  # initializes the scaler also on ranks that compute no loss

    def sync(self, last: bool) -> AbstractContextManager[None]:
        """Context around the forward and backward pass of a micro-batch; gradients are exchanged only if `last`."""
        return self.attachments.sync(last)

    def computing(self) -> AbstractContextManager[None]:
        """Context, such as autocast, around a forward pass and its loss."""
        return self.attachments.computing()

    def forward(self, batch: Batch) -> Output:
        """The model's output on a batch, computed by the job's `forward`."""
        return self.attachments.forward(self.attachments.model, batch)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Add the loss of a micro-batch to `sums`, and return the tensor to call `backward` on.

        In training the tensor is the loss, divided by the divisor of the step and multiplied by the loss scale. In an
        evaluation the tensor is the sum of the losses.
        """
        attachments = self.attachments
        if self.whole:
            group = attachments.world.group(attachments.replicas)
            output, batch = joined(output, batch, group, repeated=self.repeated)
        total, count = sum_and_count((attachments.loss if self.training else attachments.task_loss)(output, batch))
        if self.training and attachments.task_loss is cross_entropy:  # a user's loss adds auxiliary losses itself
            total = with_auxiliary(total, count, output, attachments.module, ConfigError)
        self.add(total, count)
        return (
            attachments.scaler.scale(total / self._divisor(count / self._ranks if self.whole else count))
            if self.training
            else total
        )

    def add(self, total: Tensor, count: Tensor) -> None:
        """Add the sum of a micro-batch's losses, and its number of targets, to `sums`."""
        if self.training or self._weight:
            self.sums[:2] += torch.stack([total.detach().double(), count.double()]) * self._weight

    def gradient_of(self, total: Tensor) -> Tensor:
        """The gradient, with respect to a sum of losses `total`, of the tensor that `loss` returns.

        Needed by a feature that runs the micro-batches and computes losses and gradients in a graph of its own.
        """
        return self.attachments.scaler.scale(torch.ones_like(total) / self._divisor(total))

    def begin_sum(self) -> None:
        """Start the all-reduce of loss, count and votes, which overlaps the backward pass."""
        attachments = self.attachments
        group = attachments.world.group((*attachments.replicas, *self._repeating))
        if group is not None:
            self._work = dist.all_reduce(self.sums, group=group, async_op=True)

    def summed(self) -> Tensor:
        """(loss sum, count, votes to stop) over all micro-batches and ranks."""
        if self.owned:  # not earlier: all ranks must start this at the same point among the collectives of `run`
            self.begin_sum()
        if self._work is not None:
            with span("loss", "wire", self.sums.nbytes):
                self._work.wait()
        return self.sums

    def correct(self, gradients: list[Tensor], count: Tensor) -> None:
        """Rescale gradients that were divided by the expected number of targets to the true number, `count`."""
        progress = self.attachments.progress
        ratio = progress.count / count
        if count.device.type != "cpu":  # comparing with 1 would wait for the device; multiplying by 1 does not
            foreach_mul_(gradients, ratio.float())
            if self.owned and self._first:
                progress.count = float(count)  # waits for the device, but only in the first step of a run
        elif float(ratio) != 1.0:
            foreach_mul_(gradients, float(ratio))
            progress.count = float(count)

    @property
    def _ranks(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.attachments.world.ranks_over(self.attachments.replicas)

    def _divisor(self, count: Tensor) -> Tensor | float:
        """The divisor of a micro-batch's loss before the backward pass.

        One process with one micro-batch divides by the true count. With more processes or micro-batches, the divisor is
        the previous step's count divided by the number of ranks: SHARD averages gradients over ranks, but the step
        needs their sum. `correct` adjusts the gradients to the true count later.
        """
        attachments, progress = self.attachments, self.attachments.progress
        ranks, batches = self._ranks, 1 if self.whole else len(self.batches)
        if ranks == batches == 1 and not self.owned:
            progress.count = 0.0
            return count
        if not progress.count:
            counts = count.double() * batches
            if group := attachments.world.group(attachments.replicas):  # ranks that read different samples
                dist.all_reduce(counts, group=group)
            progress.count = max(float(counts), 1.0)
        return progress.count / ranks


def run_in_order(micro: MicroBatches) -> None:
    """Run forward pass, loss and backward pass of each micro-batch, one micro-batch after the other."""
    for index, batch in enumerate(micro.batches):
        last = index == len(micro.batches) - 1
        with micro.sync(last):
            with micro.computing(), span("forward", "compute"):
                # The output is not assigned to a variable, so the logits are freed unless the backward pass needs them.
                loss = micro.loss(micro.forward(batch), batch)
            if last:
                micro.begin_sum()
            with span("backward", "compute"):
                loss.backward()


def evaluate(attachments: Attachments, batches: Iterable[Batch | Repeated]) -> tuple[float, int]:
    """Compute (sum, count) of the user's loss over the batches of all ranks, without training; see `Job.evaluate`."""
    sums = torch.zeros(2, dtype=torch.float64, device=attachments.world.device)
    with attachments.evaluating(), span("evaluate", "compute"):
        for item in batches:
            repeated, batch = isinstance(item, Repeated), item.batch if isinstance(item, Repeated) else item
            before = dict(attachments.evaluated)
            micro = MicroBatches(attachments, [batch], training=False, repeated=repeated)
            if attachments.run_micro_batches is not None:
                attachments.run_micro_batches(micro)
            else:
                with micro.computing():
                    micro.loss(micro.forward(batch), batch)
            if repeated:  # the names of additional metrics must stay, because all ranks sum the same metrics
                zero = torch.zeros_like(sums)
                attachments.evaluated = {name: before.get(name, zero) for name in attachments.evaluated}
            sums += micro.sums[:2]
    if attachments.world.size > 1:
        dist.all_reduce(sums)
    return float(sums[0]), int(sums[1])


def before_update(attachments: Attachments) -> None:
    """Hook that runs the phases CLIP to WAIT before the optimizer's own step."""
    if not attachments.hooks_are_off:
        attachments.run(Phase.CLIP, Phase.RATE, Phase.GRAD, Phase.WAIT)


def after_update(attachments: Attachments) -> None:
    """Hook that runs the phases PROJECT to CAPTURE after the optimizer's own step, and counts the step."""
    if not attachments.hooks_are_off:
        attachments.run(Phase.PROJECT, Phase.OUTER)
        for work in attachments.after_merges if attachments.merged else ():
            work()
        attachments.progress.advance()
        attachments.run(Phase.CAPTURE)
        attachments.trace.step = attachments.progress.step
