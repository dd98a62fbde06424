"""2:4 weights of 8 and 4 bits: their places in memory, products against float64, and folders of pruned models."""

import pytest
import torch
from torch import nn

from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.models import packed24, quantized, rounding
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from shoestring.models.saving import save_model, save_packed


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sparse(rows, columns, seed=0):
    """The two largest of each four, and some groups with fewer."""
    groups = draw(rows, columns, seed=seed).view(-1, 4)
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.abs().topk(2, 1).indices, True)
    kept[::7, 1] = kept[::11] = False
    return torch.where(kept, groups, 0).view(rows, columns)


def linear(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight.data = weight
    return layer


def of(weight, bits):
    return quantized.of(packed24.PackedLinear.from_linear(linear(weight)), bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_values_alone_are_rounded_and_stay_where_they_are(bits):
    weight = sparse(21, 192)
    layer = of(weight, bits)
    values, indices = packed24.pack(weight)
    numbers = rounding.pack(*rounding.quantize(values, bits), bits)
    assert torch.equal(layer.weight, numbers[0]) and torch.equal(layer.scales, numbers[1])
    assert torch.equal(rounding.unpack_places(layer.places, 21), indices)
    assert torch.equal(layer.dense(), packed24.unpack(rounding.dequantize(*numbers, 21, torch.float32), indices))
    sixteen, group, half, row, chunk = 1, 2, 1, 3, 2
    assert layer.places[sixteen, group, half * 64 + row * 4 + chunk] == indices[19, 8 * group + 4 * half + chunk]
    stored = sum(each.numel() * each.element_size() for each in (layer.weight, layer.scales, layer.places))
    assert stored * 8 == 32 * 192 * (5.25 if bits == 8 else 3.25)  # 21 rows take the room of 32
    assert (layer.dense() - weight).norm() < (0.01 if bits == 8 else 0.12) * weight.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_native_product_agrees_with_float64_in_every_row_alone_and_beside_others(bits):
    for outputs, inputs in ((1, 64), (17, 192), (33, 320)):
        layer = of(sparse(outputs, inputs), bits)
        packed, dense = (layer.weight, layer.scales, outputs, layer.places), layer.dense(torch.float64)
        for rows in (1, 2, 3, 5, 8, 9, 16, 17, 19, 40):
            x = draw(rows, inputs, seed=rows) * torch.logspace(-3, 3, rows)[:, None]
            x[0, :32] = 0
            y = quantized.quantized_linear(x, *packed[:3], places=layer.places)
            # Each input is off by at most half a step, of which there are 32512 to the largest of its 32.
            largest = x.double().view(rows, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).flatten(1)
            bound = largest / 2 / 32512 @ dense.abs().T + 2e-6 * (x.double().abs() @ dense.abs().T)
            assert bool(((y.double() - x.double() @ dense.T).abs() <= bound + 1e-30).all())
            assert torch.equal(
                y, torch.cat([quantized.quantized_linear(row[None], *packed[:3], places=layer.places) for row in x])
            )


def test_extreme_numbers_do_not_overflow():
    """All values of a row at -128 or 127 steps, which `quantize` never gives, and the largest inputs of both signs."""
    numbers = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None].expand(2, 1, 32).contiguous()
    places = torch.zeros(2, 8, dtype=torch.uint8) + 0b01000100
    layer = quantized.QuantizedLinear(
        *rounding.pack(numbers, torch.ones(2, 1).half(), 8), 2, None, rounding.pack_places(places)
    )
    x = torch.tensor([1.0, -1.0])[:, None].expand(2, 64)
    torch.testing.assert_close(layer(x), torch.tensor([[-4096.0, 4064.0], [4096.0, -4064.0]]))


def test_double_precision_training_and_compiled_models_get_the_same_product():
    layer = of(sparse(16, 128), 8)
    x = draw(100, 128).double()
    assert torch.equal(layer(x), x @ layer.dense(torch.float64).T)
    x = draw(100, 128).requires_grad_()
    assert torch.equal(layer(x), x @ layer.dense().T)
    torch._dynamo.reset()
    x = draw(2, 128)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    with pytest.raises(ConfigError, match="places do not fit"):
        quantized.QuantizedLinear(layer.weight, layer.scales, 16, None, layer.places[:, :1])


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", ["zeros", "packed"])
@torch.inference_mode()
def test_quantize_keeps_a_pruned_model_packed_where_that_is_smaller(bits, form, tmp_path, capsys):
    """Inputs of 96 fill a group and a half: of those layers all weights are numbers, which is smaller than in fp32."""
    torch.manual_seed(0)
    shape = {"vocab_size": 80, "dim": 64, "hidden": 96, "layers": 2, "heads": 2, "kv_heads": 1, "context": 32}
    model = GPT(GPTConfig(**shape, init_std=0.1)).eval()
    for block in model.blocks:
        for layer in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down):
            layer.weight.copy_(sparse(*layer.weight.shape, seed=1) * 0.1)
    save_model(model, None, tmp_path / "whole", {})
    tokens = torch.arange(20)[None]
    expected = model(tokens)
    source = tmp_path / "whole"
    if form == "packed":
        save_packed(model, source, tmp_path / "packed")
        source = tmp_path / "packed"
    assert main(["quantize", str(source), "--bits", str(bits), "--out", str(tmp_path / "small")]) == 0
    assert "2:4, of which the values alone are kept: blocks.0.attention.qkv and 5 more" in capsys.readouterr().out
    small, _ = load_model(tmp_path / "small")
    layers = quantized.quantized(small)
    assert len(layers) == 9 and len(quantized.packed(small)) == 6 and not packed24.packed(small)
    assert small.blocks[0].mlp.down.places is None and layers["blocks.0.mlp.down"] == bits
    for name in quantized.packed(small):
        assert packed24.is_24(small.get_submodule(name).dense())
    assert (small(tokens) - expected).norm() / expected.norm() < (0.03 if bits == 8 else 0.4)
    save_model(small, None, tmp_path / "again", {})
    again, _ = load_model(tmp_path / "again")
    assert torch.equal(again(tokens), small(tokens))
    whole = small.double()(tokens)  # the weights that it stands for, without rounded inputs
    torch.testing.assert_close(again(tokens).double(), whole, rtol=0, atol=1e-3 * float(whole.std()))
