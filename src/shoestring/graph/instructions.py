"""Nodes of divided steps and programs that are no operators: instructions, which `running` carries out.

torch.fx requires callables as the targets of nodes, but these are never called: to carry them out takes a process
group, which a program does not have. The last argument of all but `end_move` is `axis`, the number of a mesh axis.
Ranks that differ only in their position along this axis take part in the exchange.
"""

from __future__ import annotations

from typing import Any, Final


class Instruction:
    """Target of a graph node that is not an operator."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"`{self.__name__}` is carried out by `graph.running`, which knows the groups of ranks")

    def __repr__(self) -> str:
        return self.__name__


move: Final = Instruction("move")
"""(tensor, source, target, axis) -> tensor: move a tensor from one placement to another; argument and result are a
rank's local tensors. A divided step has moves; a program has messages instead."""
begin_move: Final = Instruction("begin_move")
"""(tensors, source, target, axis) -> message: begin to move tensors, in one message."""
end_move: Final = Instruction("end_move")
"""(message) -> tensors: wait for a message; returns a rank's local tensors in the new placement."""
take_shard: Final = Instruction("take_shard")
"""(tensor, dim, axis) -> tensor: a rank's shard of a tensor that every rank holds whole."""
exchange: Final = Instruction("exchange")
"""(compute, op, args, kwargs, axis) -> outputs: compute an operator within which ranks add up tensors; see
`InnerExchange`."""
