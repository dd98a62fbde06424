"""Predicts the costs of a divided step on the ranks of one host: seconds of operators and moves, bytes of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from shoestring.core.errors import ConfigError
from shoestring.graph._torch import is_overload, returns_view
from shoestring.graph.instructions import exchange, move, take_shard
from shoestring.graph.placements import SUM, WHOLE, Placement, ShardingRule
from shoestring.graph.trace import StepGraph, arguments_of, inputs_of, outputs_of, producer_of
from shoestring.planning.cluster import Cluster, Collective, Device

aten = torch.ops.aten
_FREE = {aten._unsafe_view.default, aten.detach.default, aten.alias.default}
"""Operators that only return a view of their input although their signature does not say so."""
_LOOKUPS = {aten.embedding.default}
"""Operators that read only the entries that they return."""
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 4.0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 2, 10.0),
}
"""Operator -> (argument index of the queries, of the keys, FLOP per pair of positions and entry of a head)."""
_ADAM = 2.0
"""Bytes of AdamW's state per byte of trained weights."""
_UPDATE = 7.0
"""Bytes that AdamW reads and writes per byte of a weight: it reads four tensors and writes three."""


@dataclass(frozen=True)
class GraphCosts:
    """Costs on the ranks of one host, or on the ranks along one axis of the host's mesh.

    Args:
        flops: FLOP/s of a rank in matrix products. copy: bytes/s at which a rank copies.
        collectives: kind of collective -> its speed among the ranks; without reduce-scatter, half the time of an
            all-reduce is used.
        before: the costs along the earlier axes of the mesh.
    """

    ranks: int
    flops: float
    copy: float
    collectives: Mapping[str, Collective]
    before: tuple[GraphCosts, ...] = ()

    @staticmethod
    def of(cluster: Cluster) -> GraphCosts:
        """The costs on the only host of a cluster, with the lowest speeds that any of its ranks measured.

        Raises:
            ConfigError: the cluster has several hosts, one rank, or no measured collectives.
        """
        devices = cluster.devices
        if len({device.host for device in devices}) != 1 or len(devices) < 2:
            raise ConfigError(
                f"the cluster has {len(devices)} ranks on {len({device.host for device in devices})} hosts",
                hint="operators are split among several ranks of one host; measure one with `shoestring probe`",
            )
        kinds = {collective.kind: collective for collective in cluster.collectives if collective.ranks == len(devices)}
        if missing := sorted({"all-reduce", "all-gather", "all-to-all"} - kinds.keys()):
            raise ConfigError(f"the cluster has no measured {missing[0]}", hint="measure it with `shoestring probe`")
        return GraphCosts(
            len(devices),
            min(device.matmul_fp32 for device in devices),
            min(device.copy for device in devices),
            kinds,
        )

    def over(self, mesh: Sequence[int]) -> tuple[GraphCosts, ...]:
        """The costs along each axis if the ranks form a mesh; collectives are scaled as if the ranks were a ring.

        Raises:
            ConfigError: the mesh has another number of ranks, or an axis of fewer than two ranks.
        """
        if math.prod(mesh) != self.ranks or min(mesh) < 2:
            raise ConfigError(
                f"a mesh of {' × '.join(map(str, mesh))} ranks was asked for, and there are {self.ranks}",
                hint="each axis has at least two ranks, and their product is the number of ranks",
            )
        axes = list[GraphCosts]()
        for ranks in mesh:
            among = {kind: _among(one, self.ranks, ranks) for kind, one in self.collectives.items()}
            axes.append(replace(self, ranks=ranks, collectives=among, before=tuple(axes)))
        return tuple(axes)

    def along(self, axis: int) -> GraphCosts:
        """The costs along `axis`, which is this axis of the mesh or an earlier one."""
        return (*self.before, self)[axis]

    def move(self, source: Placement, target: Placement, nbytes: float) -> float:
        """Seconds to move a tensor of `nbytes` bytes to another placement; infinite to SUM, which no plan needs."""
        if source == target or (source == WHOLE and target >= 0):
            return 0.0
        if source == WHOLE or target == SUM:
            return math.inf
        if source == SUM:
            return self._seconds("all-reduce" if target == WHOLE else "reduce-scatter", nbytes)
        return self._seconds("all-gather" if target == WHOLE else "all-to-all", nbytes / self.ranks)

    def _seconds(self, kind: str, nbytes: float) -> float:
        if kind == "reduce-scatter" and kind not in self.collectives:
            return self.collectives["all-reduce"].seconds(nbytes) / 2
        return self.collectives[kind].seconds(nbytes)

    def operator(self, node: fx.Node, rule: ShardingRule) -> float:
        """Seconds that a rank takes for its share of an operator, including exchanges between ranks within it."""
        if node.target in (move, take_shard, exchange):
            return self._instruction(node, rule)
        exchanged = self._seconds("all-reduce", rule.exchange.nbytes) if rule.exchange else 0.0
        if is_view(node):
            return exchanged
        work = flop_of(node) / self.flops / (self.ranks if rule.divides else 1)
        pairs = [*zip(outputs_of(node), rule.outputs, strict=True)]
        if node.target in _LOOKUPS:
            pairs *= 2
        else:
            pairs += [(source.meta["val"], at) for source, at in zip(inputs_of(node), rule.inputs, strict=True)]
        moved = sum(self.local(tensor.nbytes, placement) for tensor, placement in pairs if tensor is not None)
        return max(work, moved / self.copy) + exchanged

    def _instruction(self, node: fx.Node, rule: ShardingRule) -> float:
        """Seconds of an exchange along an earlier axis of the mesh, if this axis divides its tensor by `rule`."""
        if node.target is take_shard:
            return 0.0
        if node.target is exchange:
            return self.along(axis_of(node)).operator(*node.meta["exchanged"])
        (tensor,), (_, source, target, _) = inputs_of(node), node.args
        assert isinstance(source, int) and isinstance(target, int)
        axis, nbytes = self.along(axis_of(node)), self.local(tensor.meta["val"].nbytes, rule.inputs[0])
        return axis.move(source, target, nbytes * (axis.ranks if source >= 0 else 1))

    def local(self, nbytes: float, placement: Placement) -> float:
        """Bytes that a rank holds of a tensor of `nbytes` bytes."""
        return nbytes / self.ranks if placement >= 0 else nbytes

    def update(self, nbytes: float, placement: Placement) -> float:
        """Seconds of the optimizer's step for a parameter of `nbytes` bytes."""
        return _UPDATE * self.local(nbytes, placement) / self.copy

    def held(self, nbytes: float, placement: Placement, trained: bool) -> float:
        """Bytes that a rank holds for a tensor; for a trained parameter, with its gradient and AdamW's state."""
        return self.local(nbytes, placement) * (2 + _ADAM if trained else 1)


