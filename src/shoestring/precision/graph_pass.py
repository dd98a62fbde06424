"""The pass of [precision.graph] over the joint graph of a step: decides what has 16 bits, and inserts the casts."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shoestring._torch import tree_map_only
from shoestring.precision.lists import NARROWED_ARGUMENTS, PROMOTING, SUMMING, ListName, list_of
from shoestring.precision.narrowing import Bits, Flow, narrowed

CAST = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Narrowing:
    """What the pass did to a graph."""

    bits: Bits[fx.Node]
    casts: int
    """Casts from 32 to 16 bits and back that the graph has now."""
    narrow: int
    """Elements of the float tensors that operators compute in 16 bits; views and casts compute none."""
    elements: int
    """Elements of all float tensors that operators compute."""
    operators: dict[str, Counter[str]] = field(default_factory=dict)
    """Name of an operator -> how many of its calls have 16 bits, and how many stay wide, by reason."""


def operator_name(node: fx.Node) -> str:
    """The name of a node's ATen operator without namespace and overload, such as `mm`; empty if it calls none."""
    schema = getattr(node.target, "_schema", None)
    namespace, _, name = (schema.name if schema is not None else "").partition("::")
    return name if namespace == "aten" else ""


def computes_floats(node: fx.Node) -> bool:
    """Whether a node's first output is a tensor of 32-bit floats."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Tensor) and first.dtype == torch.float32


def flow_of(graph: fx.Graph, *, forward: bool = False) -> tuple[Flow[fx.Node], dict[fx.Node, ListName | None]]:
    """The float tensors of a graph as `narrowed` reads them; picks of an operator's output go with the operator.

    What is computed from constants alone, such as the angles of rotary embeddings, is in no list: whatever powers it
    is made of, its readers may round it.

    Args:
        forward: for forward propagation, in which squares are `infer`: what adds them up averages errors of rounding.
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
    repeated = {(one, user) for one in nodes for user in users[one] if 0 < _elements(one) < _elements(user)}
    return Flow(nodes, sources, users, repeated), lists


def _elements(node: fx.Node) -> int:
    """Number of elements of an operator's only output; 0 if it has several."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def narrow(
    module: fx.GraphModule,
    dtype: torch.dtype = torch.bfloat16,
    *,
    forward: bool = False,
    wide: Collection[str] = (),
) -> Narrowing:
    """Change a graph in place: it computes in 16 bits what `narrowed` decides. Inputs and outputs keep their types.

    Args:
        forward: whether `infer` operators after products are narrowed too. wide: names of operators that stay wide.

    Raises:
        RuntimeError: an operator refuses the types of its inputs.
    """
    graph = module.graph
    flow, lists = flow_of(graph, forward=forward)
    for node in lists:
        if operator_name(node) in wide:
            lists[node] = "deny"
    bits = narrowed(flow, lists, forward=forward)
    reasons, casts = _by_operator(bits), _Casts(graph, dtype)
    for node in [*graph.nodes]:
        if node.op == "output":
            casts.restore(node)
        elif node.op == "call_function" and node.target is not operator.getitem:
            casts.convert(node, node in bits.narrow)
        elif node.op == "call_function":
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
    graph.eliminate_dead_code()
    return Narrowing(bits, count_casts(graph), *count_elements(graph, dtype), reasons)


class _Casts:
    """Inserts casts in front of nodes; a tensor that several nodes read is cast once.

    `meta["val"]` of all nodes in front of the current one have the types that the changed graph computes, and
    `meta["wide"]` says which tensors the graph had as 32-bit floats before.
    """

    def __init__(self, graph: fx.Graph, dtype: torch.dtype) -> None:
        self.graph, self.dtype = graph, dtype
        self._made = dict[tuple[fx.Node, torch.dtype], fx.Node]()
        self._types = {node: _dtypes(node) for node in graph.nodes}

    def convert(self, node: fx.Node, narrow: bool) -> None:
        """Cast the inputs of a node, and compute the types of its outputs anew."""
        places = NARROWED_ARGUMENTS.get(operator_name(node)) if narrow else None
        sources = node.all_input_nodes

        promotes = operator_name(node) in PROMOTING and any(
            _dtypes(source) == (torch.float32,) and source.meta["val"].ndim for source in sources
        )

        def cast(source: fx.Node, narrow: bool) -> fx.Node:
            was, now = self._types[source], _dtypes(source)
            if len(now) != 1:  # an operator with several outputs is read by picks of them only
                return source
            if narrow and now == (torch.float32,):
                return self._cast(source, self.dtype)
            wide = was == (torch.float32,) and now != was and not narrow and not promotes
            return self._cast(source, torch.float32) if wide else source

        with self.graph.inserting_before(node):
            args = tuple(
                fx.node.map_arg(argument, partial(cast, narrow=narrow and (places is None or place in places)))
                for place, argument in enumerate(node.args)
            )
            kwargs = fx.node.map_arg(dict(node.kwargs), partial(cast, narrow=narrow and places is None))
        if narrow:  # operators that are told the type of their result, or of the input of their forward pass
            args = tuple(self.dtype if argument is torch.float32 else argument for argument in args)
            kwargs = {name: self.dtype if value is torch.float32 else value for name, value in kwargs.items()}
        changed = args != node.args or kwargs != node.kwargs
        node.args, node.kwargs = args, kwargs
        if changed or any(_dtypes(source) != self._types[source] for source in sources):
            node.meta["val"] = self._computed(node)

    def restore(self, output: fx.Node) -> None:
        """Cast the outputs of the graph back to the types that they had."""

        def cast(source: fx.Node) -> fx.Node:
            was, now = self._types[source], _dtypes(source)
            return self._cast(source, was[0]) if len(was) == 1 and was != now and was[0] else source

        with self.graph.inserting_before(output):
            output.args = fx.node.map_arg(output.args, cast)

    def _cast(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The node that casts a tensor; made where the graph is being inserted into, if there is none yet."""
        if (source, dtype) not in self._made:
            made = self.graph.call_function(CAST, (source, dtype))
            made.meta["val"] = self._computed(made)
            for key in ("partitioner_tag", "seq_nr", "stack_trace", "fwd_nn_module_stack", "nn_module_stack"):
                if key in source.meta:
                    made.meta[key] = source.meta[key]
            self._types[made] = _dtypes(made)
            self._made[source, dtype] = made
        return self._made[source, dtype]

    def _computed(self, node: fx.Node) -> Any:
        """The outputs of a node as fake tensors."""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
        modes = [value.fake_mode for value in _fakes((args, kwargs))]
        with modes[0]:
            operation: Any = node.target
            return operation(*args, **kwargs)


