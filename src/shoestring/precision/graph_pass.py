"""The graph pass of [precision.graph]: decides the number of bits of each operator in a step's joint graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from shoestring.precision.casts import CAST, Casts
from shoestring.precision.eight_bits import EightBitProducts, unfit
from shoestring.precision.lists import SUMMING, ListName, list_of
from shoestring.precision.narrowing import Bits, Flow, narrowed
from shoestring.precision.operators import computes_floats, dtypes_of, elements_of, group_of, operator_name, tensors_of


@dataclass(frozen=True)
class Narrowing:
    """Statistics of a graph after the pass."""

    bits: Bits[fx.Node]
    casts: int
    """Number of casts between float types in the changed graph."""
    narrow: int
    """Number of elements of the float tensors that operators compute in 16 bits; views and casts do not count."""
    elements: int
    """Number of elements of all float tensors that operators compute."""
    operators: dict[str, Counter[str]] = field(default_factory=dict)
    """Maps an operator's name to the number of its calls in 8 and in 16 bits and, by reason, in 32 bits."""
    eight: int = 0
    """Products in 8 bits."""


class Rules(NamedTuple):
    """The rules by which the numbers of bits of a graph's operators are chosen."""

    dtype: torch.dtype = torch.bfloat16
    """The 16-bit type."""
    forward: bool = False
    """Whether `infer` operators that follow products are narrowed too (forward propagation)."""
    wide: Collection[str] = ()
    """Names of operators that stay wide."""
    eight: bool = False
    """Whether large products of narrowed matrices are computed in 8 bits."""
    chosen: Mapping[str, int] = {}
    """Maps a group to the number of bits chosen from measured errors; other groups follow the lists and passes."""


DEFAULT = Rules()
"""bf16 as the lists and passes decide, without forward propagation."""


class OperatorGroup(NamedTuple):
    """Equal operators of a graph, whose number of bits is chosen for all of them together."""

    few: int
    """Number of bits if the group is narrowed: 8 for large products if 8-bit products are allowed, otherwise 16."""
    bits: int
    """Present number of bits of the group; 32 if not all of its operators are narrowed."""
    elements: int
    """Number of elements of the float tensors that the group computes."""
    product: bool
    """Whether the operators are matrix products, which fewer bits speed up directly."""

    @property
    def other(self) -> int:
        """The alternative number of bits, which a measurement compares with the present one."""
        return 2 * self.few if self.bits == self.few else self.few


