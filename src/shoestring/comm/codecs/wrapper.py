"""Base class of codecs that wrap another codec, and functions that combine codecs' generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoestring.comm.codecs.codec import Codec, Coding, Mean, Request, advance


class Wrapper(Codec):
    """A codec that wraps another codec, and has the same stages and state."""

    def __init__(self, inner: Codec) -> None:
        super().__init__()
        self.inner, self.stages = inner, inner.stages

    def return_to_residual(self, name: str, average: Tensor) -> None:
        self.inner.return_to_residual(name, average)

    def norm(self, kind: str) -> float:
        return self.inner.norm(kind)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.inner.merge_states(states)


def run_together(codings: Sequence[Coding]) -> Coding:
    """Run several codecs' generators as one generator, each of whose yields joins the requests of all generators in one
    stage."""
    try:
        requests: list[Sequence[Request] | None] = [advance(coding) for coding in codings]
        while any(own is not None for own in requests):
            answers = iter((yield [request for own in requests for request in own or ()]))
            requests = [
                None if own is None else advance(coding, [next(answers) for _ in own])
                for coding, own in zip(codings, requests, strict=True)
            ]
    finally:
        for coding in codings:
            coding.close()


def average(tensor: Tensor) -> Coding:
    """Replace a tensor by its mean over ranks, in one stage."""
    (mean,) = yield [Mean(tensor)]
    tensor.copy_(mean)
