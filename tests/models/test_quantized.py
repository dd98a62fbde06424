"""Weights of 8 and 4 bits: their numbers, their order in memory, products against float64, and folders."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoestring import native
from shoestring.cli import main
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.models import quantized, rounding
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from shoestring.models.saving import save_model


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(weight, numbers, scales, bits):
    values = (numbers.double() - {8: 128, 4: 8}[bits]) * scales.double()[..., None]
    return (values.flatten(1) - weight.double()).square().sum()


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from([8, 4]), st.integers(0, 999))
def test_what_is_packed_unpacks_bit_by_bit(rows, groups, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(256 if bits == 8 else 16, (rows, groups, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randn(rows, groups, generator=generator).half()
    weight, packed_scales = rounding.pack(numbers, scales, bits)
    assert weight.shape == (-(-rows // 16), groups, 64 * bits) and weight.dtype is torch.uint8
    back = rounding.unpack(weight, packed_scales, rows)
    assert torch.equal(back[0], numbers) and torch.equal(back[1], scales)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (37, 3), (64, 5)])
def test_dequantising_in_one_pass_gives_the_bits_of_torchs_operations(rows, groups, dtype, bits):
    packed, scales = rounding.pack(*rounding.quantize(draw(rows, 32 * groups) * 0.1, bits), bits)
    found = rounding.dequantize(packed, scales, rows, dtype)
    assert found.dtype is dtype and torch.equal(found, rounding.plain_dequantize(packed, scales, rows, dtype))


def test_the_order_in_memory_is_the_one_that_is_documented():
    numbers = torch.randint(16, (32, 2, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    eight, scales = rounding.pack(numbers, draw(32, 2), 8)
    four, _ = rounding.pack(numbers, draw(32, 2), 4)
    sixteen, group, chunk, row, byte = 1, 1, 2, 5, 3
    assert eight[sixteen, group, chunk * 64 + row * 4 + byte] == numbers[21, group, 4 * chunk + byte]
    low, high = numbers[21, group, 4 * chunk + byte], numbers[21, group, 16 + 4 * chunk + byte]
    assert four[sixteen, group, chunk * 64 + row * 4 + byte] == low | high << 4
    assert scales.view(torch.float16)[sixteen, group, row] == draw(32, 2).half()[21, group]


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_to_nearest_and_keeps_zeros(bits):
    weight = draw(5, 96) * torch.logspace(-6, 2, 5)[:, None]
    weight[2, 32:64] = 0
    weight[:, ::3] = 0
    numbers, scales = rounding.quantize(weight, bits)
    values = (numbers.float() - {8: 128, 4: 8}[bits]) * scales.float()[..., None]
    assert bool((values.flatten(1)[weight == 0] == 0).all())
    least, most = (1, 255) if bits == 8 else (0, 15)
    assert numbers.min() >= least and numbers.max() <= most
    for step in (-1, 1):  # no other number is nearer
        other = (numbers.int() + step).clamp(least, most)
        others = (other.float() - {8: 128, 4: 8}[bits]) * scales.float()[..., None]
        gap, other_gap = ((each.flatten(1) - weight).abs() for each in (values, others))
        assert bool((gap <= other_gap + 1e-6 * weight.abs()).all())


def test_four_bits_have_less_error_than_the_largest_weight_alone_gives():
    """The rule of llama.cpp: a scale of the largest weight over -8."""
    weight = draw(64, 256)
    groups = weight.view(64, 8, 32)
    scales = (groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8).half()
    numbers = (groups / scales.float()).round().clamp(-8, 7) + 8
    plain = error(weight, numbers, scales.squeeze(2), 4)
    assert error(weight, *rounding.quantize(weight, 4), 4) < 0.9 * plain


@pytest.mark.parametrize("bits", [8, 4])
def test_the_native_product_agrees_with_float64_in_every_row_alone_and_beside_others(bits):
    for outputs, inputs in ((1, 32), (17, 96), (48, 160), (33, 1024)):
        packed = rounding.pack(*rounding.quantize(draw(outputs, inputs), bits), bits)
        dense = rounding.dequantize(*packed, outputs, torch.float64)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 19, 40):
            x = draw(rows, inputs, seed=rows) * torch.logspace(-3, 3, rows)[:, None]
            x[0, :32] = 0
            y = quantized.quantized_linear(x, *packed, outputs)
            # Each input is off by at most half a step, of which there are 32512 to the largest of its group.
            largest = x.double().view(rows, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).flatten(1)
            bound = largest / 2 / 32512 @ dense.abs().T + 2e-6 * (x.double().abs() @ dense.abs().T)
            assert bool(((y.double() - x.double() @ dense.T).abs() <= bound + 1e-30).all())
            alone = torch.cat([quantized.quantized_linear(row[None], *packed, outputs) for row in x])
            assert torch.equal(y, alone)


@pytest.mark.parametrize("name", ["skinny_quantized", "blocked_quantized"])
def test_it_is_the_native_product_that_is_taken(name, monkeypatch):
    monkeypatch.setattr(quantized.F, "linear", None)
    packed = rounding.pack(*rounding.quantize(draw(16, 64), 4), 4)
    assert quantized.kernel(name) is not None
    quantized.quantized_linear(draw(1 if name == "skinny_quantized" else 17, 64), *packed, 16)


def test_in_training_many_rows_are_multiplied_by_the_dequantised_weight():
    packed = rounding.pack(*rounding.quantize(draw(16, 64), 8), 8)
    x, dense = draw(40, 64).requires_grad_(), rounding.dequantize(*packed, 16, torch.float32)
    y = quantized.quantized_linear(x, *packed, 16)
    assert torch.equal(y, x @ dense.T)


def test_extreme_numbers_do_not_overflow():
    numbers = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None].expand(2, 1, 32).contiguous()
    packed = rounding.pack(numbers, torch.ones(2, 1).half(), 8)
    x = torch.tensor([1.0, -1.0])[:, None].expand(2, 32)
    y = quantized.quantized_linear(x, *packed, 2)
    torch.testing.assert_close(y, torch.tensor([[-4096.0, 4064.0], [4096.0, -4064.0]]))


def test_double_precision_goes_through_the_dequantised_weight():
    packed = rounding.pack(*rounding.quantize(draw(16, 64), 8), 8)
    for dtype, rows in ((torch.float64, 1), (torch.float64, 100)):
        x = draw(rows, 64).to(dtype)
        dense = rounding.dequantize(*packed, 16, dtype)
        assert torch.equal(quantized.quantized_linear(x, *packed, 16), x @ dense.T)


@pytest.mark.parametrize("bits", [8, 4])
def test_an_embedding_returns_its_rows_in_the_type_of_the_model(bits):
    layer = quantized.of(nn.Embedding(50, 64), bits)
    tokens = torch.tensor([[0, 49, 17], [3, 3, 16]])
    assert torch.equal(layer(tokens), layer.dense()[tokens])
    assert layer.double()(tokens).dtype is torch.float64
    x = draw(2, 64)
    torch.testing.assert_close(layer.logits(x), x @ layer.dense().T, atol=1e-3, rtol=1e-3)


def test_casts_of_a_model_leave_the_numbers_alone():
    linear = nn.Linear(64, 24)
    layer = quantized.of(linear, 8)
    x = draw(2, 64)
    y = layer(x)
    torch.testing.assert_close(y, linear(x), atol=0.02, rtol=0)
    assert torch.equal(layer.double().float()(x), y)
    assert layer.bfloat16()(x.bfloat16()).dtype is torch.bfloat16
    assert not list(layer.parameters())


def test_it_compiles_without_a_break():
    layer = quantized.of(nn.Linear(32, 8), 4)
    x = draw(2, 32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize(
    "weight, why",
    [
        (torch.zeros(4, 33), "not a multiple of 32"),
        (torch.zeros(4, 32, dtype=torch.int8), "not a matrix"),
        (torch.full((1, 32), float("nan")), "not finite"),
        (torch.full((1, 32), 1e9), "beyond those of fp16"),
    ],
)
def test_what_cannot_be_quantised_is_refused(weight, why):
    with pytest.raises(ConfigError, match=why):
        rounding.quantize(weight, 8)


def test_shapes_are_checked_before_memory_is_read():
    weight, scales = rounding.pack(*rounding.quantize(draw(16, 64), 8), 8)
    with pytest.raises(RuntimeError, match="32 features for a layer of 64"):
        quantized.quantized_linear(torch.ones(1, 32), weight, scales, 16)
    for wrong in ((weight, scales[:, :1], 16), (weight, scales, 17), (weight[..., :100], scales, 16)):
        with pytest.raises(ConfigError, match="do not form a weight of"):
            quantized.QuantizedLinear(*wrong)


def test_without_a_compiler_the_weight_is_dequantised_which_is_said_once(monkeypatch, caplog):
    packed = rounding.pack(*rounding.quantize(draw(16, 64), 4), 4)
    quantized.kernel.cache_clear(), native.load.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    try:
        x = draw(1, 64)
        for _ in range(2):
            y = quantized.quantized_linear(x, *packed, 16)
            assert torch.equal(y, x @ rounding.dequantize(*packed, 16, torch.float32).T)
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "slower than dense ones: `skinny_quantized.c` needs a C compiler" in warning
    finally:
        quantized.kernel.cache_clear()


# -- folders -----------------------------------------------------------------------------------------------------------


def gpt(tied):
    torch.manual_seed(0)
    shape = {"vocab_size": 80, "dim": 64, "hidden": 96, "layers": 2, "heads": 2, "kv_heads": 1, "context": 32}
    return GPT(GPTConfig(**shape, tied=tied, init_std=0.1)).eval()


@pytest.mark.parametrize("tied, bits", [(True, 8), (False, 4)])
@torch.inference_mode()
def test_quantize_writes_a_folder_that_opens_as_any_other(tied, bits, tmp_path, capsys):
    model = gpt(tied)
    save_model(model, None, tmp_path / "whole", {})
    assert main(["quantize", str(tmp_path / "whole"), "--bits", str(bits), "--out", str(tmp_path / "small")]) == 0
    said = capsys.readouterr().out
    assert f"{bits} bits: " in said and "B before" in said
    small, _ = load_model(tmp_path / "small")
    layers = quantized.quantized(small)
    assert layers.keys() == {n for n, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    assert {its for name, its in layers.items() if "blocks" in name} == {bits} and layers["embed"] == 8
    tokens = torch.arange(20)[None]
    gap = (small(tokens) - model(tokens)).norm() / model(tokens).norm()
    assert gap < (0.02 if bits == 8 else 0.25)
    save_model(small, None, tmp_path / "again", {})
    again, _ = load_model(tmp_path / "again")
    assert torch.equal(again(tokens), small(tokens))


def test_a_folder_that_is_damaged_or_in_use_is_refused(tmp_path, capsys):
    save_model(gpt(True), None, tmp_path / "whole", {})
    arguments = ["quantize", str(tmp_path / "whole"), "--out", str(tmp_path / "small")]
    assert main(arguments) == 0 and main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err
    config = tmp_path / "small" / "config.json"
    content = json.loads(config.read_text())
    content["shoestring"]["layers"]["bits"]["embed"] = 4
    config.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="cannot load the quantized model"):
        load_model(tmp_path / "small")


@torch.inference_mode()
def test_gpt2_of_transformers_is_quantised_with_its_transposed_layers_and_its_tied_head(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 80, "n_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()
    model.save_pretrained(tmp_path / "whole")
    assert main(["quantize", str(tmp_path / "whole"), "--out", str(tmp_path / "small")]) == 0
    small, _ = load_model(tmp_path / "small")
    assert set(quantized.quantized(small)) == {
        "transformer.wte", "lm_head",
        *(f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    }  # fmt: skip
    assert small.lm_head.weight.data_ptr() == small.transformer.wte.weight.data_ptr()
    tokens = torch.arange(20)[None]
    assert (small(tokens).logits - model(tokens).logits).norm() / model(tokens).logits.norm() < 0.02


def test_zeros_of_a_pruned_model_stay_zeros(tmp_path):
    save_model(gpt(True), None, tmp_path / "whole", {})
    assert main(["prune", str(tmp_path / "whole"), "--out", str(tmp_path / "pruned")]) == 0
    assert main(["quantize", str(tmp_path / "pruned"), "--bits", "4", "--out", str(tmp_path / "small")]) == 0
    small, _ = load_model(tmp_path / "small")
    for block in small.blocks:
        zeros = (block.mlp.down.dense().view(-1, 4) == 0).sum(1)
        assert bool((zeros >= 2).all())
