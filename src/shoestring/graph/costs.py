"""What a divided step costs on the ranks of one host: seconds of operators and of moves between placements, bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from shoestring.core.errors import ConfigError
from shoestring.graph._torch import returns_view
from shoestring.graph.placements import SUM, WHOLE, Placement, ShardingRule
from shoestring.graph.trace import JointTrace, arguments_of, inputs_of, outputs_of, producer_of
from shoestring.planning.cluster import Cluster, Collective, Device

aten = torch.ops.aten
_FREE = {aten._unsafe_view.default, aten.detach.default, aten.alias.default}
"""Operators that only make another view of their input, beside those whose signature says so."""
_LOOKUPS = {aten.embedding.default}
"""Operators that read only the entries that they return."""
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 4.0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 2, 10.0),
}
"""Operator -> places of queries and keys, and FLOP for each pair of positions and each number of a head."""
_ADAM = 2.0
"""Bytes of AdamW's state for each byte of trained weights."""
_UPDATE = 7.0
"""Times that AdamW reads or writes each byte of a weight: four tensors are read, and three written."""


@dataclass(frozen=True)
class GraphCosts:
    """Costs on the ranks of one host.

    Args:
        flops: matrix products, FLOP/s of a rank. copy: bytes that a rank copies in a second.
        collectives: kind of collective -> its speed among the ranks; a missing reduce-scatter takes half an all-reduce.
    """

    ranks: int
    flops: float
    copy: float
    collectives: Mapping[str, Collective]

    @staticmethod
    def of(cluster: Cluster) -> GraphCosts:
        """The costs on a cluster's one host, as its slowest rank measured them.

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

    def move(self, source: Placement, target: Placement, nbytes: float) -> float:
        """Seconds to move a tensor of so many bytes to another placement; infinite if nothing needs such a move."""
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
        """Seconds in which a rank computes its part of an operator, with what the ranks exchange within it."""
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

    def local(self, nbytes: float, placement: Placement) -> float:
        """Bytes that a rank has of a tensor."""
        return nbytes / self.ranks if placement >= 0 else nbytes

    def update(self, nbytes: float, placement: Placement) -> float:
        """Seconds of the optimizer's step for a parameter."""
        return _UPDATE * self.local(nbytes, placement) / self.copy

    def held(self, nbytes: float, placement: Placement, trained: bool) -> float:
        """Bytes that a rank holds for a parameter: with its gradient and AdamW's state if it is trained."""
        return self.local(nbytes, placement) * (2 + _ADAM if trained else 1)


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
    kinds = {
        "all-reduce": 2 * hops / ranks,
        "all-gather": hops,
        "all-to-all": hops / ranks,
        "reduce-scatter": hops / ranks,
    }
    return Cluster(
        devices=devices,
        collectives=tuple(
            Collective(
                kind=kind,
                over=("local",),
                ranks=ranks,
                latency=latency * hops * (2 if kind == "all-reduce" else 1),
                bandwidth=bandwidth / share,
            )
            for kind, share in kinds.items()
        ),
    )


def is_view(node: fx.Node) -> bool:
    """Whether an operator only views its input, and computes nothing."""
    return node.target in _FREE or returns_view(node.target)


def flop_of(node: fx.Node) -> float:
    """FLOP of matrix products and convolutions in an operator; 0 for others, which are bound by memory."""
    args, kwargs = arguments_of(node)
    if node.target in _ATTENTION:
        queries, keys, factor = _ATTENTION[node.target]
        return factor * math.prod(args[queries].shape) * args[keys].shape[-2]
    formula: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=node.meta["val"]))


def saved_tensors(step: JointTrace) -> dict[fx.Node, tuple[int, ...]]:
    """What the forward pass leaves for the backward pass, beside parameters and inputs.

    Returns:
        Operator -> places of its outputs that the backward pass reads, as they are or through a view.
    """
    saved = dict[fx.Node, set[int]]()
    for node in step.backward:
        for source in node.all_input_nodes:
            owner, place = _owner_of(source)
            if source not in step.backward and owner.op == "call_function":
                saved.setdefault(owner, set()).add(place)
    return {node: tuple(sorted(saved[node])) for node in step.operators if node in saved}


def _owner_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The operator that computed the memory of a tensor, behind views of it."""
    owner, place = producer_of(node)
    while owner.op == "call_function" and is_view(owner):
        owner, place = producer_of(inputs_of(owner)[0])
    return owner, place
