"""The pass: casts before and after each matrix product of the forward graph."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.nn import functional as F

PRODUCTS = {F.linear, torch._C._nn.linear, torch.matmul, operator.matmul, torch.mm, torch.bmm}


def cast_products(module: fx.GraphModule, min_width: int) -> fx.GraphModule:
    """The graph with fp32 operands of at least `min_width` columns cast to bf16, and their product back to fp32."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in PRODUCTS and is_wide(node.args[0], min_width):
            with module.graph.inserting_before(node):
                node.args = tuple(cast(operand, torch.bfloat16) for operand in node.args)
                node.kwargs = {name: cast(operand, torch.bfloat16) for name, operand in node.kwargs.items()}
            with module.graph.inserting_after(node):
                back = module.graph.call_method("to", (node, torch.float32))
            back.meta.update(node.meta)  # a node of a pass has none, and the next product asks for its type
            node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
    return module


def is_wide(operand: fx.Node, min_width: int) -> bool:
    value = operand.meta["example_value"]
    return value.dtype == torch.float32 and value.shape[-1] >= min_width


def cast(operand: object, dtype: torch.dtype) -> object:
    return operand.graph.call_method("to", (operand, dtype)) if isinstance(operand, fx.Node) else operand
