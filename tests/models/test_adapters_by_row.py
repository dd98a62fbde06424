"""Adapters by row: each row of a batch is what the layer with that row's adapter merged computes, and no other row
changes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoestring.core.errors import CheckpointError
from shoestring.models import adapters_by_row
from shoestring.models.adapters import LowRank, shape_of
from shoestring.models.adapters_by_row import AdaptableLayer, AdaptedPass, adaptable_layers, place
from shoestring.models.gpt import GPT, GPTConfig

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}


def drawn(shape, rank, seed, scale=0.5, blocks=False):
    """An adapter of a weight (N, K); with `blocks`, each column of B has zeros in half of the rows."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, shape[1], generator=generator), torch.randn(shape[0], rank, generator=generator)
    if blocks:
        b[: shape[0] // 2, : rank // 2] = 0
        b[shape[0] // 2 :, rank // 2 :] = 0
    return LowRank(a, b, scale)


def site(layer):
    return {"layer": AdaptableLayer(layer, layer.weight.dtype, CPU)}


def linear(inputs, outputs, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs).to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_row_is_that_of_the_merged_weight_and_the_rows_of_the_model_alone_keep_their_bits(data):
    inputs, outputs = (data.draw(st.sampled_from([1, 3, 16, 63, 64, 65, 130])) for _ in range(2))
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    layer = linear(inputs, outputs, dtype)
    ranks = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    low = [drawn((outputs, inputs), rank, seed, blocks=seed % 2 == 1) for seed, rank in enumerate(ranks)]
    low.append(LowRank(torch.zeros(2, inputs), torch.zeros(outputs, 2), 1.0))
    loaded = [place({"layer": adapter}, site(layer), "it") for adapter in low]
    rows = data.draw(st.lists(st.sampled_from([None, *range(len(low))]), min_size=1, max_size=6))
    x = torch.randn(len(rows), data.draw(st.integers(1, 3)), inputs).to(dtype)
    with torch.inference_mode():
        base = layer(x)
        with AdaptedPass(site(layer), [None if row is None else loaded[row] for row in rows]):
            y = layer(x)
    assert "forward" not in vars(layer)
    for index, row in enumerate(rows):
        if row is None:
            assert torch.equal(y[index], base[index])
        else:
            exact = low[row].merged(layer.weight.detach().double())
            wanted = x[index].double() @ exact.T + layer.bias.detach().double()
            size = 1 + float(wanted.abs().max())
            torch.testing.assert_close(y[index].double(), wanted, rtol=0, atol=TOLERANCE[dtype] * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_products_of_a_row_are_the_same_bits_alone_and_beside_others(dtype):
    layer = linear(200, 300, dtype)
    loaded = [place({"layer": drawn((300, 200), rank, rank)}, site(layer), "it") for rank in (2, 16, 7, 1)]
    x, rows = torch.randn(6, 2, 200).to(dtype), [loaded[0], loaded[1], None, loaded[1], loaded[2], loaded[3]]
    zero = torch.zeros(300, dtype=dtype)
    with torch.inference_mode():  # the layer's own product may round by the batch's shape, so it is left out
        layer.forward = lambda x: zero.expand(*x.shape[:-1], 300).clone()
        with AdaptedPass(site(layer), rows):
            together = layer(x)
        for index, adapter in enumerate(rows):
            with AdaptedPass(site(layer), [adapter]):
                assert torch.equal(layer(x[index : index + 1])[0], together[index])


def test_torchs_products_and_the_native_ones_agree_and_long_passes_take_torchs(monkeypatch):
    layer = linear(96, 130, torch.float32)
    rows = [place({"layer": drawn((130, 96), rank, rank)}, site(layer), "it") for rank in (2, 3, 16)]
    x = torch.randn(3, 2, 96)
    with torch.inference_mode():
        with AdaptedPass(site(layer), rows):
            native = layer(x)
        monkeypatch.setattr(adapters_by_row, "FEW_TOKENS", 5)
        with AdaptedPass(site(layer), rows):
            plain = layer(x)
    torch.testing.assert_close(native, plain, rtol=1e-5, atol=1e-4)


def test_a_row_that_is_not_finite_changes_no_other():
    layer = linear(32, 48)
    rows = [place({"layer": drawn((48, 32), 4, seed)}, site(layer), "it") for seed in range(3)]
    x = torch.randn(3, 1, 32, dtype=torch.float64)
    with torch.inference_mode(), AdaptedPass(site(layer), rows):
        before = layer(x)
        x[1] = math.nan
        after = layer(x)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert after[1].isnan().all()


def test_a_batch_of_another_size_is_an_error_and_not_a_wrong_text():
    layer = linear(8, 8)
    rows = [place({"layer": drawn((8, 8), 2, 0)}, site(layer), "it"), None]
    with torch.inference_mode(), AdaptedPass(site(layer), rows):
        assert layer(torch.ones(6, 8, dtype=torch.float64)).shape == (6, 8)  # tokens in the order of the rows
        with pytest.raises(RuntimeError, match="batch of 2 rows"):
            layer(torch.ones(3, 1, 8, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="batch of 2 rows"):
            layer(torch.ones(5, 8, dtype=torch.float64))


class Mixed(nn.Module):
    """One layer of each kind: by row, never called, read by its weight, of some tokens only, and in another order."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.plain, self.flat, self.idle, self.read, self.some, self.turned = (nn.Linear(8, 8) for _ in range(6))

    def forward(self, tokens):
        x = self.plain(self.embed(tokens))
        x = self.flat(x.flatten(0, 1)).view_as(x) @ self.read.weight
        self.some(x.flatten(0, 1)[1:])
        return self.turned(x.transpose(0, 1)).transpose(0, 1)


def test_only_layers_that_keep_the_rows_apart_can_be_adapted():
    model = Mixed()
    with torch.inference_mode():
        assert set(adaptable_layers(model, model)) == {"plain", "flat"}
        model.router = nn.Linear(8, 8)  # in a mixture, an expert's tokens are in another order
        assert set(adaptable_layers(model, model)) == {"plain"}
        gpt = GPT(GPTConfig(vocab_size=9, dim=8, layers=1, heads=2, kv_heads=1, hidden=8, context=8, tied=False))
        assert len(adaptable_layers(gpt, gpt)) == 5
    assert not any(layer._forward_hooks for layer in model.modules())


def test_what_cannot_share_a_batch_is_refused():
    layer = linear(8, 8)
    a, b = torch.ones(2, 8), torch.ones(8, 2)
    for adapter, layers, message in (
        (LowRank(a, b, 1.0, torch.ones(8)), site(layer), "DoRA"),
        (LowRank(a, b * math.nan, 1.0), site(layer), "not finite"),
        (LowRank(a, b, 1.0), {}, "keep the texts of a batch apart"),
    ):
        with pytest.raises(CheckpointError, match=message):
            place({"layer": adapter}, layers, "it")


def test_of_a_fused_layer_only_what_is_not_zero_is_stored_for_the_kernel():
    low = drawn((256, 32), 8, 0, blocks=True)
    (factors,) = place({"layer": low}, site(linear(32, 256, torch.float32)), "it").factors.values()
    tiles, table = factors.tiles
    assert tiles.numel() == 256 * 4
    assert table.tolist() == [[0, 4, 8], [256, 4, 8], [512, 0, 4], [768, 0, 4]]
    assert shape_of(linear(32, 256)) == (256, 32)
