"""Codecs run without a network: several ranks in lockstep in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoestring.comm.codecs.codec import Codec, Coding, Gather, Grads, Mean, Request, Swap, Turn


@dataclass
class Traffic:
    """What one rank handed to the wire in each stage, in bytes, by kind of request."""

    stages: list[dict[str, int]] = field(default_factory=list)

    def total(self, kind: str) -> int:
        return sum(stage.get(kind, 0) for stage in self.stages)

    def sent(self, ranks: int) -> float:
        """Bytes that leave one rank when means travel in a ring and gathers are passed on round it."""
        means, gathers, swaps = (self.total(kind) for kind in ("Mean", "Gather", "Swap"))
        return 2 * (ranks - 1) / ranks * means + (ranks - 1) * gathers + (ranks - 1) / ranks * swaps


def rehearse(codecs: Sequence[Codec], grads: Sequence[Grads], step: int = 0) -> Traffic:
    """One exchange of as many ranks as there are codecs; overwrites each rank's `grads` with the average."""
    size = len(codecs)
    return lockstep([c.code(g, Turn(rank, size, step)) for rank, (c, g) in enumerate(zip(codecs, grads, strict=True))])


def lockstep(codings: Sequence[Coding]) -> Traffic:
    """Run the generators of all ranks side by side, answering each one's requests from all of them."""
    traffic = Traffic()
    asked = [next(coding, None) for coding in codings]
    while asked[0] is not None:
        traffic.stages.append(_bytes(asked[0]))
        answers = answered([requests for requests in asked if requests is not None])
        asked = [_send(coding, mine) for coding, mine in zip(codings, answers, strict=True)]
    return traffic


def _send(coding: Coding, answers: list[Tensor]) -> Sequence[Request] | None:
    try:
        return coding.send(answers)
    except StopIteration:
        return None


def _bytes(requests: Sequence[Request]) -> dict[str, int]:
    found: dict[str, int] = {}
    for request in requests:
        kind = type(request).__name__
        found[kind] = found.get(kind, 0) + request.tensor.numel() * request.tensor.element_size()
    return found


def answered(asked: Sequence[Sequence[Request]]) -> list[list[Tensor]]:
    """Every rank's answers to what all ranks asked for: one list for each rank, in the order of its requests."""
    answers: list[list[Tensor]] = [[] for _ in asked]
    for requests in zip(*asked, strict=True):
        kinds = {(type(request), request.tensor.shape, request.tensor.dtype) for request in requests}
        assert len(kinds) == 1, f"ranks ask for different things: {kinds}"
        stacked = torch.stack([request.tensor for request in requests])
        for rank, mine in enumerate(answers):
            match requests[rank]:
                case Mean():
                    mine.append(stacked.mean(0, dtype=torch.float64 if stacked.dtype == torch.float64 else None))
                case Gather():
                    mine.append(stacked.clone())
                case Swap():
                    mine.append(stacked[:, rank].clone())
    return answers
