"""What a rank's program does beside operators: instructions to whatever runs it, which `running` carries out.

torch.fx asks for callables as the targets of nodes, but nobody calls these: what they stand for takes a group of ranks,
which a program does not have. The last argument of each but `end_move` is `axis`, the number of the axis of the mesh
along which ranks exchange; ranks that differ only along it take part.
"""

from __future__ import annotations

from typing import Any, Final


class Instruction:
    """The target of nodes that are no operators."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"`{self.__name__}` is carried out by `graph.running`, which knows the groups of ranks")

    def __repr__(self) -> str:
        return self.__name__


move: Final = Instruction("move")
"""(tensor, source, target, axis) -> tensor: move a tensor from one placement to another, of which a rank gives what it
has. A divided step has moves; a program has messages in their place."""
begin_move: Final = Instruction("begin_move")
"""(tensors, source, target, axis) -> message: begin to move tensors, in one message."""
end_move: Final = Instruction("end_move")
"""(message) -> tensors: wait for a message; what a rank has of the moved tensors."""
take_shard: Final = Instruction("take_shard")
"""(tensor, dim, axis) -> tensor: a rank's shard of a tensor that every rank has."""
exchange: Final = Instruction("exchange")
"""(compute, op, args, kwargs, axis) -> outputs: compute an operator whose ranks add up numbers within it; see
`InnerExchange`."""
