"""AdamW with averages of 8 bits: its numbers by brute force, its steps against torch's AdamW, its memory."""

from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.models.gpt import tiny
from shoestring.optim import AdamW8bit
from shoestring.optim.eight_bit import BLOCK, SMALL, EightBitAdamW, decode, encode, values
from shoestring.testing import FeatureSuite


@pytest.mark.parametrize("signed", [True, False])
def test_values_span_seven_decades_and_are_all_used(signed):
    table = values(signed)
    assert len(table) == len(table.unique()) == 256 and 0 in table and table[-1] == 1
    assert float(table[table > 0].min()) < 1e-6
    assert float(table[0]) == pytest.approx(-0.993 if signed else 0, abs=1e-3)


@given(seed=st.integers(0, 1000), size=st.integers(1, 3 * BLOCK), decades=st.integers(0, 12))
def test_numbers_are_of_the_nearest_value_and_roots_never_become_0(seed, size, decades):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 10 ** -(torch.rand(size, generator=generator) * decades)
    x[torch.rand(size, generator=generator) < 0.1] = 0
    for signed, given_values in ((True, x), (False, x.abs())):
        numbers, largest = encode(given_values, signed=signed)
        scales = largest.repeat_interleave(BLOCK)[:size].double()
        exact = values(signed).double()[None] * scales[:, None]
        distance = (exact - given_values.double()[:, None]).abs()
        if not signed:
            distance[given_values > 0, 0] = torch.inf
        least = distance.min(1).values
        back = decode(numbers, largest, signed=signed).double()
        assert signed or bool((back[given_values > 0] > 0).all())
        torch.testing.assert_close((back - given_values).abs(), least, atol=2e-7 * float(scales.max()), rtol=1e-5)
        assert not back[given_values == 0].any()


def stepped(kind, shape, steps=30, scale=1.0, **settings):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = kind([parameter], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, **settings)
    drift = torch.randn(shape, generator=generator)
    for _ in range(steps):
        parameter.grad = scale * (torch.randn(shape, generator=generator) + drift)
        optimizer.step()
    return parameter.detach(), optimizer


def test_small_parameters_are_stepped_as_by_torch():
    ours, optimizer = stepped(EightBitAdamW, (SMALL - 1,))
    torch.testing.assert_close(ours, stepped(torch.optim.AdamW, (SMALL - 1,))[0], atol=1e-6, rtol=1e-5)
    assert set(next(iter(optimizer.state.values()))) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_large_parameters_go_nearly_where_torch_takes_them(scale):
    ours, optimizer = stepped(EightBitAdamW, (64, 70), scale=scale)
    theirs, exact = stepped(torch.optim.AdamW, (64, 70), scale=scale)
    start = stepped(torch.optim.AdamW, (64, 70), steps=0)[0]
    assert float((ours - theirs).norm() / (theirs - start).norm()) < 0.02
    size = lambda each: sum(value.nbytes for value in next(iter(each.state.values())).values())  # noqa: E731
    assert size(optimizer) < 0.26 * size(exact)


def test_an_element_far_below_its_block_makes_no_wild_step():
    """Had its second average come out as 0, the step would be of the order of 1 / eps."""
    parameter = torch.nn.Parameter(torch.zeros(SMALL))
    optimizer = EightBitAdamW([parameter], lr=1e-2, weight_decay=0.0)
    gradient = torch.full((SMALL,), 1.0)
    gradient[1::2] = 10 ** -torch.linspace(1, 12, SMALL // 2)
    for _ in range(20):
        parameter.grad = gradient.clone()
        optimizer.step()
    assert float(parameter.detach().abs().max()) < 0.3


@pytest.mark.slow
def test_a_model_learns_as_well():
    def trained(kind):
        torch.manual_seed(0)
        model = tiny(vocab_size=64, context=32, dim=64, layers=2, heads=2, kv_heads=2, hidden=128)
        optimizer = kind(model.parameters(), lr=3e-3, weight_decay=0.0)
        generator = torch.Generator().manual_seed(1)
        for _ in range(40):
            tokens = torch.randint(64, (8, 1), generator=generator) + torch.arange(33)
            logits = model(tokens[:, :-1] % 64)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), (tokens[:, 1:] % 64).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    assert trained(EightBitAdamW) == pytest.approx(trained(torch.optim.AdamW), rel=0.1)


@pytest.mark.slow
class TestAdamW8bit(FeatureSuite):
    feature = AdamW8bit(lr=2e-2)
    tolerance = 0.1
    clashes: ClassVar = {"parallel.fsdp": "it rounds whole tensors"}
