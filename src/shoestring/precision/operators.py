"""Reads the nodes of a graph of ATen operators: their names, their sizes, and the groups of equal operators."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from shoestring._torch import hint_of
from shoestring.precision.lists import list_of


def operator_name(node: fx.Node) -> str:
    """Return the name of a node's ATen operator without namespace and overload, such as `mm`; empty if it calls
    none."""
    schema = getattr(node.target, "_schema", None)
    namespace, _, name = (schema.name if schema is not None else "").partition("::")
    return name if namespace == "aten" else ""


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the tensors that a node returns, as fake tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return [one for one in values if isinstance(one, Tensor)]


def dtypes_of(node: fx.Node) -> tuple[torch.dtype | None, ...]:
    """Return the data types of a node's outputs; None for an output that is not a tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return tuple(one.dtype if isinstance(one, Tensor) else None for one in values)


def computes_floats(node: fx.Node) -> bool:
    """Whether a node's first output is a tensor of 32-bit floats."""
    return dtypes_of(node)[:1] == (torch.float32,)


def elements_of(tensor: Tensor) -> int:
    """Number of elements of a fake tensor; a symbolic size counts as in the example with which it was traced."""
    return hint_of(tensor.numel())


def is_backward(node: fx.Node) -> bool:
    """Whether a node belongs to the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def moves_one(node: fx.Node) -> bool:
    """Whether a node only moves the numbers of one tensor, as views and `getitem` do."""
    one = len(node.all_input_nodes) == 1 and node.op == "call_function"
    return one and (node.target is operator.getitem or list_of(operator_name(node)) == "clear")


def group_of(node: fx.Node) -> str:
    """Name the group of a node: its operator, and the operators that it reads from and is read by, looking through
    views.

    Equal layers give equal names, so a group contains the operators of all of them.
    """
    sources = ", ".join(_label(_moved(source)) for source in node.all_input_nodes)
    users = ", ".join(sorted({_label(user) for user in _readers(node)}))
    return f"{_label(node)}({sources}) -> {users or 'nothing'}"


def _label(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    name = operator_name(node) or getattr(node.target, "__name__", "other")
    return f"{name}'" if is_backward(node) else name


def _moved(node: fx.Node) -> fx.Node:
    """Return the node whose numbers a node moves, through any number of views."""
    while moves_one(node):
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if moves_one(user) and user.users:
            yield from _readers(user)
        else:
            yield user
