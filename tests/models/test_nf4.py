"""NF4: values against a reference of the paper's, gradients, and where the library is missing."""

import sys

import pytest
import torch
from scipy.stats import norm
from torch import nn

from shoestring.core.errors import ConfigError
from shoestring.models import nf4

pytest.importorskip("bitsandbytes")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def levels():
    """The 16 values of NF4: quantiles of a normal distribution, of which one is 0 (section 3 and appendix E)."""
    end = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    upper = norm.ppf(torch.linspace(end, 0.5, 9, dtype=torch.float64)[:-1])
    lower = -norm.ppf(torch.linspace(end, 0.5, 8, dtype=torch.float64)[:-1])
    found = torch.cat([torch.tensor(upper), torch.zeros(1, dtype=torch.float64), torch.tensor(lower)])
    return (found / found.max()).sort().values


def test_each_weight_becomes_the_nearest_level_of_its_block():
    weight = draw(48, 160) * torch.logspace(-3, 1, 48)[:, None]
    found = nf4.dequantize(*nf4.quantize(weight), 48, torch.float32).double().view(-1, nf4.BLOCK)
    blocks = weight.double().view(-1, nf4.BLOCK)
    table, scales = levels(), blocks.abs().amax(1, keepdim=True)
    nearest = table[(blocks / scales)[..., None].sub(table).abs().argmin(-1)]
    kept = found.abs().amax(1, keepdim=True)  # the largest weight of a block is at a level of 1
    apart = (found / kept - nearest).abs()
    assert float((apart > 1e-5).double().mean()) < 1e-3  # halfway between two levels, within float32
    # A scale has eight bits of its own, beside the 255 others that it shares a scale with.
    outer = (scales - scales.mean()).view(-1).split(nf4.SCALES)
    steps = torch.cat([each.abs().amax().expand_as(each) for each in outer])[:, None]
    assert bool(((kept - scales).abs() <= 0.02 * steps).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_dense_weight(dtype):
    module = nn.Linear(64, 24).to(dtype)
    layer = nf4.NF4Linear(module)
    x = draw(3, 5, 64).to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype is dtype
    y.square().sum().backward()
    other = x.detach().clone().requires_grad_()
    wanted = nn.functional.linear(other, layer.dense(dtype)) + module.bias
    wanted.square().sum().backward()
    assert torch.equal(y, wanted) and torch.equal(x.grad, other.grad)
    assert {name for name, _ in layer.named_buffers()} == {"weight", "scales", "coarse", "bias"}
    assert sum(each.nbytes for each in (layer.weight, layer.scales)) * 8 / module.weight.numel() == 4.125


def test_a_cast_of_the_model_changes_no_number():
    layer = nf4.NF4Linear(nn.Linear(64, 32))
    before = layer.dense()
    assert torch.equal(layer.to(torch.bfloat16).dense(), before)


@pytest.mark.slow
def test_it_compiles_without_a_break():
    layer = nf4.NF4Linear(nn.Linear(64, 32))
    x = draw(4, 64).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True)
    compiled(x).sum().backward()
    gradient, x.grad = x.grad, None
    layer(x).sum().backward()
    torch.testing.assert_close(gradient, x.grad)
    torch.library.opcheck(nf4.nf4_linear, (x, layer.weight, layer.scales, layer.coarse, 32))


def test_without_the_library_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match="need bitsandbytes") as raised:
        nf4.library()
    assert "shoestring[nf4]" in raised.value.hint
