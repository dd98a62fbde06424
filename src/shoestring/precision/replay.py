"""Computes a joint graph operator by operator, with the same random numbers in every variant of the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from shoestring._torch import tree_map_only


def outputs_of(module: fx.GraphModule) -> Sequence[Any]:
    """Return the outputs of a graph: nodes, or constants."""
    returned: Any = next(node for node in module.graph.nodes if node.op == "output").args[0]
    return returned


def compute(module: fx.GraphModule, outputs: Sequence[Any], values: Mapping[str, Any]) -> list[Any]:
    """Compute some nodes of a graph, and the nodes that they depend on.

    The n-th operator that draws random numbers draws the same numbers in all variants of a graph, and in its forward
    and backward pass. This function sets the seed of torch's generators.

    Args:
        outputs: nodes, or constants.
        values: maps the name of each placeholder to its value.
    """
    waiting = [node for node in outputs if isinstance(node, fx.Node)]
    needed, readers = set[fx.Node](), Counter(waiting)
    while waiting:
        if (node := waiting.pop()) not in needed:
            needed.add(node)
            readers.update(node.all_input_nodes)
            waiting += node.all_input_nodes
    results, draws = dict[fx.Node, Any](), 0
    for node in module.graph.nodes:
        draws += draws_numbers(node)
        if node not in needed:
            continue
        if node.op == "placeholder":
            results[node] = values[node.name]
        elif node.op == "get_attr":
            results[node] = attrgetter(node.target)(module)
        else:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), results.__getitem__)
            if draws_numbers(node):
                torch.manual_seed(draws)
                results[node] = _drawn(node.target, args, kwargs)
            else:
                results[node] = node.target(*args, **kwargs)
        readers.subtract(node.all_input_nodes)
        for source in node.all_input_nodes:
            if not readers[source]:
                del results[source]
    return [results[node] if isinstance(node, fx.Node) else node for node in outputs]


def draws_numbers(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _drawn(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that draws random numbers, in 32 bits, because the numbers drawn depend on the data type of its
    input."""
    narrow = [one.dtype for one in args if isinstance(one, Tensor) and one.dtype in (torch.bfloat16, torch.float16)]
    if not narrow or "attention" in str(operation):
        return operation(*args, **kwargs)
    args, kwargs = tree_map_only(Tensor, lambda one: one.float() if one.dtype == narrow[0] else one, (args, kwargs))
    drawn = operation(*args, **kwargs)
    return tree_map_only(Tensor, lambda one: one.to(narrow[0]) if one.is_floating_point() else one, drawn)
