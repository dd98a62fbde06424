"""Batch-norm statistics for averaged weights. Statistics depend on the weights, so averaged weights need their own.

Before an evaluation the statistics are recomputed with the averaged weights, from the newest training batches, as in
the papers on averages (Izmailov et al., 2018; Defazio et al., 2024). If there are too few training batches in memory,
moving averages of the training statistics over the same steps are used instead. There are too few batches in a training
loop that calls the model directly, and right after a resume if the batches were too large for the checkpoint.

How far the loss is from that with statistics of all data, on the network of `tests/optim/test_averaging.py`:
recomputed statistics, at most 1%; moving averages over at least a hundred steps, at most 3%; the statistics of the
newest weights, 3 to 15%.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring._torch import own_name, tree_leaves, tree_map_only
from shoestring.core.attachments import Attachments
from shoestring.core.feature import Phase
from shoestring.core.task import Batch, Output
from shoestring.optim.swapping import swapped

if TYPE_CHECKING:
    from shoestring.optim.averaging import Average

NAMES = ("running_mean", "running_var")
"""Names of the buffers that the forward pass of a norm layer updates in training."""
FEWEST, MOST = 4, 16
"""Minimum and maximum number of batches from which statistics are recomputed."""
MOST_BYTES, MOST_SAVED = 2**28, 2**20
"""Limits in bytes for the batches that are held to recompute statistics: above MOST_BYTES only the newest batches, but
at least FEWEST, are held; above MOST_SAVED a checkpoint holds none."""


class NormStatistics:
    """The norm layers' statistics for an average of the weights; each rank has its own statistics, as in training."""

    def __init__(self, attachments: Attachments, average: Average) -> None:
        self.attachments, self.average = attachments, average
        self.norms: dict[str, Any] = {
            path: module
            for path, module in attachments.module.named_modules()
            if all(isinstance(module._buffers.get(name), Tensor) for name in NAMES)
        }
        self.batches: deque[Batch] = deque(maxlen=MOST)
        """The newest micro-batches of training."""
        self.anew: tuple[int, dict[str, Tensor]] = 0, {}
        """Step of the newest recomputation, and the recomputed statistics, by buffer name."""
        # Statistics of norms without `momentum` cannot be recomputed, because `_compute` sets the momentum.
        if all(hasattr(norm, "momentum") for norm in self.norms.values()):
            self.forward = attachments.forward
            attachments.forward = self.see
            attachments.exits.callback(setattr, attachments, "forward", self.forward)

    def see(self, model: nn.Module, batch: Batch) -> Output:
        """Run the job's forward pass, and keep the newest training batches in memory."""
        if model is self.attachments.model and model.training and torch.is_grad_enabled():
            self.batches.append(batch)
            while len(self.batches) > FEWEST and sum(map(_bytes, self.batches)) > MOST_BYTES:
                self.batches.popleft()
        return self.forward(model, batch)

    def now(self) -> dict[str, Tensor]:
        """The model's buffers of statistics, which training updates, by name."""
        return {
            own_name(self.attachments.module, f"{path}.{name}" if path else name): getattr(norm, name)
            for path, norm in self.norms.items()
            for name in NAMES
        }

    def add(self, steps: int) -> None:
        self.average.add(self.now(), steps)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the norms use the average's statistics. A collective.

        The averaged weights must already be in the model, because statistics are recomputed with these weights.
        """
        step, world = self.attachments.progress.step, self.attachments.world
        if self.anew[0] != step or not step:
            ready = torch.tensor([len(self.batches)], device=world.device)
            if (group := world.group(self.attachments.data_axes)) is not None:
                dist.all_reduce(ready, dist.ReduceOp.MIN, group=group)
            if int(ready) >= FEWEST:
                self.anew = step, self._compute(int(ready), group)
        with swapped(self.now(), self.value()):
            yield

    def value(self) -> dict[str, Tensor]:
        """The statistics for evaluation: the recomputed statistics if they belong to the newest step, else moving
        averages."""
        return self.anew[1] if self.anew[0] == self.attachments.progress.step and self.anew[1] else self.average.value()

    @torch.no_grad()
    def _compute(self, count: int, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        """Compute the mean of the statistics over the newest `count` batches of all ranks; the model is not changed."""
        attachments = self.attachments
        buffers = {name: (buffer, buffer.clone()) for name, buffer in self.now().items()}
        sums = {
            name: torch.zeros_like(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32))
            for name, (buffer, _) in buffers.items()
        }
        counters = [
            (counter, counter.clone())
            for norm in self.norms.values()
            if (counter := norm._buffers.get("num_batches_tracked")) is not None
        ]
        modes = {module: module.training for module in attachments.module.modules()}
        momenta = {norm: norm.momentum for norm in self.norms.values()}
        try:
            attachments.module.eval()  # turns off dropout; below, norms return to their own mode
            for norm in self.norms.values():
                norm.train(modes[norm])
                norm.momentum = 1.0  # a forward pass then replaces the statistics by the statistics of its batch
            with torch.compiler.set_stance("force_eager"):  # changed modes and momenta would cause recompilation
                for batch in list(self.batches)[-count:]:
                    with attachments.computing():
                        self.forward(attachments.module, batch)
                    for name, (buffer, _) in buffers.items():
                        sums[name] += buffer
        finally:
            for norm, momentum in momenta.items():
                norm.momentum = momentum
            for module, training in modes.items():
                module.training = training
            for buffer, before in (*buffers.values(), *counters):
                buffer.copy_(before)
        ranks = 1 if group is None else dist.get_world_size(group)
        for total in sums.values():
            if group is not None:
                dist.all_reduce(total, group=group)
            total /= count * ranks
        return {name: mean.to(buffers[name][0].dtype) for name, mean in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        step, anew = self.anew
        batches = list(self.batches)
        # A checkpoint can hold only tensors, strings and numbers.
        plain = all(isinstance(leaf, Tensor | str | int | float | None) for leaf in tree_leaves(batches))
        saved = batches if plain and sum(map(_bytes, batches)) <= MOST_SAVED else []
        return self.average.state_dict() | {
            "anew": anew if step == self.attachments.progress.step else {},
            "batches": saved,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        device = self.attachments.world.device
        self.batches.clear()
        self.batches.extend(tree_map_only(Tensor, lambda tensor: tensor.to(device), state_dict["batches"]))
        if state_dict["average"]:  # is empty before the first step
            self.add(0)  # creates the tensors that the state is loaded into
            self.average.load_state_dict(state_dict)


def average_statistics(attachments: Attachments, name: str, average: Average) -> None:
    """Give the averaged weights of the feature `name` their own statistics; does nothing if the model has no such
    buffers.

    Call this function after the call of `surround_evaluation` that swaps in the averaged weights, because statistics
    are recomputed with these weights.

    Args:
        average: object that computes the moving average of the training statistics.
    """
    statistics = NormStatistics(attachments, average)
    if statistics.norms:
        attachments.at(Phase.PROJECT, lambda: statistics.add(attachments.progress.step + 1))
        attachments.keep(_state_name(name), statistics, across="own", merge=lambda states, rank, size: dict(states[0]))
        attachments.surround_evaluation(statistics.evaluating)


def exported_statistics(states: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Tensor]:
    """Return the batch norms' statistics that belong to the averaged weights of the feature `name`, from a run's
    saved states; empty without batch norms."""
    state = states.get(_state_name(name), {})
    return {**state.get("average", {}), **state.get("anew", {})}


def _state_name(name: str) -> str:
    return f"{name}.statistics"


def _bytes(batch: Batch) -> int:
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