def flow_of(graph: fx.Graph, *, forward: bool = False) -> tuple[Flow[fx.Node], dict[fx.Node, ListName | None]]:
    """Return a graph's float tensors as the `Flow` that `narrowed` reads, and the list of each tensor.

    `getitem` counts as a view. Tensors computed only from constants, such as the angles of rotary embeddings, are in no
    list. They stay wide themselves, but do not force the operators that read them to stay wide.

    Args:
        forward: for forward propagation, in which squares are in the list `infer`, because the sum that follows
            averages their rounding errors.
    """
    nodes, variable = list[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function":
            nodes.append(node)
        if computes_floats(node) if node.op == "placeholder" else any(one in variable for one in node.all_input_nodes):
            variable.add(node)
    lists: dict[fx.Node, ListName | None] = {}
    for node in nodes:
        picks = node.target is operator.getitem
        listed = "clear" if picks else list_of(operator_name(node)) if computes_floats(node) else None
        if forward and operator_name(node) == "pow" and node.args[1] in (1, 2):
            listed = "infer"
        wide = node not in variable or (operator_name(node) in SUMMING and not forward)
        lists[node] = None if wide else listed
    known = set(nodes)
    sources = {node: [source for source in node.all_input_nodes if source in known] for node in nodes}
    users = {node: [user for user in node.users if user in known] for node in nodes}
    sizes = {node: sum(map(elements_of, tensors_of(node))) if len(dtypes_of(node)) == 1 else 0 for node in nodes}
    repeated = {(one, user) for one in nodes for user in users[one] if 0 < sizes[one] < sizes[user]}
    return Flow(nodes, sources, users, repeated), lists


class _Decided(NamedTuple):
    """The decision for each node of a graph that has not been changed yet."""

    bits: Bits[fx.Node]
    lists: Mapping[fx.Node, ListName | None]
    groups: dict[fx.Node, str]
    """Maps each operator whose bits can be chosen from measured errors to the name of its group."""
    eight: frozenset[fx.Node]
    """Products in 8 bits."""


def _decide(graph: fx.Graph, rules: Rules) -> _Decided:
    flow, lists = flow_of(graph, forward=rules.forward)
    for node in lists:
        if operator_name(node) in rules.wide:
            lists[node] = "deny"
    groups = {
        node: group_of(node)
        for node, name in lists.items()
        if name in ("allow", "infer") or (operator_name(node) in SUMMING and name is None)
    }
    measured = {node: rules.chosen[name] < 32 for node, name in groups.items() if name in rules.chosen}
    bits = narrowed(flow, lists, forward=rules.forward, measured=measured)
    eight = set[fx.Node]()
    for node, name in lists.items() if rules.eight else ():
        if name == "allow" and node in bits.narrow:
            why = unfit(node) or ("" if rules.chosen.get(groups[node], 8) == 8 else "its measured error in 8 bits")
            bits.narrow[node] = why or "a large product"
            eight.update(() if why else (node,))
    return _Decided(bits, lists, groups, frozenset(eight))


def groups_of(graph: fx.Graph, rules: Rules) -> dict[str, OperatorGroup]:
    """Return the groups of a graph whose bits can be chosen from measured errors, with their present bits."""
    bits, lists, members, eight = _decide(graph, rules)
    groups = dict[str, OperatorGroup]()
    for node, name in members.items():
        product = lists[node] == "allow"
        few = 8 if rules.eight and product and not unfit(node) else 16
        now = 8 if node in eight else 16 if node in bits.narrow else 32
        before = groups.get(name, OperatorGroup(few, now, 0, product))
        elements = before.elements + sum(map(elements_of, tensors_of(node)))
        groups[name] = OperatorGroup(min(few, before.few), max(now, before.bits), elements, product)
    return groups


def narrow(module: fx.GraphModule, rules: Rules = DEFAULT) -> Narrowing:
    """Change a graph in place, so that it computes in the bits that the rules give. The data types of its inputs and
    outputs do not change.

    Raises:
        RuntimeError: an operator does not accept the data types of its inputs.
    """
    graph = module.graph
    decided = _decide(graph, rules)
    bits, casts = decided.bits, Casts(graph, rules.dtype)
    of_gradients = set[fx.Node]()  # the nodes that depend on the gradients of the graph's outputs
    for node in graph.nodes:
        first = node.op == "placeholder" and "tangents" in node.name
        if first or any(source in of_gradients for source in node.all_input_nodes):
            of_gradients.add(node)
    reasons, products = _by_operator(decided), EightBitProducts(casts, of_gradients)
    for node in [*graph.nodes]:
        if node.op == "output":
            casts.restore(node)
        elif node in decided.eight:
            products.convert(node)
        elif node.op == "call_function" and node.target is not operator.getitem:
            casts.convert(node, node in bits.narrow)
        elif node.op == "call_function":
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
    graph.eliminate_dead_code()
    counts = count_elements(graph, rules.dtype)
    return Narrowing(bits, count_casts(graph), *counts, reasons, len(decided.eight))


def count_casts(graph: fx.Graph) -> int:
    """Count the casts between float types, including casts in the traced program."""
    copies = {CAST, torch.ops.aten._to_copy.default}
    casts = 0
    for node in graph.nodes:
        if node.op == "call_function" and node.target in copies:
            before, after = dtypes_of(node.args[0])[0], dtypes_of(node)[0]
            casts += before is not None and after is not None and before.is_floating_point and before != after
    return casts


def count_elements(
    graph: fx.Graph, dtype: torch.dtype, among: Callable[[fx.Node], bool] = lambda _: True
) -> tuple[int, int]:
    """Return the number of elements of the float tensors that operators compute: those in a data type, and all; views
    and casts do not count."""
    narrow = total = 0
    for node in filter(among, graph.nodes):
        name = operator_name(node) if node.op == "call_function" else ""
        if name in ("", "_to_copy") or list_of(name) == "clear":
            continue
        for output in tensors_of(node):
            if output.is_floating_point():
                total += elements_of(output)
                narrow += elements_of(output) * (output.dtype == dtype)
    return narrow, total


def count_bytes(graph: fx.Graph) -> int:
    """Return the bytes that operators and casts read and write if none of them are fused; views copy nothing."""
    total = 0
    for node in graph.nodes:
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if returns and not any(one.alias_info for one in returns) and operator_name(node) != "_unsafe_view":
            total += sum(elements_of(one) * one.element_size() for one in tensors_of(node))
            total += sum(elements_of(one) * one.element_size() for at in node.all_input_nodes for one in tensors_of(at))
    return total


SHOWN = 16
"""Number of kinds of operators that `describe_bits` shows, in addition to those that the rules name."""


def describe_bits(graph: fx.Graph, rules: Rules = DEFAULT) -> Iterator[str]:
    """Yield lines that say which operators of a joint graph would get how many bits, and why; the graph is not
    changed."""
    decided = _decide(graph, rules)
    reasons = _by_operator(decided)
    floats = sum(name is not None and node.target is not operator.getitem for node, name in decided.lists.items())
    narrow_ones = sum(node.target is not operator.getitem for node in decided.bits.narrow)
    few = f"16 bits, and {len(decided.eight):,} of them multiply 8 bits" if rules.eight else "16 bits"
    yield f"with [precision.graph], {narrow_ones:,} of {floats:,} operators on 32-bit floats compute in {few}:"
    ordered = sorted(reasons.items(), key=lambda item: -item[1].total())
    asked = {name for name, counts in reasons.items() if name in rules.wide or any("measured" in why for why in counts)}
    shown = [item for place, item in enumerate(ordered) if place < SHOWN or item[0] in asked]
    for name, counts in shown:
        yield f"  {name}: " + "; ".join(f"{count} in {reason}" for reason, count in counts.most_common())
    if len(ordered) > len(shown):
        yield f"  and {len(ordered) - len(shown)} other kinds"


def _by_operator(decided: _Decided) -> dict[str, Counter[str]]:
    reasons = dict[str, Counter[str]]()
    for few, nodes in ((True, decided.bits.narrow), (False, decided.bits.wide)):
        for node, reason in nodes.items():
            if (name := operator_name(node)) and computes_floats(node):
                bits = 8 if node in decided.eight else 16 if few else 32
                reasons.setdefault(name, Counter())[f"{bits} bits: {reason}"] += 1
    return reasons
