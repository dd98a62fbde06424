"""How a method of sparse training hangs in a job: patched layers, work around the step, and what must survive."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoestring._torch import is_fake
from shoestring.core.feature import Phase, Seam
from shoestring.sparse import feed_forward, semi_structured
from shoestring.sparse.mvue import next_key
from shoestring.sparse.operands import SparseOperand
from shoestring.sparse.product import SparseUnits, autocast_dtype, on_units, product
from shoestring.sparse.report import FUSED, MaskMetrics
from shoestring.sparse.shards import why_apart

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.sparse.settings import Sparsity

log = logging.getLogger("shoestring")


class SparseMethod(Protocol):
    """What computes sparse weights; `name` is that of a layer."""

    dense: bool  # whether layers are dense now
    fp8: bool

    @property
    def two_four(self) -> bool:
        """Whether all weights are 2:4 now, which products on sparse units take for granted."""
        ...

    def prepare(self, name: str, weight: Tensor) -> None:
        """Make the state of a layer."""

    def forget(self, name: str) -> None:
        """Leave a layer out after all."""

    def weight(self, name: str, weight: Tensor) -> Tensor:
        """What the layer computes with, with gradients to all of `weight`."""
        ...

    def pruned(
        self, name: str, weight: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the layer computes with, without gradients; see `operands.Pruning`."""
        ...

    def start(self) -> None:
        """Fill the state from the weights, once ranks have the same."""

    def before_step(self) -> None:
        """Before the first forward pass of a step."""

    def before_update(self) -> None:
        """Between clipping and the optimizer's step."""

    def mask(self, name: str, weight: Tensor) -> Tensor:
        """The mask that these rows of a weight, this rank's, would have now; packed."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def install(job: Job, settings: Sparsity, seam: Seam) -> None:
    """Attach at MODEL, and then at STEP."""
    attached = job.carry(settings, lambda: SparseLayers(job, settings))
    if seam is Seam.MODEL:
        attached.patch()
    else:
        attached.start()


class SparseLayers:
    """The sparse layers of one job."""

    def __init__(self, job: Job, settings: Sparsity) -> None:
        self.job, self.settings, self.choice = job, settings, settings.choose(job)
        self.method = settings.method(job)
        self.calls: dict[str, Tensor] = {}  # forward passes of each layer so far, by which draws differ
        self.numbers = {name: number for number, name in enumerate(self.choice.sparse)}
        self.place = job.world.index_over(job.data_axes)
        self.operands: dict[str, SparseOperand] = {}  # where there are sparse units
        self.units: dict[str, SparseUnits] = {}
        self.fused_first: set[str] = set()  # layers before an activation that is fused
        self.fused_last: set[str] = set()

    def patch(self) -> None:
        for name, layer in self.choice.sparse.items():
            self.method.prepare(name, layer.weight)
            self.calls[name] = torch.zeros((), dtype=torch.int64, device=layer.weight.device)
            self.job.patch(layer, partial(self.forward, name, layer))
        if semi_structured.available(self.job.world.device):
            self._fuse()
            self._prepare_units()

    def _fuse(self) -> None:
        """Fuse the activations of feed-forward layers, and let their products read and write by columns."""
        for name, found in feed_forward.find(self.job.module, self.choice.sparse):
            self.job.patch(found.module, found.forward())
            prefix = f"{name}." if name else ""
            self.fused_first |= {prefix + each for each in found.first}
            self.fused_last.add(prefix + found.last)
        self.job.trace.facts[FUSED] = float(len(self.fused_last))

    def forward(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        if self.method.dense or name in self.choice.dense:
            return F.linear(x, layer.weight, layer.bias)
        units = self.units.get(name) if self.method.two_four and on_units(x, layer.weight) else None
        weight = layer.weight if units else self.method.weight(name, layer.weight)
        if units and not torch.compiler.is_compiling() and is_fake(weight) and self._is_whole(name):
            self.operands[name].imagine(weight, autocast_dtype(x) or weight.dtype)
        key = self.key(name) if self.settings.mvue and torch.is_grad_enabled() else None
        groups = -(-(x.numel() // x.shape[-1]) // 4)
        return product(x, weight, layer.bias, key, first=self.place * groups, fp8=self.method.fp8, units=units)

    def key(self, name: str) -> Tensor:
        """Another one for every layer and forward pass."""
        return next_key(self.calls[name], self.settings.seed * 2**20 + self.numbers[name])

    def start(self) -> None:
        """Once it is known what is trained, and where."""
        job, trained = self.job, self.job.trained
        for name in list(self.choice.sparse):
            if why := why_apart(trained[f"{name}.weight"], rows_too=self.settings.rows_too):
                self._leave_dense(name, why)
        with torch.no_grad():
            self.method.start()
        alike = all(axis in job.replicas for axis in job.data_axes if job.world.axes.get(axis, 1) > 1)
        job.keep(self.settings.name, self, across="same" if alike else "own")  # replicas that train alone differ
        for name, operand in self.operands.items():
            operand.remembered = self._is_whole(name)
        job.at(Phase.FORWARD, self.method.before_step)
        job.at(Phase.FORWARD, self._forget_operands)  # masks are others
        job.at(Phase.GRAD, self._forget_operands)  # weights will be
        job.at(Phase.GRAD, self.method.before_update)
        job.at(Phase.CAPTURE, MaskMetrics(job, self.choice, self.method).read)

    def _prepare_units(self) -> None:
        for name in self.choice.sparse:
            operand = SparseOperand(partial(self.method.pruned, name), both=self.settings.rows_too)
            self.operands[name] = operand
            self.units[name] = SparseUnits(operand.number, name in self.fused_first, name in self.fused_last)

    def _is_whole(self, name: str) -> bool:
        """Whether this rank has all rows of a weight at all times."""
        return not isinstance(self.job.trained[f"{name}.weight"], DTensor)

    def _forget_operands(self) -> None:
        for operand in self.operands.values():
            operand.forget()

    def _leave_dense(self, name: str, why: str) -> None:
        log.warning("sparse: `%s` stays dense: %s", name, why)
        self.choice.dense[name] = why
        del self.choice.sparse[name]
        self.method.forget(name)
        del self.calls[name]
        self.operands.pop(name, None)
        self.units.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        return self.method.state_dict() | {"calls": dict(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.method.load_state_dict(state_dict)
        for name, calls in self.calls.items():
            calls.copy_(state_dict["calls"][name])
