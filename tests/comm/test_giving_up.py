"""A codec can be given up at every yield, and knows what it knew before; it is given up where answers overflow."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from sparse_ranks import RANKS, gradients

from shoestring.comm.codecs.codec import Codec, Coding, ExchangeContext, Grads, Mean, advance
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.lockstep import answer_all, run_lockstep
from shoestring.comm.codecs.powersgd import PowerSGDCodec
from shoestring.comm.codecs.quantize import QuantizeCodec
from shoestring.comm.codecs.sign import SignCodec
from shoestring.comm.exchange.wire import Wire
from shoestring.comm.selection.budget import BudgetedCodec, Uniform
from shoestring.comm.selection.selective import SelectiveCodec


def feedback() -> QuantizeCodec:
    return QuantizeCodec(4, bucket=64, rounding="nearest", feedback=True)


CODECS = [
    partial(PowerSGDCodec, 2, least=1),
    feedback,
    partial(SignCodec, bucket=64),
    lambda: BudgetedCodec(feedback, Uniform(), 3000.0, warmup=1),
    lambda: BudgetedCodec(partial(PowerSGDCodec, 2, least=1), Uniform(), 3000.0, warmup=1),
    lambda: SelectiveCodec(PowerSGDCodec(2, least=1), ["long"]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", CODECS)
def test_given_up_at_its_second_yield_it_knows_what_it_knew(make, dtype):
    codecs = [make() for _ in range(RANKS)]
    for step in range(3):
        run_lockstep(codecs, gradients(step, dtype=dtype), step)
    before = copy.deepcopy([codec.state_dict() for codec in codecs])
    assert codecs[0].stages == 2
    each = gradients(3, dtype=dtype)
    codings = [
        codec.code(grads, ExchangeContext(r, RANKS, 3))
        for r, (codec, grads) in enumerate(zip(codecs, each, strict=True))
    ]
    answers = answer_all([advance(coding) for coding in codings])
    for coding, mine in zip(codings, answers, strict=True):
        advance(coding, mine)
    for coding in codings:
        coding.close()
    for codec, state in zip(codecs, before, strict=True):
        torch.testing.assert_close(codec.state_dict(), state, rtol=1e-5, atol=1e-4)
    others = [make() for _ in range(RANKS)]
    for other, state in zip(others, before, strict=True):
        other.load_state_dict(state)
    mine, theirs = gradients(4, dtype=dtype), gradients(4, dtype=dtype)
    run_lockstep(codecs, mine, 4)
    run_lockstep(others, theirs, 4)
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-4  # rounding may tip an average to its neighbour
    for name in mine[0]:
        torch.testing.assert_close(mine[0][name], theirs[0][name], rtol=rtol, atol=1e-3)


class Twice(Codec):
    """Asks for the mean of the gradients, and then of something else."""

    stages = 2

    def __init__(self, second: float) -> None:
        super().__init__()
        self.second, self.ended = second, False

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        yield [Mean(grads["w"])]
        yield [Mean(torch.full((3,), self.second))]
        self.ended = True


@pytest.mark.parametrize(("second", "fine"), [(1e29, True), (1e31, False), (torch.inf, False), (torch.nan, False)])
def test_later_answers_that_are_too_large_end_an_exchange(second, fine):
    """Before they overflow: what is decoded from numbers up to 2 to the 100th does not."""
    codec, grads = Twice(second), {"w": torch.ones(5)}
    assert Wire(None, torch.device("cpu")).run(codec, grads, 0) is fine
    assert codec.ended is fine
    assert bool(grads["w"].isfinite().all()) is fine


def test_first_answers_may_be_as_large_as_the_type_holds():
    """Ranks may get different ones, so they must not be judged but by whether they are finite."""
    grads = {"w": torch.full((5,), 3e38)}
    assert Wire(None, torch.device("cpu")).run(DenseCodec(), grads, 0)