def _fakes(values: Any) -> list[Any]:
    fakes = list[Any]()

    def collect(tensor: Tensor) -> Tensor:
        if hasattr(tensor, "fake_mode"):
            fakes.append(tensor)
        return tensor

    tree_map_only(Tensor, collect, values)
    return fakes


def _dtypes(node: fx.Node) -> tuple[torch.dtype | None, ...]:
    """The types of a node's outputs; None for an output that is no tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return tuple(one.dtype if isinstance(one, Tensor) else None for one in values)


def count_casts(graph: fx.Graph) -> int:
    """Casts between float types, those of the traced program among them."""
    copies = {CAST, torch.ops.aten._to_copy.default}
    return sum(node.target in copies and _floats(node) for node in graph.nodes if node.op == "call_function")


def _floats(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = _dtypes(source)[0], _dtypes(node)[0]
    return before is not None and after is not None and before.is_floating_point and before != after


def count_elements(
    graph: fx.Graph, dtype: torch.dtype, among: Callable[[fx.Node], bool] = lambda _: True
) -> tuple[int, int]:
    """Elements of the float tensors that operators compute, those of a type and all; views and casts compute none."""
    narrow = total = 0
    for node in filter(among, graph.nodes):
        name = operator_name(node) if node.op == "call_function" else ""
        if name in ("", "_to_copy") or list_of(name) == "clear":
            continue
        value = node.meta["val"]
        for output in value if isinstance(value, list | tuple) else (value,):
            if isinstance(output, Tensor) and output.is_floating_point():
                total += output.numel()
                narrow += output.numel() * (output.dtype == dtype)
    return narrow, total


SHOWN = 16
"""Number of kinds of operators that `describe_bits` shows."""


def describe_bits(graph: fx.Graph, *, forward: bool = False) -> Iterator[str]:
    """Yield lines that say which operators of a joint graph would have 16 bits, and why; the graph stays as it is."""
    flow, lists = flow_of(graph, forward=forward)
    bits = narrowed(flow, lists, forward=forward)
    reasons = _by_operator(bits)
    floats = sum(name is not None and node.target is not operator.getitem for node, name in lists.items())
    narrow_ones = sum(node.target is not operator.getitem for node in bits.narrow)
    yield f"with [precision.graph], {narrow_ones:,} of {floats:,} operators on 32-bit floats compute in 16 bits:"
    ordered = sorted(reasons.items(), key=lambda item: -item[1].total())
    for name, counts in ordered[:SHOWN]:
        yield f"  {name}: " + "; ".join(f"{count} in {reason}" for reason, count in counts.most_common())
    if len(ordered) > SHOWN:
        yield f"  and {len(ordered) - SHOWN} other kinds"


def _by_operator(bits: Bits[fx.Node]) -> dict[str, Counter[str]]:
    reasons = dict[str, Counter[str]]()
    for what, nodes in (("16 bits", bits.narrow), ("32 bits", bits.wide)):
        for node, reason in nodes.items():
            if (name := operator_name(node)) and computes_floats(node):
                reasons.setdefault(name, Counter())[f"{what}: {reason}"] += 1
    return reasons
