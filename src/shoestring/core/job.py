"""The job of a training program: a model with its loss and optimizer, and the steps to train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from types import TracebackType
from typing import Self

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from shoestring.core import step
from shoestring.core.attachments import Attachments
from shoestring.core.kept import Across, Kept, Merge, Progress, Stateful
from shoestring.core.task import Batch, Forward, Loss, Params, Repeated, call_model, cross_entropy
from shoestring.core.trace import Trace
from shoestring.core.world import World


class Job:
    """Trains a model, with features attached. Close the job, or use it in a `with` block, to detach the features.

    Args:
        model: the model, already on the job's device.
        forward: (model, batch) -> output; separate from `loss`, so that a feature that adds a teacher's loss can use
            the same output.
        loss: (output, batch) -> (sum, count), both 0-d tensors. Sums and counts are added up over micro-batches and
            ranks and divided once, so that unequal counts give the exact mean. Features at LOSS may wrap the loss for
            training; evaluation uses the loss without these wrappers.
        optimizer: function parameters -> torch.optim.Optimizer, called after SHARD has chosen the tensors to step; or
            an optimizer built with the model's parameters, in which those tensors then replace the parameters.
        total: number of optimizer steps, which schedules decay over; or a loader whose length is that number; 0 if the
            number is not known.
        example: function that returns a batch of the same sizes as the batches of `step`; needed by features that trace
            a step before the first one (`graph.Split`).
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward = call_model,
        loss: Loss = cross_entropy,
        optimizer: Callable[[Params], Optimizer] | Optimizer = AdamW,
        progress: Progress | None = None,
        world: World | None = None,
        trace: Trace | None = None,
        total: int | Sized = 0,
        example: Callable[[], Batch] | None = None,
    ) -> None:
        progress = Progress() if progress is None else progress
        progress.total = (total if isinstance(total, int) else len(total)) or progress.total
        world = World.current() if world is None else world
        self._attachments = Attachments(
            model, forward, loss, optimizer, progress, world, Trace() if trace is None else trace
        )
        self._attachments.example = example

    @property
    def model(self) -> nn.Module:
        """The module that a forward pass calls: the model itself, or the wrapper (DDP) set by a feature."""
        return self._attachments.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; accessible only after `compose`."""
        return self._attachments.optimizer

    @property
    def progress(self) -> Progress:
        """Steps and tokens done so far, and the position from which schedules compute their values."""
        return self._attachments.progress

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self._attachments.world

    @property
    def trace(self) -> Trace:
        """The run's recorded spans of time, their totals, and named numbers that features record."""
        return self._attachments.trace

    @property
    def numbers(self) -> dict[str, float | Tensor]:
        """Metrics of the newest step by name: the loss, and those that features publish."""
        return self._attachments.numbers

    @property
    def kept(self) -> Mapping[str, Kept]:
        """States that checkpoints must hold, by name; for programs that write checkpoints of their own."""
        return self._attachments.kept

    @property
    def restore(self) -> Callable[[str], int | None] | None:
        """Function that restores a checkpoint; None if no feature writes checkpoints.

        The function takes "auto" or a path, and returns the step resumed from, or None if there is no checkpoint.
        """
        return self._attachments.restore

    def keep(self, name: str, state: Stateful, *, across: Across = "same", merge: Merge | None = None) -> None:
        """Save `state` in checkpoints, and restore it from them; see `Attachments.keep`."""
        self._attachments.keep(name, state, across=across, merge=merge)

    def step(self, *batches: Batch) -> Tensor:
        """Do one optimizer step on one batch, or on several micro-batches whose gradients accumulate.

        Returns:
            The mean loss over all micro-batches and over all ranks that average gradients, as a detached 0-d tensor on
            the device.

        Raises:
            NonFiniteError: the loss is NaN or infinite; raised on all ranks at the same step. On a CPU the error comes
                before the optimizer step; on an accelerator after it, because the loss is read one step late.
        """
        return step.take(self._attachments, batches)

    def evaluate(self, batches: Iterable[Batch | Repeated]) -> tuple[float, int]:
        """(sum, count) of the user's loss over the batches of all ranks; all ranks need the same number of batches.

        A rank with fewer batches passes some of them again as `Repeated`; their loss is not counted.
        """
        return step.evaluate(self._attachments, batches)

    def stop(self) -> None:
        """Ask all ranks to stop: `done` becomes True on all ranks after the same step. Safe in signal handlers."""
        self._attachments.stop_requested = True

    @property
    def done(self) -> bool:
        """Whether training is over: the total number of steps is reached, or `stop` or `finish` was called."""
        return self._attachments.done

    def finish(self) -> None:
        """End training after the newest step and checkpoint it; no effect if training is over. A collective."""
        self._attachments.finish()

    def close(self) -> None:
        """Detach all features: undo their changes and release their resources, in reverse order."""
        self._attachments.exits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._attachments.exits:
            self.world.note("left" if error else "ended", self.progress.step)
            if error is None:
                self.finish()


def attachments_of(job: Job) -> Attachments:
    """The `Attachments` of a job, for shoestring's own loop, features and tests; programs use only `Job`."""
    return job._attachments
