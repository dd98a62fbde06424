"""Attaches sparse training to a job: patches linear layers, adds hooks around the optimizer step, and saves state."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring._torch import is_fake
from shoestring.core.feature import Phase, Seam
from shoestring.sharded import is_sharded
from shoestring.sparse import feed_forward, semi_structured
from shoestring.sparse.mvue import next_key
from shoestring.sparse.operands import SparseOperand
from shoestring.sparse.product import SparseUnits, autocast_dtype, on_units, product
from shoestring.sparse.report import FUSED, MaskMetrics
from shoestring.sparse.shards import why_apart

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.sparse.settings import Sparsity

log = logging.getLogger("shoestring")


class SparseMethod(Protocol):
    """An algorithm that computes sparse weights from dense weights. In all methods, `name` is the name of a layer."""

    dense: bool  # whether layers use dense weights at present
    fp8: bool  # whether the inputs of products are rounded to 8 bits

    @property
    def two_four(self) -> bool:
        """Whether all sparse weights are 2:4 at present, as GPUs' sparse units require."""
        ...

    def prepare(self, name: str, weight: Tensor) -> None:
        """Create this algorithm's state for a layer."""

    def forget(self, name: str) -> None:
        """Drop the state of a layer that turned out to stay dense."""

    def weight(self, name: str, weight: Tensor) -> Tensor:
        """Compute the sparse weight differentiably: the gradient reaches all entries of `weight`."""
        ...

    def pruned(
        self, name: str, weight: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The sparse weight and its transpose, without gradients; each is None unless requested (see
        `operands.Pruning`)."""
        ...

    def start(self) -> None:
        """Initialise the state from the initial weights, which are already equal on all ranks."""

    def before_step(self) -> None:
        """Called before the first forward pass of a step."""

    def before_update(self) -> None:
        """Called after gradient clipping and before the optimizer's step."""

    def mask(self, name: str, weight: Tensor) -> Tensor:
        """Compute the mask of `weight` (this rank's rows) from its current values, packed to bits."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def install(attachments: Attachments, settings: Sparsity, seam: Seam) -> None:
    """Attach the part of a method that belongs to `seam`: MODEL patches layers, STEP adds hooks around optimizer
    steps."""
    attached = attachments.carry(settings, lambda: SparseLayers(attachments, settings))
    if seam is Seam.MODEL:
        attached.patch()
    else:
        attached.start()


class SparseLayers:
    """The sparse layers of one job, with the state that checkpoints save."""

    def __init__(self, attachments: Attachments, settings: Sparsity) -> None:
        self.attachments, self.settings, self.choice = attachments, settings, settings.choose(attachments)
        self.method = settings.method(attachments)
        # Random draws depend only on seed, layer, forward pass and token group, so that several ranks draw the same
        # numbers as one process.
        self.calls: dict[str, Tensor] = {}  # number of forward passes of each layer
        self.numbers = {name: number for number, name in enumerate(self.choice.sparse)}
        self.place = attachments.world.index_over(attachments.data_axes)
        self.operands: dict[str, SparseOperand] = {}  # `operands` and `units` are empty without sparse units
        self.units: dict[str, SparseUnits] = {}

    def patch(self) -> None:
        """Replace the layers' forward passes; if the device has sparse units, fuse activations and create packed
        operands."""
        for name, layer in self.choice.sparse.items():
            self.method.prepare(name, layer.weight)
            self.calls[name] = torch.zeros((), dtype=torch.int64, device=layer.weight.device)
            self.attachments.patch(layer, partial(self.forward, name, layer))
        if not semi_structured.available(self.attachments.world.device):
            return
        fused_first: set[str] = set()  # layers whose outputs go to a fused activation
        fused_last: set[str] = set()  # layers whose inputs come from a fused activation
        for name, gated in feed_forward.find(self.attachments.module, self.choice.sparse):
            self.attachments.patch(gated.module, gated.forward())
            prefix = f"{name}." if name else ""
            fused_first |= {prefix + first for first in gated.first}
            fused_last.add(prefix + gated.last)
        self.attachments.trace.facts[FUSED] = float(len(fused_last))
        for name in self.choice.sparse:
            operand = SparseOperand(partial(self.method.pruned, name), both=self.settings.rows_too)
            self.operands[name] = operand
            # Tensors before and after a fused activation are column-major: products, activation and draws are cheapest
            # in that layout.
            self.units[name] = SparseUnits(operand.number, name in fused_first, name in fused_last)

    def forward(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        """The forward pass of a sparse layer."""
        if self.method.dense or name in self.choice.dense:
            return F.linear(x, layer.weight, layer.bias)
        units = self.units.get(name) if self.method.two_four and on_units(x, layer.weight) else None
        weight = layer.weight if units else self.method.weight(name, layer.weight)
        if units and not torch.compiler.is_compiling() and is_fake(weight) and self._is_whole(name):
            # Fake tensors mean a dry run that predicts memory. Products on fake tensors pack no weights.
            self.operands[name].imagine(weight, autocast_dtype(x) or weight.dtype)
        draws = self.settings.mvue and layer.training and torch.is_grad_enabled()
        key = self.key(name) if draws else None
        groups = -(-(x.numel() // x.shape[-1]) // 4)  # groups of four tokens on each rank
        return product(x, weight, layer.bias, key, first=self.place * groups, fp8=self.method.fp8, units=units)

    def key(self, name: str) -> Tensor:
        """The key of the next random draws; every layer and forward pass gets a new key."""
        return next_key(self.calls[name], self.settings.seed * 2**20 + self.numbers[name])

    def start(self) -> None:
        """Start the algorithm, and add its hooks around the optimizer step. Features of Seam.SHARD have already been
        applied."""
        attachments, trained = self.attachments, self.attachments.trained
        for name in list(self.choice.sparse):
            if why := why_apart(trained[f"{name}.weight"], rows_too=self.settings.rows_too):
                log.warning("sparse: `%s` stays dense: %s", name, why)
                self.choice.dense[name] = why
                del self.choice.sparse[name]
                self.method.forget(name)
                del self.calls[name]
                self.operands.pop(name, None)
                self.units.pop(name, None)
        with torch.no_grad():
            self.method.start()
        axes = [axis for axis in attachments.data_axes if attachments.world.axes.get(axis, 1) > 1]
        alike = all(axis in attachments.replicas for axis in axes)  # with local steps, masks differ between ranks
        attachments.keep(self.settings.name, self, across="same" if alike else "own")
        for name, operand in self.operands.items():
            operand.remembered = self._is_whole(name)
        attachments.at(Phase.FORWARD, self.method.before_step)
        attachments.at(Phase.FORWARD, self._forget_operands)  # `before_step` may have changed masks
        attachments.at(Phase.GRAD, self._forget_operands)  # free memory before the optimizer changes weights
        attachments.at(Phase.GRAD, self.method.before_update)
        attachments.at(Phase.CAPTURE, MaskMetrics(attachments, self.choice, self.method).read)

    def _is_whole(self, name: str) -> bool:
        """Whether a weight is unsharded, so that this rank always has all rows."""
        return not is_sharded(self.attachments.trained[f"{name}.weight"])

    def _forget_operands(self) -> None:
        for operand in self.operands.values():
            operand.forget()

    def state_dict(self) -> dict[str, Any]:
        return self.method.state_dict() | {"calls": dict(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.method.load_state_dict(state_dict)
        for name, calls in self.calls.items():
            calls.copy_(state_dict["calls"][name])
