"""Products of few rows against float64, and where a model takes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoestring import native
from shoestring.models import skinny
from shoestring.models.gpt import GPT, GPTConfig


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(skinny, "FEWEST_WEIGHTS", 1)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [1, 7, 16, 31, 96, 200])
@torch.inference_mode()
def test_the_native_product_agrees_with_float64_in_every_row_alone_and_beside_others(inputs, dtype, any_size):
    for outputs in (1, 3, 8, 25, 50):
        weight = draw(outputs, inputs, dtype=dtype)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16):
            x = draw(rows, inputs, dtype=dtype, seed=rows)
            y = skinny.linear(x, weight)
            exact, scale = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
            bound = 2e-6 if dtype is torch.float32 else 4.1e-3  # of bf16: the result is rounded to it
            assert y.dtype is dtype and bool(((y.double() - exact).abs() <= bound * scale + 1e-30).all())
            alone = torch.cat([skinny.linear(row[None], weight) for row in x])
            assert torch.equal(y, alone)


@torch.inference_mode()
def test_it_is_the_native_product_that_is_taken(any_size, monkeypatch):
    monkeypatch.setattr(F, "linear", None)
    layer = nn.Linear(64, 32)
    x = draw(2, 3, 64)
    torch.testing.assert_close(skinny.linear(x, layer.weight, layer.bias), x @ layer.weight.T + layer.bias)


@pytest.mark.parametrize(
    "x, weight",
    [
        (draw(17, 64), draw(8, 64)),
        (draw(1, 64, dtype=torch.float64), draw(8, 64, dtype=torch.float64)),
        (draw(1, 64), draw(64, 8).T),
        (draw(0, 64), draw(8, 64)),
    ],
)
@torch.inference_mode()
def test_all_else_goes_to_torch(x, weight, any_size, monkeypatch):
    monkeypatch.setattr(skinny, "_kernel", None)
    assert torch.equal(skinny.linear(x, weight), F.linear(x, weight))


def test_with_gradients_it_is_torch_that_computes(any_size):
    weight = draw(8, 64).requires_grad_()
    skinny.linear(draw(1, 64), weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad(), pytest.raises(RuntimeError):
        skinny.linear(draw(1, 65), weight)


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_model_takes_it_within_the_context_only(tied, any_size):
    config = GPTConfig(vocab_size=40, dim=32, hidden=48, layers=2, heads=2, kv_heads=1, context=16, tied=tied)
    model = GPT(config).eval()
    tokens = torch.tensor([[1, 2, 3]])
    plain, calls = model(tokens), []
    own = model.blocks[0].mlp.down.forward = lambda x: calls.append(1) or F.linear(x, model.blocks[0].mlp.down.weight)
    products = skinny.Products(model)
    for _ in range(2):
        with products:
            torch.testing.assert_close(model(tokens), plain)
            taken = [name for name, module in model.named_modules() if {"forward", "logits"} & vars(module).keys()]
            assert len(taken) == (9 if tied else 10) and model.blocks[0].mlp.down.forward is own
    assert calls == [1, 1]
    assert not any({"forward", "logits"} & vars(m).keys() for m in model.modules() if m is not model.blocks[0].mlp.down)


def test_without_a_compiler_torch_computes_which_is_said_once(monkeypatch, caplog, any_size):
    skinny._kernel.cache_clear(), native.load.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    try:
        x, weight = draw(1, 64), draw(8, 64)
        with torch.inference_mode():
            for _ in range(2):
                assert torch.equal(skinny.linear(x, weight), F.linear(x, weight))
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "slower than native ones: `skinny_dense.c` needs a C compiler" in warning
    finally:
        skinny._kernel.cache_clear()
