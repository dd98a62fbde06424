"""Selective compression (HiPress, Bai et al., SOSP 2021): a codec for some gradients, the others whole."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from shoestring.comm.codecs.codec import Codec, Coding, Grads, Request, Turn
from shoestring.comm.codecs.dense import Dense


class Selective(Codec):
    """`codec`, but Dense for parameters that match one of `whole`; both in the same collectives. State is `codec`'s.

    Args:
        whole: names or patterns of names, as a shell has them.
    """

    def __init__(self, codec: Codec, whole: Sequence[str]) -> None:
        super().__init__()
        self.codec, self.plain = codec, Dense()
        self.whole = tuple(whole)
        self.stages, self.shared, self.exposes = codec.stages, codec.shared, codec.exposes

    def code(self, grads: Grads, turn: Turn) -> Coding:
        whole = {name: grad for name, grad in grads.items() if self.is_whole(name)}
        rest = {name: grad for name, grad in grads.items() if name not in whole}
        parts = ((self.codec, rest), (self.plain, whole))
        yield from abreast([codec.code(some, turn) for codec, some in parts if some])

    def is_whole(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.whole)

    def take_back(self, name: str, delivered: Tensor) -> None:
        self.codec.take_back(name, delivered)

    def norm(self, kind: str) -> float:
        return self.codec.norm(kind)

    def state_dict(self) -> dict[str, Any]:
        return self.codec.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.codec.load_state_dict(state_dict)

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.codec.merged(states)


def abreast(codings: Sequence[Coding]) -> Coding:
    """Several generators as one: what they ask for at the same stage is asked for together."""
    asked: list[Sequence[Request] | None] = [next(coding, None) for coding in codings]
    while any(requests is not None for requests in asked):
        answers = iter((yield [request for requests in asked for request in requests or ()]))
        asked = [
            None if requests is None else _next(coding, [next(answers) for _ in requests])
            for coding, requests in zip(codings, asked, strict=True)
        ]


def _next(coding: Generator[Sequence[Request], list[Tensor], None], answers: list[Tensor]) -> Sequence[Request] | None:
    try:
        return coding.send(answers)
    except StopIteration:
        return None
