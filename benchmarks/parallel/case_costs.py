"""Costs of a model's parts and of collectives, computed from shapes and stated rates instead of measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoestring.models.loading import build_model
from shoestring.parallel.pipeline.stage import Layout
from shoestring.planning.cluster import Collective
from shoestring.planning.step import GroupShape, Kind, Links, ModelCosts, PartCosts

_LINEAR = (nn.Linear, nn.Conv2d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm)
_FP32 = 4
_SIZES = (1, 64)
"""Micro-batch sizes between which times are lines; the line also holds outside of them."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The device of a rank."""

    name: str
    rate: float
    """FLOP/s that training reaches in matrix multiplications and convolutions."""
    moved: float
    """Bytes per second that memory-bound operators read and write."""
    gib: float
    activation: int
    """Bytes of an element of the activations that are held for the backward pass: 2 for bf16, 4 for fp32."""
    overhead: float
    """Seconds of a forward pass through a block that do not depend on the number of samples; twice in backward."""
    kind: str = "cuda"


@dataclass(frozen=True, kw_only=True)
class CaseCluster:
    """Hosts that a network connects, with equal ranks."""

    hosts: int
    ranks: int
    """Number of ranks of each host."""
    mbits: float
    """Bandwidth of each host's link in Mbit/s, in each direction."""
    processor: Processor
    inside: float = 10e9
    """Bytes per second between two ranks of a host, in each direction."""
    usable: float = 0.95
    """Fraction of the bandwidth between hosts that carries payload."""
    latency: float = 50e-6
    """Seconds of an empty message between hosts."""
    latency_inside: float = 10e-6
    """Seconds of an empty message between ranks of a host."""

    @property
    def label(self) -> str:
        return f"{self.hosts}x{self.ranks}, {self.bandwidth}, {self.processor.name}"

    @property
    def bandwidth(self) -> str:
        return f"{self.mbits:g} Mbit/s" if self.mbits < 1000 else f"{self.mbits / 1000:g} Gbit/s"


@dataclass(frozen=True)
class PartShape:
    """What a part of a model computes and holds, for one sample."""

    flops: float = 0.0
    """Operations of a forward pass; a backward pass has twice as many."""
    elements: float = 0.0
    """Elements of the activations that are held: inputs and outputs of linear layers, convolutions and norms."""
    trained: int = 0
    """Bytes of trained weights."""


@dataclass(frozen=True)
class ModelShape:
    """The shapes of a model's parts, for one sample."""

    blocks: tuple[PartShape, ...]
    before: PartShape
    behind: PartShape
    hidden: tuple[int, ...]
    """Elements of the hidden states before the first block, and after each block."""
    tied: int
    outputs: int
    """Elements of the model's output."""


def shape_of(model: nn.Module, inputs: Tensor, attended: float) -> ModelShape:
    """The shapes of a model on the meta device, from a forward pass.

    Args:
        inputs: one sample. attended: fraction of the positions that a position attends to: 0.5 for causal attention,
            0 without attention.
    """
    layout = Layout(model)
    with torch.no_grad():
        observed = _Observed(model, layout.blocks)
        outputs = observed.run(inputs)
    flops = list(observed.flops)
    for index, hidden in enumerate(observed.hidden[1:], 1):
        if attended:  # two products of queries, keys and values: 2 T S C operations each
            _, length, width = hidden.shape
            flops[index] += 4 * length * attended * length * width
    elements, weights = observed.elements(), [_bytes_of(block.parameters()) for block in layout.blocks]
    both = layout.before & layout.behind
    if both:  # the output layer, whose weight is the embedding's, is no module of its own
        flops[-1] += 2 * outputs.numel() * observed.hidden[-1].shape[-1]
        elements[-1] += outputs.numel()
    before, *blocks, behind = (
        PartShape(*part)
        for part in zip(
            flops,
            elements,
            (_bytes_of(layout.before - both), *weights, _bytes_of(layout.behind)),
            strict=True,
        )
    )
    sizes = tuple(hidden.numel() for hidden in observed.hidden)
    return ModelShape(tuple(blocks), before, behind, sizes, _bytes_of(both), outputs.numel())


