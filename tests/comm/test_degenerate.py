"""Random codecs on gradients that draws never give: zeros, ones, ties, lone entries and tiny numbers."""

from functools import partial

import pytest
import torch

from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.quantize import QuantizeCodec
from shoestring.comm.codecs.randomk import RandomKCodec
from shoestring.comm.codecs.terngrad import TernGradCodec
from tests import degenerate

RANKS, SIZE, TRIALS = 2, 48, 96
CODECS = {
    "4 bits": partial(QuantizeCodec, 4, bucket=16),
    "8 bits": partial(QuantizeCodec, 8, bucket=16),
    "ternary": partial(TernGradCodec, clip=1e9),  # clipping is its one bias
    "ternary, by owners": partial(TernGradCodec, clip=1e9, reduce_scatter=True),
    "random entries": partial(RandomKCodec, 0.5, block=4, feedback=False),
}


@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("both", [
    pytest.param(True, id="on both ranks"), pytest.param(False, id="beside ones", marks=pytest.mark.slow),
])  # fmt: skip
def test_they_stay_unbiased_and_zeros_stay_zeros(make, both):
    """All at once, each a tensor; the mean is within 5 standard errors, or where nothing varies within a rounding."""
    mine = {shape: degenerate.vector(shape, SIZE) for shape in degenerate.SHAPES}
    theirs = mine if both else {shape: degenerate.vector("ones", SIZE) for shape in mine}
    truth = {shape: (mine[shape].double() + theirs[shape].double()) / 2 for shape in mine}
    codecs, draws = [make() for _ in range(RANKS)], {shape: [] for shape in mine}
    for step in range(TRIALS):
        grads = [{shape: each.clone() for shape, each in given.items()} for given in (mine, theirs)]
        run_lockstep(codecs, grads, step)
        assert all(torch.equal(*pair) for pair in zip(grads[0].values(), grads[1].values(), strict=True))
        for shape, each in grads[0].items():
            draws[shape].append(each.double())
    for shape, each in draws.items():
        found = torch.stack(each)
        assert found.isfinite().all(), shape
        assert not found[:, truth[shape] == 0].any(), shape
        # An entry just beside a level is hardly ever rounded to the next one: what is drawn with a chance of less than
        # 5 / TRIALS may not have been drawn.
        least = 5 / TRIALS * max(float(mine[shape].abs().max()), float(theirs[shape].abs().max()))
        error = (found.mean(0) - truth[shape]).abs()
        # Where the scale has no reciprocal in fp32, zeros travel: below 2^-120 that is off by no more.
        assert (error <= 5 * found.std(0) / TRIALS**0.5 + least + 2.0**-120).all(), shape
        if shape in ("ones", "ties") and both and "random" not in str(make):
            torch.testing.assert_close(found.mean(0), truth[shape], rtol=1e-5, atol=0)
