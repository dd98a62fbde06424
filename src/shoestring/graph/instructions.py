"""What a rank's program does beside operators: instructions to whatever runs it, which `running` carries out.

torch.fx asks for functions as the targets of nodes, so these are functions that nobody calls. `axis` is the number of
the axis of the mesh along which ranks exchange; ranks that differ only along it take part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shoestring.graph.placements import Placement


def move(tensor: Tensor, source: Placement, target: Placement, axis: int) -> Tensor:
    """Move a tensor from one placement to another; a rank gives what it has of it. Programs have messages instead."""
    raise NotImplementedError("a divided step's moves become messages of a program")


def begin_move(tensors: Sequence[Tensor], source: Placement, target: Placement, axis: int) -> Any:
    """Begin to move tensors from one placement to another, in one message; a rank gives what it has of them."""
    raise NotImplementedError("a program's messages are run by `graph.running`")


def end_move(message: Any) -> tuple[Tensor, ...]:
    """Wait for a message; returns what a rank has of the moved tensors."""
    raise NotImplementedError("a program's messages are run by `graph.running`")


def take_shard(tensor: Tensor, dim: int, axis: int) -> Tensor:
    """A rank's shard of a tensor that every rank has."""
    raise NotImplementedError("shards are taken by `graph.running`")


def exchange(compute: Callable[..., Any], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], axis: int) -> Any:
    """Compute an operator whose ranks add up numbers within it: see `InnerExchange`."""
    raise NotImplementedError("exchanges within operators are run by `graph.running`")