class _Observed:
    """Observes the layers of a model in a forward pass; part 0 lies before the blocks, the last part behind them."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.model, self.last = model, len(blocks) + 1
        self.flops = [0.0] * (len(blocks) + 2)
        self.hidden = list[Tensor]()
        self._held: list[dict[int, Tensor]] = [{} for _ in self.flops]  # keeps tensors alive, so that ids are unique
        self._part = 0
        self._hooks = list[Any]()
        for index, block in enumerate(blocks):
            self._hooks.append(block.register_forward_pre_hook(self._entering(index + 1), with_kwargs=True))
            self._hooks.append(block.register_forward_hook(self._left))
        for module in model.modules():
            if isinstance(module, (*_LINEAR, *_NORMS)):
                self._hooks.append(module.register_forward_hook(self._layer))

    def run(self, inputs: Tensor) -> Tensor:
        try:
            output = self.model(inputs)
        finally:
            for hook in self._hooks:
                hook.remove()
        return output if isinstance(output, Tensor) else output.logits

    def elements(self) -> list[float]:
        return [float(sum(tensor.numel() for tensor in held.values())) for held in self._held]

    def _entering(self, part: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._part = part
            if not self.hidden:
                self.hidden.append(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))

        return hook

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._part = self.last
        self.hidden.append(output[0] if isinstance(output, tuple) else output)

    def _layer(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        for tensor in (args[0], output):
            self._held[self._part][id(tensor)] = tensor
        if isinstance(module, _LINEAR):
            self.flops[self._part] += 2 * output.numel() * module.weight[0].numel()


def _bytes_of(parameters: Any) -> int:
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


@cache
def _shape(model: str, arguments: tuple[tuple[str, Any], ...], sample: tuple[int, ...], attended: float) -> ModelShape:
    kind = torch.long if len(sample) == 1 else torch.float32
    with torch.device("meta"):
        return shape_of(build_model(model, dict(arguments), {}, 0), torch.zeros(1, *sample, dtype=kind), attended)


@dataclass(frozen=True, kw_only=True)
class CaseModel:
    """A model of the map: what [run] and [model] name, and the shape of a sample."""

    name: str
    model: str
    arguments: Mapping[str, Any] = field(hash=False)
    sample: tuple[int, ...]
    """Shape of a sample: (tokens,), or (channels, height, width)."""
    attended: float
    """See `shape_of`."""
    batches: tuple[int, int, int]

    @property
    def shape(self) -> ModelShape:
        return _shape(self.model, tuple(self.arguments.items()), self.sample, self.attended)

    @property
    def weights(self) -> int:
        shape = self.shape
        return sum(part.trained for part in (shape.before, *shape.blocks, shape.behind)) // _FP32


def model_costs(model: CaseModel, processor: Processor) -> ModelCosts:
    """The costs of a model's parts: operations over the processor's rate, and a fixed time for each block."""
    shape = model.shape

    def part(one: PartShape, overhead: float, more: float = 0.0) -> PartCosts:
        """Costs of a part; `more` is the number of bytes that it holds besides its activations, for one sample."""
        held = one.elements * processor.activation + more
        return PartCosts(
            forward=tuple(overhead + size * one.flops / processor.rate for size in _SIZES),
            backward=tuple(2 * (overhead + size * one.flops / processor.rate) for size in _SIZES),
            held=tuple(size * held for size in _SIZES),
            trained=one.trained,
        )

    return ModelCosts(
        samples=_SIZES,
        blocks=tuple(part(block, processor.overhead) for block in shape.blocks),
        before=part(shape.before, processor.overhead),
        behind=part(shape.behind, processor.overhead, _FP32 * shape.outputs),  # the loss holds log-probabilities
        hidden=tuple(_FP32 * elements for elements in shape.hidden),  # with autocast, sums of residuals are fp32
        tied=shape.tied,
        scored=processor.activation * shape.outputs,
        optimizer=7 / processor.moved,  # AdamW reads a weight, its gradient and both moments, and writes all but one
        state=2.0,
        moved=processor.moved,
    )


class _Speeds(dict[tuple[Kind, GroupShape], Collective]):
    """Speeds of collectives on a cluster, by kind and shape of the group, computed when they are first asked for."""

    def __init__(self, cluster: CaseCluster) -> None:
        super().__init__()
        self.cluster = cluster

    def __missing__(self, key: tuple[Kind, GroupShape]) -> Collective:
        self[key] = collective(self.cluster, *key)
        return self[key]


def collective(cluster: CaseCluster, kind: Kind, group: GroupShape) -> Collective:
    """The speed of a collective in every group of a shape at once, by the algorithm of a ring.

    Groups that span the same hosts share the hosts' links. A message is what `planning.links.time_collective` says.
    """
    ranks, across = group.ranks, group.hosts > 1
    groups = cluster.ranks * group.hosts / ranks if across else 1
    between = cluster.mbits * 1e6 / 8 * cluster.usable / groups
    rate = min(between, cluster.inside) if across else cluster.inside
    latency = cluster.latency if across else cluster.latency_inside
    passed = (ranks - 1) / ranks  # of a whole tensor, the bytes that a rank sends in one turn around the ring
    sent, messages = {
        "all-reduce": (2 * passed, 2 * (ranks - 1)),
        "reduce-scatter": (passed, ranks - 1),
        "all-gather": (ranks - 1, ranks - 1),
        # not a ring: each rank sends its shares straight to the others, those on other hosts over its host's link
        "all-to-all": (max(passed, (1 - 1 / group.hosts) * ranks / group.hosts), ranks - 1),
        "message": (1, 1),
        "swap": (1, 1),
    }[kind]
    return Collective(kind=kind, over=(), ranks=ranks, latency=messages * latency, bandwidth=rate / sent)


def links_of(cluster: CaseCluster) -> Links:
    """The speeds of all collectives on a cluster."""
    return Links(_Speeds(cluster))
