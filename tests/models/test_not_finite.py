"""What is not finite in an input is not finite after a layer, whichever path computes its product; else a loss of NaN
could not be refused."""

import pytest
import torch
from torch import nn

from shoestring.models import nf4, packed24, quantized, skinny
from shoestring.sparse import masks

INPUTS, OUTPUTS = 128, 21
OTHER_TYPES = torch.float16, torch.float64
WRONG = [float("nan"), float("inf"), -float("inf")]


def pruned():
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS)
    with torch.no_grad():
        layer.weight.masked_fill_(~masks.row_mask(layer.weight), 0)
        layer.weight[:, :4] = torch.tensor([1.0, 0, 2, 0])  # no output has a weight for inputs 1 and 3
    return layer


def layers():
    layer = pruned()
    yield "packed24", packed24.PackedLinear.from_linear(layer)
    for bits in (8, 4):
        yield f"{bits} bits", quantized.of(layer, bits)
        yield f"{bits} bits of 2:4", quantized.of(packed24.PackedLinear.from_linear(layer), bits)


LAYERS = dict(layers())


@pytest.mark.parametrize(
    "wrong", [WRONG[0], *(pytest.param(each, marks=pytest.mark.slow) for each in WRONG[1:])], ids=str
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_TYPES)],
    ids=str,
)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_it_stays_in_every_output_of_its_row_and_in_no_other(layer, dtype, wrong):
    for gradients in (False, True):
        for rows in (1, 3, 9, 20):
            if dtype != torch.float32 and isinstance(layer, packed24.PackedLinear):
                continue
            for column in (0, 1, 37, INPUTS - 1):
                x = torch.randn(rows, INPUTS, dtype=dtype, generator=torch.Generator().manual_seed(rows))
                x[rows // 2, column] = wrong
                y = layer(x.requires_grad_(gradients))
                wanted = torch.zeros_like(y, dtype=torch.bool)
                wanted[rows // 2] = (x.detach() @ layer_dense(layer, dtype).T).isfinite().logical_not()[rows // 2]
                assert torch.equal(~y.isfinite() & wanted, wanted), (rows, column)
                assert y[torch.arange(rows) != rows // 2].isfinite().all()


def layer_dense(layer, dtype):
    if isinstance(layer, packed24.PackedLinear):
        return packed24.unpack(layer.values, layer.indices).to(dtype)
    return layer.dense().to(dtype)


@pytest.mark.parametrize("size", [0.0, 2.0**-140, 2.0**-126, 1e-30, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_inputs_of_any_size_are_multiplied(layer, size):
    x = torch.full((2, INPUTS), size)
    x[1] = torch.linspace(-1, 1, INPUTS) * size
    exact, y = x.double() @ layer_dense(layer, torch.float64).T + layer.bias.double(), layer(x)
    bound = 1e-4 * (x.double().abs() @ layer_dense(layer, torch.float64).abs().T) + 1e-6
    within = exact.abs() < 3e38
    assert ((y.double() - exact).abs() <= bound)[within].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_native_products_of_dense_weights_and_attention_keep_it(dtype, monkeypatch):
    monkeypatch.setattr(skinny, "FEWEST_WEIGHTS", 1)
    weight = torch.randn(OUTPUTS, INPUTS).to(dtype)
    for bits in (0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000):  # NaN of several contents, and infinity
        x = torch.ones(2, INPUTS)
        x[1, 5] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
        y = skinny.linear(x.to(dtype), weight)
        assert y[0].isfinite().all() and not y[1].isfinite().any()
        q, k, v = (torch.ones(1, 3, 2, 16).to(dtype), *(torch.ones(1, 2, 5, 16).to(dtype) for _ in range(2)))
        for each in (q, k, v):
            each[0, 1, 1, 5] = x[1, 5]
            y = skinny.attention(q, k, v, torch.arange(3)[None])
            assert y is None or not y[0, 1, 1].isfinite().all()
            each[0, 1, 1, 5] = 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_are_not_finite_show_in_the_dequantised_weight(bits, dtype):
    """Of a damaged file: NaN of any content, also where all its bits are set."""
    layer = quantized.of(nn.Linear(64, 20), bits)
    for number, code in enumerate((0x7FFF, -1, 0x7E00, 0x7C00)):
        layer.scales[0, 0, number] = code
    dense = layer.dense(dtype)
    assert not dense[:4, :32][layer.dense(torch.float64)[:4, :32] != 0].isfinite().any()
    assert dense[4:].isfinite().all()


def test_nf4_keeps_it():
    pytest.importorskip("bitsandbytes")
    layer = nf4.NF4Linear(nn.Linear(INPUTS, OUTPUTS))
    for wrong in WRONG:
        x = torch.randn(2, INPUTS)
        x[1, 3] = wrong
        assert not layer(x)[1].isfinite().all() and layer(x)[0].isfinite().all()
