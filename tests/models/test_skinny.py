"""Products of few rows against float64, and where a model takes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoestring import native
from shoestring.decode.adapter import adapt
from shoestring.models import skinny
from shoestring.models.gpt import GPT, GPTConfig


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(skinny, "FEWEST_WEIGHTS", 1)


wide_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="native attention is for AVX-512"
)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [1, 7, 16, 31, 96, 200])
@torch.inference_mode()
def test_the_native_product_agrees_with_float64_in_every_row_alone_and_beside_others(inputs, dtype, any_size):
    for outputs in (1, 3, 8, 25, 50):
        weight = draw(outputs, inputs, dtype=dtype)
        for rows in (*range(1, 10), 16, skinny.most_rows(dtype)):
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
        (draw(65, 64), draw(8, 64)),
        (draw(33, 64, dtype=torch.bfloat16), draw(8, 64, dtype=torch.bfloat16)),
        (draw(1, 64, dtype=torch.float64), draw(8, 64, dtype=torch.float64)),
        (draw(1, 64), draw(64, 8).T),
        (draw(0, 64), draw(8, 64)),
    ],
)
@torch.inference_mode()
def test_all_else_goes_to_torch(x, weight, any_size, monkeypatch):
    monkeypatch.setattr(skinny, "kernel", None)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("B, T, H, K, S, D, window", [
    (1, 1, 4, 4, 70, 64, None), (2, 3, 4, 2, 200, 32, None), (2, 16, 8, 1, 130, 128, None), (2, 3, 4, 2, 200, 80, 50),
    (1, 1, 2, 2, 1, 16, None), (1, 9, 16, 1, 65, 64, 1),
])  # fmt: skip
@wide_vectors
@torch.inference_mode()
def test_attention_agrees_with_float64_in_every_query_alone_and_beside_others(B, T, H, K, S, D, window, dtype):
    q, (k, v) = 3 * draw(B, T, H, D).to(dtype), (draw(B, K, S + 3, D, seed=s).to(dtype)[:, :, :S] for s in (1, 2))
    last = S - T - torch.arange(B)[:, None] * min(S - T, 37)
    positions = last + torch.arange(T)
    y = skinny.attention(q, k, v, positions, window)
    mask = skinny_mask(positions, S, window)
    wide = (each.double() for each in (q.transpose(1, 2), k, v))
    exact = F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert y.shape == q.shape and y.dtype is dtype
    torch.testing.assert_close(y.double(), exact, atol=5e-6 if dtype is torch.float32 else 0.02, rtol=0)
    for b in range(B):
        for t in range(T):
            alone = skinny.attention(
                q[b : b + 1, t : t + 1], k[b : b + 1], v[b : b + 1], positions[b, t : t + 1, None], window
            )
            assert torch.equal(alone[0, 0], y[b, t])


def skinny_mask(positions, S, window):
    own, seen = positions[:, None, :, None], torch.arange(S)
    return (seen <= own) & (seen > own - (window or S))


@wide_vectors
@torch.inference_mode()
def test_attention_that_does_not_fit_is_left_to_torch_and_nan_is_not_hidden():
    positions = torch.arange(3)[None]
    for q, k in (
        (draw(1, 3, 2, 24), draw(1, 2, 5, 24)),
        (draw(1, 3, 2, 16).double(), draw(1, 2, 5, 16).double()),
        (draw(1, 17, 2, 16), draw(1, 2, 20, 16)),
    ):
        assert skinny.attention(q, k, k, positions) is None
    q, k = draw(1, 3, 2, 16), draw(1, 2, 5, 16)
    assert skinny.attention(q, k, k.clone(), positions).isfinite().all()
    k[0, 1, 1] = float("nan")
    y = skinny.attention(q, k, draw(1, 2, 5, 16), positions)
    assert y[0, :, 0].isfinite().all() and y[0, 0, 1].isfinite().all() and y[0, 1:, 1].isnan().all()


@wide_vectors
@torch.inference_mode()
def test_tokens_read_one_by_one_and_together_give_the_same_logits_bit_by_bit(any_size):
    """So drafts change no text, not even by rounding."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "dim": 64, "hidden": 96, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
    adapter = adapt(GPT(GPTConfig(**shape, init_std=0.2)).eval())
    tokens = torch.arange(24)[None] * 7 % 64
    one, together = adapter.new_cache(1, 64), adapter.new_cache(2, 64)
    logits = torch.cat([adapter.read(tokens[:, i : i + 1], one) for i in range(24)], 1)
    beside = torch.cat((tokens, tokens.flip(1)))
    several = torch.cat([adapter.read(beside[:, i : i + 8], together) for i in range(0, 24, 8)], 1)
    assert torch.equal(several[:1], logits)


def test_without_a_compiler_torch_computes_which_is_said_once(monkeypatch, caplog, any_size):
    skinny.kernel.cache_clear(), native.load.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    try:
        x, weight = draw(1, 64), draw(8, 64)
        with torch.inference_mode():
            for _ in range(2):
                assert torch.equal(skinny.linear(x, weight), F.linear(x, weight))
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "slower than native ones: `skinny_dense.c` needs a C compiler" in warning
    finally:
        skinny.kernel.cache_clear()
