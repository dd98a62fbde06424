"""Runs codecs without a network: several ranks in lockstep in one process, or one rank whose peers send the same
data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoestring.comm.codecs.codec import (
    AllGather,
    AllToAll,
    Codec,
    Coding,
    ExchangeContext,
    Grads,
    Mean,
    Request,
    advance,
)
from shoestring.comm.codecs.traffic import WireBytes, count_bytes

LATE = 1 << 20  # a step after any warm-up, for measuring costs; alternating codecs are also measured at the next step

Respond = Callable[[Sequence[Sequence[Request]]], list[list[Tensor]]]


def run_lockstep(codecs: Sequence[Codec], grads: Sequence[Grads], step: int = 0) -> WireBytes:
    """Run one exchange between as many ranks as there are codecs; overwrites each rank's `grads` with the average."""
    ranks = enumerate(zip(codecs, grads, strict=True))
    codings = [codec.code(own, ExchangeContext(rank, len(codecs), step)) for rank, (codec, own) in ranks]
    return _drive(codings, answer_all)


def run_alone(coding: Coding, ranks: int) -> WireBytes:
    """Run one rank's generator as if all of `ranks` ranks had sent the same data."""

    def echo(requests: Sequence[Sequence[Request]]) -> list[list[Tensor]]:
        answers = []
        for request in requests[0]:
            copies = (ranks,) if isinstance(request, AllGather) else ()
            answers.append(request.tensor.expand((*copies, *request.tensor.shape)).clone())
        return [answers]

    return _drive([coding], echo)


def _drive(codings: Sequence[Coding], respond: Respond) -> WireBytes:
    """Run the ranks' generators in lockstep; `respond` computes the results for each rank from the requests of all
    ranks."""
    sent = WireBytes()
    requests = [advance(coding) for coding in codings]
    while requests[0] is not None:
        sent.stages.append(count_bytes(requests[0]))
        answers = respond([own for own in requests if own is not None])
        requests = [advance(coding, own) for coding, own in zip(codings, answers, strict=True)]
    return sent


def answer_all(requests: Sequence[Sequence[Request]]) -> list[list[Tensor]]:
    """Carry out the requests of all ranks. Returns a list of results for each rank, in the order of the rank's
    requests."""
    answers: list[list[Tensor]] = [[] for _ in requests]
    for same in zip(*requests, strict=True):
        kinds = {(type(request), request.tensor.shape, request.tensor.dtype) for request in same}
        assert len(kinds) == 1, f"ranks ask for different things: {kinds}"
        stacked = torch.stack([request.tensor for request in same])
        for rank, own in enumerate(answers):
            match same[rank]:
                case Mean():
                    own.append(stacked.mean(0, dtype=torch.float64 if stacked.dtype == torch.float64 else None))
                case AllGather():
                    own.append(stacked.clone())
                case AllToAll():
                    own.append(stacked[:, rank].clone())
    return answers
