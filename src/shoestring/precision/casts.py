"""Inserts casts into the joint graph of a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shoestring._torch import tree_map_only
from shoestring.precision.lists import NARROWED_ARGUMENTS, PROMOTING
from shoestring.precision.operators import dtypes_of, operator_name

CAST = torch.ops.prims.convert_element_type.default


class Casts:
    """Inserts casts in front of nodes; a tensor that several nodes read is cast once.

    When a node is converted, the `meta["val"]` of all earlier nodes already has the data types of the changed graph.
    """

    def __init__(self, graph: fx.Graph, dtype: torch.dtype) -> None:
        self.graph, self.dtype = graph, dtype
        self._made = dict[tuple[fx.Node, torch.dtype], fx.Node]()
        self._types = {node: dtypes_of(node) for node in graph.nodes}

    def convert(self, node: fx.Node, narrow: bool) -> None:
        """Cast the inputs of a node, and recompute the data types of its outputs."""
        places = NARROWED_ARGUMENTS.get(operator_name(node)) if narrow else None
        sources = node.all_input_nodes

        promotes = operator_name(node) in PROMOTING and any(
            dtypes_of(source) == (torch.float32,) and source.meta["val"].ndim for source in sources
        )

        def cast(source: fx.Node, narrow: bool) -> fx.Node:
            was, now = self._types[source], dtypes_of(source)
            if len(now) != 1:  # operators with several outputs are read only through `getitem`
                return source
            if narrow and now == (torch.float32,):
                return self.cast(source, self.dtype)
            wide = was == (torch.float32,) and now != was and not narrow and not promotes
            return self.cast(source, torch.float32) if wide else source

        with self.graph.inserting_before(node):
            args = tuple(
                fx.node.map_arg(argument, partial(cast, narrow=narrow and (places is None or place in places)))
                for place, argument in enumerate(node.args)
            )
            kwargs = fx.node.map_arg(dict(node.kwargs), partial(cast, narrow=narrow and places is None))
        if narrow:  # some name the data type of the result, or of the forward pass's input
            args = tuple(self.dtype if argument is torch.float32 else argument for argument in args)
            kwargs = {name: self.dtype if value is torch.float32 else value for name, value in kwargs.items()}
        changed = args != node.args or kwargs != node.kwargs
        node.args, node.kwargs = args, kwargs
        if changed or any(dtypes_of(source) != self._types[source] for source in sources):
            node.meta["val"] = computed(node)

    def restore(self, output: fx.Node) -> None:
        """Cast the outputs of the graph back to the types that they had."""

        def cast(source: fx.Node) -> fx.Node:
            was, now = self._types[source], dtypes_of(source)
            return self.cast(source, was[0]) if len(was) == 1 and was != now and was[0] else source

        with self.graph.inserting_before(output):
            output.args = fx.node.map_arg(output.args, cast)

    def cast(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the node that casts a tensor; if there is none yet, create it at the graph's insertion point."""
        if (source, dtype) not in self._made:
            self._made[source, dtype] = self.call(CAST, source, dtype)
        return self._made[source, dtype]

    def call(self, target: Any, source: fx.Node, *rest: Any, **options: Any) -> fx.Node:
        """Insert a call of an operator on a tensor; it is marked as part of the tensor's pass, forward or backward."""
        made = self.graph.call_function(target, (source, *rest), options)
        made.meta["val"] = computed(made)
        for key in ("partitioner_tag", "seq_nr", "stack_trace", "fwd_nn_module_stack", "nn_module_stack"):
            if key in source.meta:
                made.meta[key] = source.meta[key]
        self._types[made] = dtypes_of(made)
        return made


def computed(node: fx.Node) -> Any:
    """The outputs of a node as fake tensors."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
    fakes = list[Any]()

    def collect(tensor: Tensor) -> Tensor:
        if hasattr(tensor, "fake_mode"):
            fakes.append(tensor)
        return tensor

    tree_map_only(Tensor, collect, (args, kwargs))
    with fakes[0].fake_mode:
        operation: Any = node.target
        return operation(*args, **kwargs)