_SHARES: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: ranks - 1,
    "all-to-all": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
}
"""Kind of collective -> function: number of ranks in a ring -> bytes that a rank sends per byte of its input."""


def _among(measured: Collective, ranks: int, fewer: int) -> Collective:
    """Scale a measured collective to fewer ranks, as if the ranks were connected in a ring."""
    if ranks == fewer or measured.kind not in _SHARES:
        return measured
    hops, share = (fewer - 1) / (ranks - 1), _SHARES[measured.kind](fewer) / _SHARES[measured.kind](ranks)

    def scaled(seconds: float) -> float:
        return min(seconds, measured.latency) * hops + max(seconds - measured.latency, 0.0) * share

    return replace(
        measured,
        ranks=fewer,
        latency=measured.latency * hops,
        bandwidth=measured.bandwidth / share,
        points=tuple((nbytes, scaled(seconds)) for nbytes, seconds in measured.points),
    )


def ring(ranks: int, *, latency: float, bandwidth: float, flops: float, copy: float, memory: int = 0) -> Cluster:
    """A host whose ranks are connected in a ring by links of this latency (seconds) and bandwidth (bytes/s)."""
    devices = tuple(
        Device(
            rank=rank,
            host="host",
            name="assumed",
            memory=memory,
            threads=1,
            matmul_fp32=flops,
            matmul_bf16=flops,
            copy=copy,
        )
        for rank in range(ranks)
    )
    hops = ranks - 1
    return Cluster(
        devices=devices,
        collectives=tuple(
            Collective(
                kind=kind,
                over=("local",),
                ranks=ranks,
                latency=latency * hops * (2 if kind == "all-reduce" else 1),
                bandwidth=bandwidth / share(ranks),
            )
            for kind, share in _SHARES.items()
        ),
    )


def is_view(node: fx.Node) -> bool:
    """Whether an operator only returns a view of its input, and computes nothing."""
    return node.target in _FREE or (is_overload(node.target) and returns_view(node.target))


def axis_of(instruction: fx.Node) -> int:
    """The mesh axis along which ranks exchange in an instruction: its last argument."""
    axis = instruction.args[-1]
    assert isinstance(axis, int)
    return axis


def flop_of(node: fx.Node) -> float:
    """FLOP of matrix products and convolutions in an operator; 0 for other operators, which are bandwidth-bound."""
    args, kwargs = arguments_of(node)
    if node.target in _ATTENTION:
        queries, keys, factor = _ATTENTION[node.target]
        return factor * math.prod(args[queries].shape) * args[keys].shape[-2]
    formula: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=node.meta["val"]))


def saved_tensors(step: StepGraph) -> dict[fx.Node, tuple[int, ...]]:
    """Tensors that the forward pass saves for the backward pass, without parameters and inputs.

    Returns:
        Operator -> indices of its outputs that the backward pass reads, directly or through a view.
    """
    saved = dict[fx.Node, set[int]]()
    for node in step.backward:
        for source in node.all_input_nodes:
            owner, place = _owner_of(source)
            if source not in step.backward and owner.op == "call_function":
                saved.setdefault(owner, set()).add(place)
    return {node: tuple(sorted(saved[node])) for node in step.operators if node in saved}


def _owner_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The operator that computed a tensor before any views of it, and the index of its output."""
    owner, place = producer_of(node)
    while owner.op == "call_function" and is_view(owner):
        owner, place = producer_of(inputs_of(owner)[0])
    return owner, place
