"""Averages decoded again from the answers of the last stage, by codecs that keep nothing on a rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoestring.comm.codecs.codec import Codec, ExchangeContext, Grads, advance
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.lockstep import answer_all
from shoestring.comm.codecs.powersgd import PowerSGDCodec
from shoestring.comm.codecs.quantize import QuantizeCodec
from shoestring.comm.codecs.randomk import RandomKCodec

CODECS: dict[str, Callable[[], Codec]] = {
    "dense": DenseCodec,
    "bf16": lambda: DenseCodec(torch.bfloat16),
    "8 bits": lambda: QuantizeCodec(8, bucket=64),
    "4 bits, nearest": lambda: QuantizeCodec(4, bucket=64, rounding="nearest"),
    "random entries": lambda: RandomKCodec(0.3, feedback=False),
}
RANKS, STEP = 3, 5


def gradients(rank: int) -> Grads:
    noise = torch.Generator().manual_seed(rank)
    shapes = {"a": (40, 7), "b": (), "c": (0, 3), "d": (130,)}
    return {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}


def exchanged(make: Callable[[], Codec]) -> tuple[list[Grads], list[list[Tensor]]]:
    """Each rank's averages, and its answers of the last stage."""
    grads = [gradients(rank) for rank in range(RANKS)]
    codings = [make().code(each, ExchangeContext(rank, RANKS, STEP)) for rank, each in enumerate(grads)]
    answers: list[list[Tensor]] = []
    requests = [advance(coding) for coding in codings]
    while requests[0] is not None:
        answers = answer_all([own for own in requests if own is not None])
        requests = [advance(coding, own) for coding, own in zip(codings, answers, strict=True)]
    return grads, answers


@pytest.mark.parametrize("name", CODECS)
def test_the_last_answers_are_the_average_on_any_rank(name):
    averages, answers = exchanged(CODECS[name])
    for rank in range(RANKS):
        again = {name: torch.full_like(grad, torch.nan) for name, grad in averages[0].items()}
        codec = CODECS[name]()
        assert codec.replays
        kept = [answer.clone() for answer in answers[rank]]
        codec.decode_average(again, answers[rank], ExchangeContext(0, RANKS, STEP))
        assert all(torch.equal(again[key], averages[other][key]) for key in again for other in range(RANKS))
        assert all(map(torch.equal, kept, answers[rank])) and not codec.state

    changed = [answer.clone() for answer in answers[0]]
    changed[0].view(-1)[0] += 1
    CODECS[name]().decode_average(again, changed, ExchangeContext(0, RANKS, STEP))
    assert not all(torch.equal(again[key], averages[0][key]) for key in again)


@pytest.mark.parametrize("codec", [QuantizeCodec(4, feedback=True), RandomKCodec(0.3), PowerSGDCodec(2)])
def test_a_codec_with_state_of_its_own_does_not_replay(codec):
    assert not codec.replays
