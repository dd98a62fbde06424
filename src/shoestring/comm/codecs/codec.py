"""What a codec is: the average of gradients over ranks, written as the paper writes it, without the network.

A codec's `code` is a generator. It encodes, yields what has to travel, receives what came back, and decodes:

    def code(self, grads, turn):
        P = {name: M @ self.Q[name] for name, M in grads.items()}
        P, = yield [Mean(tensor) for tensor in P.values()]
        ...

Whoever runs it decides how the requests travel. `wire.Wire` packs those of one yield into at most one collective of
each kind; `rehearsal.lockstep` runs the generators of several ranks in one process, for tests and for pricing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Mean:
    """Answered by the mean over ranks, of the same shape and dtype: fp32, or fp16 and bf16 as a ring sums them.

    The answer may be the request's own tensor, overwritten.
    """

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Gather:
    """Answered by every rank's tensor, stacked: (ranks, *shape). Shape and dtype are the same on all ranks."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Swap:
    """A tensor (ranks, *shape) whose row r is for rank r; answered by (ranks, *shape) whose row r came from rank r."""

    tensor: Tensor


Request = Mean | Gather | Swap
Grads = dict[str, Tensor]
Coding = Generator[Sequence[Request], list[Tensor], None]


def itself(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Turn:
    """Which exchange this is: equal on all ranks but for `rank`."""

    rank: int
    size: int
    step: int
    total: Callable[[Tensor], Tensor] = itself
    """Adds a tensor up over the ranks of this host that hold other rows of the same gradients."""


class Codec(ABC):
    """One compressor's arithmetic and state on one rank.

    State is kept by the kind and by the parameter's name, never by bucket, which DDP rebuilds. Kinds in `shared` are
    equal on all ranks; all others are this rank's own, and averages of them over the ranks are what must survive.
    """

    stages: int
    """Yields of `code`: exchanges that must follow each other."""
    shared: frozenset[str] = frozenset()
    exposes: bool = True
    """The first answers are non-finite on every rank whenever an entry of a gradient is on any rank."""

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Tensor]] = {}

    @abstractmethod
    def code(self, grads: Grads, turn: Turn) -> Coding:
        """Put the (approximate) average over the ranks into `grads`, in place, and equal bit by bit on all ranks.

        Args:
            grads: parameter names to gradients of any shape, contiguous, in fp32 or what the parameters have; the
                same names in the same order on all ranks. They may be overwritten at once.

        The generator may be closed at any yield, and the codec must then know what it knew before, but for rounding:
        at the first one if a gradient is not finite on any rank, at a later one if an answer is too large to decode.
        Who runs it leaves `grads` alone until then. Answers in floating point, but for the first ones, must be equal on
        all ranks.
        """

    def kept(self, kind: str, name: str, like: Tensor) -> Tensor:
        """The state of one kind of one parameter; zeros in fp32 of the shape of `like` where there was none."""
        of_kind = self.state.setdefault(kind, {})
        if name not in of_kind:
            of_kind[name] = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        return of_kind[name]

    def keep(self, kind: str, grads: Grads) -> list[Tensor]:
        """`kept` for every gradient, as a list for foreach operations."""
        return [self.kept(kind, name, grad) for name, grad in grads.items()]

    def take_back(self, name: str, delivered: Tensor) -> None:
        """Owe again what was decoded for one parameter, equal on all ranks, and could not be used."""
        if name in self.state.get("residual", {}):
            self.state["residual"][name].add_(delivered.view_as(self.state["residual"][name]))

    def norm(self, kind: str) -> float:
        """The 2-norm of all state of one kind on this rank."""
        return float(torch.nn.utils.get_total_norm(list(self.state.get(kind, {}).values())))

    # -- what survives a restart -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {kind: dict(of_kind) for kind, of_kind in self.state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        device = next((t.device for each in self.state.values() for t in each.values()), None)
        self.state = {
            kind: {
                name: tensor.clone() if device is None else tensor.to(device, copy=True) for name, tensor in of.items()
            }
            for kind, of in state_dict.items()
        }

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state for every rank of a run that goes on with another number of them.

        Every rank takes the mean of what was each former rank's own. So the mean over ranks, which is what the
        updates still owe the model, is conserved whatever the numbers are.
        """

        def mean(kind: str, name: str) -> Tensor:
            tensors = [state[kind][name] for state in states if name in state.get(kind, {})]
            return tensors[0] if kind in self.shared else torch.stack(tensors).sum(0) / len(states)

        names = {
            kind: list(dict.fromkeys(name for state in states for name in state.get(kind, {}))) for kind in states[0]
        }
        return {kind: {name: mean(kind, name) for name in of} for kind, of in names.items()}


Make = Callable[[], Codec]
