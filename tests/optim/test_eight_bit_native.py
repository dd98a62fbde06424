"""The native loop of AdamW with averages of 8 bits, beside torch's operators."""

import copy
import math

import pytest
import torch

from shoestring.optim import eight_bit
from shoestring.optim.eight_bit import BLOCK, SMALL, EightBitAdamW, values


def gradient(kind, size, generator):
    x = torch.randn(size, generator=generator)
    match kind:
        case "many decades":
            return x * 10 ** -(torch.rand(size, generator=generator) * 12)
        case "many zeros":
            return x.masked_fill(torch.rand(size, generator=generator) < 0.5, 0)
        case "zeros":
            return torch.zeros(size)
        case "tiny":
            return x * 1e-30
        case "one sign":
            return -x.abs()
    return x


def stepped(kind, size, steps, betas=(0.9, 0.99)):
    generator = torch.Generator().manual_seed(size)
    parameter = torch.nn.Parameter(torch.randn(size, generator=generator))
    optimizer = EightBitAdamW([parameter], lr=1e-2, betas=betas, weight_decay=0.1)
    for _ in range(steps):
        parameter.grad = gradient(kind, size, generator)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("kind", ["normal", "many decades", "many zeros", "zeros", "tiny", "one sign"])
@pytest.mark.parametrize("size", [SMALL, SMALL + 1, 17 * BLOCK + 255])
def test_native_steps_are_those_of_torchs_operators(kind, size, monkeypatch):
    assert eight_bit._kernel() is not None
    ours, state = stepped(kind, size, steps=6)
    monkeypatch.setattr(eight_bit, "_kernel", lambda: None)
    theirs, other = stepped(kind, size, steps=6)
    # What lies between two values, but for rounding, may be rounded to either; a code later it is the same again.
    for name in ("first", "root"):
        assert (state[name] != other[name]).float().mean() < 2e-3
        torch.testing.assert_close(state[f"{name}_scale"], other[f"{name}_scale"], atol=0, rtol=1e-4)
    assert (ours - theirs).abs().quantile(0.99) < 1e-6


def test_native_codes_are_the_nearest_values():
    """With betas of 0, the moments are the gradient and its magnitude: each code is compared with all 256 values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * BLOCK, generator=generator) * 10 ** -(torch.rand(64 * BLOCK, generator=generator) * 9)
    x.clamp_(-1, 1)
    x[::BLOCK] = torch.tensor([1.0, -1.0]).repeat(32)  # the largest of each block, so that quotients are the entries
    for signed in (True, False):  # all values themselves, and all bounds between two of them
        table = values(signed)
        x[1:BLOCK] = torch.where(table == 0, 1e-9, table)[:-1]  # the last is 1, as the block's first entry
        x[BLOCK + 1 : 2 * BLOCK] = (table[1:] + table[:-1]) / 2
        parameter = torch.nn.Parameter(torch.zeros_like(x))
        optimizer = EightBitAdamW([parameter], betas=(0.0, 0.0))
        parameter.grad = x.clone()
        optimizer.step()
        state = optimizer.state[parameter]
        codes, wanted = (state["first"], x) if signed else (state["root"], x.abs())
        distance = (table.double()[None] - wanted.double()[:, None]).abs()
        if not signed:
            distance[wanted > 0, 0] = math.inf  # only 0 itself is encoded as 0
        own = distance.gather(1, codes.long()[:, None])[:, 0]
        torch.testing.assert_close(own, distance.min(1).values, atol=2e-7, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_block_and_no_other(bad):
    parameter = torch.nn.Parameter(torch.zeros(SMALL))
    optimizer = EightBitAdamW([parameter])
    for number in range(2):
        parameter.grad = torch.ones(SMALL)
        parameter.grad[BLOCK + 3] = bad if number == 0 else 1.0
        optimizer.step()
    spoilt = ~parameter.detach().view(-1, BLOCK).isfinite().all(1)
    assert spoilt.nonzero().tolist() == [[1]]
    assert not parameter.detach()[BLOCK : 2 * BLOCK].isfinite().any()


def test_threads_change_nothing():
    results = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            results.append(stepped("normal", 40 * BLOCK + 7, steps=3))
        finally:
            torch.set_num_threads(before)
    (one, first), (three, second) = results
    assert torch.equal(one, three) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_that_torch_loads_keeps_its_types(dtype):
    """torch casts state to the parameter's type: codes of 8 bits would take as much memory as plain moments."""

    def built():
        parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in (SMALL, 5)]
        return parameters, EightBitAdamW(parameters, lr=1e-2)

    def step(parameters, optimizer, number):
        for parameter in parameters:
            parameter.grad = torch.linspace(-1, number, parameter.numel(), dtype=dtype)
        optimizer.step()

    parameters, optimizer = built()
    step(parameters, optimizer, 1)
    others, other = built()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, theirs in zip(parameters, others, strict=True):
        theirs.data.copy_(mine.data)
        for name, value in optimizer.state[mine].items():
            loaded = other.state[theirs][name]
            assert loaded.dtype is value.dtype and torch.equal(loaded, value)
    for number in (2, 3):
        step(parameters, optimizer, number)
        step(others, other, number)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, others, strict=True))


def test_a_copy_of_the_optimizer_steps_as_well():
    """torch copies and pickles an optimizer's groups and state, and no other attribute."""
    parameter = torch.nn.Parameter(torch.ones(SMALL))
    optimizer = EightBitAdamW([parameter], lr=1e-2)
    other = copy.deepcopy(optimizer)
    for one in (optimizer, other):
        (own,) = one.param_groups[0]["params"]
        own.grad = torch.linspace(-1, 1, SMALL)
        one.step()
    assert torch.equal(own, parameter) and own is not parameter
