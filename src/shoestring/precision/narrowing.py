"""Decides which operators of a graph compute in 16 bits: TensorFlow's passes, for any graph whose nodes are in lists.

The passes, in this order:
1. `allow` nodes are narrowed.
2. `deny` nodes stay wide. So do `infer` nodes that read them, directly or through other `infer` and `clear` nodes.
3. `infer` and `clear` nodes on a path between two narrowed nodes are narrowed.
4. `clear` nodes connected to narrowed nodes, directly or through other `clear` nodes, are narrowed.
5. With forward propagation, `infer` and `clear` nodes that read narrowed nodes are narrowed. Pass 2 then ignores
   operands that are broadcast along a dimension, such as the statistics that a norm divides by, because rounding such
   an operand changes all numbers of a row by the same factor.
6. Decisions from measured errors (choosing.py) override passes 1 to 5; `clear` nodes follow their neighbours.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Mapping, Sequence, Set
from typing import Generic, NamedTuple, TypeVar

from shoestring.precision.lists import ListName

N = TypeVar("N", bound=Hashable)


class Flow(NamedTuple, Generic[N]):
    """A graph of tensors: the nodes in order, the nodes that each node reads, and the nodes that read it.

    `repeated` holds the edges (source, user) along which the source is broadcast, because the user's result is larger.
    """

    nodes: Sequence[N]
    sources: Mapping[N, Sequence[N]]
    users: Mapping[N, Sequence[N]]
    repeated: Set[tuple[N, N]] = frozenset()


class Bits(NamedTuple, Generic[N]):
    """The decision, with the reason in a few words for each narrowed node and for each node that stays wide."""

    narrow: dict[N, str]
    wide: dict[N, str]


def narrowed(
    flow: Flow[N],
    lists: Mapping[N, ListName | None],
    *,
    forward: bool = False,
    measured: Mapping[N, bool] | None = None,
) -> Bits[N]:
    """Decide which nodes compute in 16 bits. A node in no list stays wide, and no pass goes through it.

    Args:
        lists: maps each node to the list of its operator.
        forward: whether to run pass 5.
        measured: for pass 6, maps a node to whether it is narrowed; for missing nodes the passes decide.
    """

    def of(*names: ListName | None) -> set[N]:
        return {node for node in flow.nodes if lists.get(node) in names}

    deny, infer, clear = of("deny"), of("infer"), of("clear")
    # Clear nodes that lead to no deny or infer node pass denied numbers to no operator that computes with them, so they
    # need not stay wide.
    before_numbers = _reached(deny | infer, flow.sources, clear)
    carried = flow.users
    if forward:
        carried = {node: [one for one in users if (node, one) not in flow.repeated] for node, users in carried.items()}
    denied = _reached(deny, carried, before_numbers & (infer | clear))
    wide = dict.fromkeys(denied, "after an operator that needs 32 bits")
    wide |= dict.fromkeys(deny, "needs 32 bits") | dict.fromkeys(of(None), "in no list")

    narrow = {node: "a product" for node in flow.nodes if lists.get(node) == "allow"}
    after = _reached(narrow, flow.users, (infer | clear) - denied)
    between = _reached(narrow, flow.sources, after - narrow.keys())
    narrow |= {node: "between products" for node in between if node not in narrow}
    computed = {*narrow}  # nodes whose values are computed from products, unlike those that only lead to products
    beside = _reached(narrow, flow.sources, clear - denied) | _reached(narrow, flow.users, clear - denied)
    narrow |= {node: "moves narrowed numbers" for node in beside if node not in narrow}
    if forward:
        onward = _reached(computed, flow.users, (infer | clear) - denied)
        narrow |= {node: "after a product" for node in onward if node not in narrow}
    if measured:
        chosen = {node: "its measured error is small" for node, few in measured.items() if few}
        wide |= {node: "its measured error is too large" for node, few in measured.items() if not few}
        narrow = {node: why for node, why in narrow.items() if node not in clear and measured.get(node, True)}
        narrow = {**chosen, **narrow}
        # A clear node with a single source only moves that tensor's numbers, so it can follow its neighbours even if
        # pass 2 keeps it wide.
        moving = {node for node in clear if node not in denied or len(flow.sources[node]) == 1}
        # Widened nodes must not read rounded numbers, even if other nodes read the same view.
        unrounded = _reached({node for node, few in measured.items() if not few}, flow.sources, clear)
        before = _reached(narrow, flow.sources, clear - denied - unrounded)
        beside = _reached(narrow, flow.users, moving) | before
        narrow |= {node: "moves narrowed numbers" for node in beside if node not in narrow}
        wide = {node: why for node, why in wide.items() if node not in narrow}
    left = (node for node in flow.nodes if node not in narrow and node not in wide)
    return Bits(narrow, wide | dict.fromkeys(left, "not between products"))


def _reached(roots: Collection[N], neighbours: Mapping[N, Sequence[N]], through: Container[N]) -> set[N]:
    """Return the roots, and the nodes of `through` that can be reached from them along edges within `through`."""
    reached, waiting = set(roots), list(roots)
    while waiting:
        for node in neighbours[waiting.pop()]:
            if node not in reached and node in through:
                reached.add(node)
                waiting.append(node)
    return reached
