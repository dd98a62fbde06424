"""Defines codecs: algorithms that average gradients over ranks, written as in their papers, without networking code.

A codec's method `code` is a generator. The generator encodes gradients, yields requests for collectives, receives the
results of the collectives (the answers), and decodes them:

    def code(self, grads, context):
        P = {name: M @ self.Q[name] for name, M in grads.items()}
        P, = yield [Mean(tensor) for tensor in P.values()]
        ...

The caller runs the generator through `advance`, and decides how requests are carried out. `exchange.wire.Wire` packs
all requests of one yield into at most one collective of each kind; `lockstep` runs the generators of several ranks in
one process.
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
    """Requests the mean of a tensor over ranks, in the same shape and dtype: fp32, fp16 or bf16. Means in fp16 and bf16
    are rounded as in a ring all-reduce.

    The collective may overwrite the request's own tensor with the mean.
    """

    collective: ClassVar[str] = "all-reduce"
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class AllGather:
    """Requests every rank's tensor, stacked: (ranks, *shape). Shape and dtype are the same on all ranks. The bytes of
    the tensor are sent, so any dtype will do, integers and bool included."""

    collective: ClassVar[str] = "all-gather"
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Sends row r of a tensor (ranks, *shape) to rank r, and requests a tensor of the same shape whose row r comes from
    rank r."""

    collective: ClassVar[str] = "all-to-all"
    tensor: Tensor


Request = Mean | AllGather | AllToAll
Grads = dict[str, Tensor]
Coding = Generator[Sequence[Request], list[Tensor], None]


def advance(coding: Coding, answers: list[Tensor] | None = None) -> Sequence[Request] | None:
    """Run a codec's generator to its next requests; returns None once it has finished.

    Args:
        answers: results of the previous requests, one for each request, in the same order; None starts the generator.
    """
    try:
        return next(coding) if answers is None else coding.send(answers)
    except StopIteration:
        return None


def identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class ExchangeContext:
    """One exchange as one rank sees it. All fields except `rank` are equal on all ranks."""

    rank: int
    size: int
    step: int
    sum_over_shards: Callable[[Tensor], Tensor] = identity
    """Sums a tensor over the ranks of this host that hold other shards of the same gradients."""
    verdict: ExchangeVerdict = ALWAYS
    """Whether the exchange succeeds; used by codecs whose `guards` is true."""


class Codec(ABC):
    """The computation and the state of one compression method on one rank.

    State is stored by kind (such as "residual") and parameter name, never by bucket, because DDP rebuilds its buckets.
    State of the kinds in `shared` is equal on all ranks. State of other kinds differs between ranks, and only its
    average over ranks must be preserved if the number of ranks changes.
    """

    stages: int
    """Number of yields of `code`; each yield is one round of collectives, and rounds run one after the other."""
    shared: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Tensor]] = {}

    @abstractmethod
    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        """Replace `grads`, in place, by their (approximate) average over ranks, bitwise equal on all ranks.

        Args:
            grads: gradients of any shape by parameter name, contiguous, in fp32 or the parameters' type; the same
                names in the same order on all ranks. The codec may overwrite the gradients from the start.

        Some or all of the gradients may have no entries. If no gradient has entries, the generator returns without a
        yield.

        The caller may close the generator at any yield: at the first yield if a gradient of any rank is not finite, at
        a later yield if the result of a collective is too large to decode. When the generator is closed, the codec must
        restore its state from before the exchange, up to rounding; the simplest way is to change the state only after
        the last yield. Until the generator is closed, the caller does not change `grads`.

        If any rank has a non-finite gradient entry, every rank must receive a non-finite value in a floating-point
        tensor of the first stage, even if the entry itself is not sent. To ensure this, add `flat.poison` of all
        entries to a value that is sent. Floating-point tensors that ranks receive in later stages must be equal on all
        ranks.
        """

    def guards(self, grads: Grads) -> bool:
        """Whether `code` itself handles a failed exchange of `grads`, using `context.verdict`.

        If true, the caller does not inspect the results of collectives to decide whether to close the generator, so the
        host need not wait for the device. If the verdict is that the exchange has failed, `code` sets all gradients to
        NaN and restores the codec's state.
        """
        return False

    @property
    def replays(self) -> bool:
        """Whether `decode_average` can decode the results of the last stage's collectives again. If true, the codec
        must have no state."""
        return False

    def decode_average(self, grads: Grads, answers: Sequence[Tensor], context: ExchangeContext) -> None:
        """Decode the results of the last stage's collectives (`answers`) into `grads`, as `code` does at the end.

        May be called only for codecs whose `replays` is true. The method does not change `answers`, and does not use
        `context.rank`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot decode the answers again")

    def get_state(self, kind: str, name: str, like: Tensor) -> Tensor:
        """The state of one kind for one parameter; created as fp32 zeros in the shape of `like` if there is none."""
        by_name = self.state.setdefault(kind, {})
        if name not in by_name:
            by_name[name] = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        elif by_name[name].device != like.device:  # checkpoints are loaded into host memory
            by_name[name] = by_name[name].to(like.device)
        return by_name[name]

    def get_states(self, kind: str, grads: Grads) -> list[Tensor]:
        """The results of `get_state` for all gradients, as a list for foreach operations."""
        return [self.get_state(kind, name, grad) for name, grad in grads.items()]

    def return_to_residual(self, name: str, average: Tensor) -> None:
        """Put an average that was not applied to the model back into the residual; every rank adds the same average."""
        if name in self.state.get("residual", {}):
            self.state["residual"][name].add_(average.view_as(self.state["residual"][name]))

    def norm(self, kind: str) -> float:
        """The 2-norm of this rank's state of one kind, over all parameters."""
        return float(torch.nn.utils.get_total_norm(list(self.state.get(kind, {}).values())))

    # -- saved state -------------------------------------------------------------------------------------------------

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

        State that is not in `shared` becomes the mean over the former ranks. So the mean residual over ranks (the part
        of the gradients not yet applied) does not change with the number of ranks.
        """

        def merge(kind: str, name: str) -> Tensor:
            tensors = [state[kind][name] for state in states if name in state.get(kind, {})]
            return tensors[0] if kind in self.shared else torch.stack(tensors).sum(0) / len(states)

        names = {
            kind: list(dict.fromkeys(name for state in states for name in state.get(kind, {}))) for kind in states[0]
        }
        return {kind: {name: merge(kind, name) for name in kind_names} for kind, kind_names in names.items()}


CodecFactory = Callable[[], Codec]
