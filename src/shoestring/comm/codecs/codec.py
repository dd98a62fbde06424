"""What a codec is: the average of gradients over ranks, written as the paper writes it, without the network.

A codec's `code` is a generator. It encodes, yields requests for collectives, receives the answers, and decodes:

    def code(self, grads, context):
        P = {name: M @ self.Q[name] for name, M in grads.items()}
        P, = yield [Mean(tensor) for tensor in P.values()]
        ...

Whoever drives it, by `advance`, decides how the requests travel. `exchange.wire.Wire` packs all requests of one yield
into at most one collective of each kind; `lockstep` drives the generators of several ranks in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoestring.comm.codecs.verdict import ALWAYS, ExchangeVerdict


@dataclass(frozen=True, eq=False)
class Mean:
    """Answered by the mean over ranks, of the same shape and dtype: fp32, or fp16 and bf16 as a ring sums them.

    The answer may be the request's own tensor, overwritten.
    """

    collective: ClassVar[str] = "all-reduce"
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class AllGather:
    """Answered by every rank's tensor, stacked: (ranks, *shape). Shape and dtype are the same on all ranks."""

    collective: ClassVar[str] = "all-gather"
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """A tensor (ranks, *shape) whose row r is for rank r; answered by (ranks, *shape) whose row r came from rank r."""

    collective: ClassVar[str] = "all-to-all"
    tensor: Tensor


Request = Mean | AllGather | AllToAll
Grads = dict[str, Tensor]
Coding = Generator[Sequence[Request], list[Tensor], None]


def advance(coding: Coding, answers: list[Tensor] | None = None) -> Sequence[Request] | None:
    """Run a codec's generator to its next requests; None once it has finished.

    Args:
        answers: one for each of the last requests, in their order; None starts the generator.
    """
    try:
        return next(coding) if answers is None else coding.send(answers)
    except StopIteration:
        return None


def identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class ExchangeContext:
    """One exchange as one rank sees it. Everything but `rank` is equal on all ranks."""

    rank: int
    size: int
    step: int
    sum_over_shards: Callable[[Tensor], Tensor] = identity
    """Sums a tensor over the ranks of this host that hold other shards of the same gradients."""
    verdict: ExchangeVerdict = ALWAYS
    """Whether the exchange succeeds, for codecs that guard."""


class Codec(ABC):
    """The arithmetic and the state of one compressor on one rank.

    State is stored by kind and parameter name, never by bucket, because DDP rebuilds its buckets. Kinds in `shared` are
    equal on all ranks. All other kinds are this rank's own, and only their averages over the ranks must survive.
    """

    stages: int
    """Yields of `code`: collectives that must follow each other."""
    shared: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Tensor]] = {}

    @abstractmethod
    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        """Replace `grads`, in place, by their (approximate) average over the ranks, equal bit by bit on all ranks.

        Args:
            grads: gradients of any shape by parameter name, contiguous, in fp32 or the parameters' type; the same
                names in the same order on all ranks. The codec may overwrite them at once.

        The generator may be closed at any yield, and the codec's state must then be what it was before, up to rounding:
        at the first yield if a gradient of any rank is not finite, at a later one if an answer is too large to decode.
        The driver does not touch `grads` before that. The first answers are non-finite on every rank whenever a
        gradient of any rank is. Later answers in floating point must be equal on all ranks.
        """

    def guards(self, grads: Grads) -> bool:
        """Whether `code` itself heeds `context.verdict` with gradients like these.

        It is then never closed because of an answer, so that nothing waits for the device. Where the verdict is that
        the exchange has failed, `code` makes all gradients NaN, and its state what it was before.
        """
        return False

    @property
    def replays(self) -> bool:
        """Whether an average can be decoded again from the answers of the last stage alone; no state, and
        `decode_average`."""
        return False

    def decode_average(self, grads: Grads, answers: Sequence[Tensor], context: ExchangeContext) -> None:
        """Write the average that the answers of the last stage stand for into `grads`, as the end of `code` does.

        Only of codecs that replay. The answers stay as they are; of the context, `rank` does not matter.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot decode an average again")

    def get_state(self, kind: str, name: str, like: Tensor) -> Tensor:
        """One parameter's state of one kind; created as fp32 zeros in the shape of `like` where there is none."""
        by_name = self.state.setdefault(kind, {})
        if name not in by_name:
            by_name[name] = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        elif by_name[name].device != like.device:  # a checkpoint is read into this host's memory
            by_name[name] = by_name[name].to(like.device)
        return by_name[name]

    def get_states(self, kind: str, grads: Grads) -> list[Tensor]:
        """`get_state` of every gradient, as a list for foreach operations."""
        return [self.get_state(kind, name, grad) for name, grad in grads.items()]

    def return_to_residual(self, name: str, average: Tensor) -> None:
        """Put one parameter's decoded average back into the residual, on all ranks alike, because nothing used it."""
        if name in self.state.get("residual", {}):
            self.state["residual"][name].add_(average.view_as(self.state["residual"][name]))

    def norm(self, kind: str) -> float:
        """The 2-norm of all state of one kind on this rank."""
        return float(torch.nn.utils.get_total_norm(list(self.state.get(kind, {}).values())))

    # -- what survives a restart -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {kind: dict(by_name) for kind, by_name in self.state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        device = next((tensor.device for by_name in self.state.values() for tensor in by_name.values()), None)

        def copy(tensor: Tensor) -> Tensor:
            return tensor.clone() if device is None else tensor.to(device, copy=True)

        self.state = {
            kind: {name: copy(tensor) for name, tensor in by_name.items()} for kind, by_name in state_dict.items()
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Build the state that every rank takes when a run resumes with another number of ranks.

        State that is not shared becomes the mean over the former ranks. The mean of the residuals over all ranks, which
        the updates have not applied yet, is therefore the same before and after, whatever the numbers of ranks.
        """

        def merge(kind: str, name: str) -> Tensor:
            tensors = [state[kind][name] for state in states if name in state.get(kind, {})]
            return tensors[0] if kind in self.shared else torch.stack(tensors).sum(0) / len(states)

        names = {
            kind: list(dict.fromkeys(name for state in states for name in state.get(kind, {}))) for kind in states[0]
        }
        return {kind: {name: merge(kind, name) for name in of_kind} for kind, of_kind in names.items()}


CodecFactory = Callable[[], Codec]
