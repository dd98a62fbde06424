import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoestring import native
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.decode.engine import generate
from shoestring.decode.settings.generation import Sampling
from shoestring.models import packed24, saving
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from tests import degenerate


def pruned(rows: int, inputs: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight whose groups have two, one or no values."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(rows * inputs // 4, 4, generator=generator)
    keep = torch.rand(groups.shape, generator=generator).topk(2, 1).indices
    weight = torch.zeros_like(groups).scatter(1, keep, groups.gather(1, keep))
    weight[torch.rand(len(weight), generator=generator) < 0.1, :2] = 0
    return weight.view(rows, inputs).to(dtype)


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 6), st.sampled_from(["float32", "bfloat16", "float16", "float64"]), st.data())
def test_a_packed_weight_unpacks_bit_by_bit(rows, bytes_a_row, name, data):
    weight = pruned(rows, 8 * bytes_a_row, seed=data.draw(st.integers(0, 999)), dtype=getattr(torch, name))
    values, indices = packed24.pack(weight)
    assert values.dtype is weight.dtype and values.shape == (rows, 4 * bytes_a_row)
    assert indices.dtype is torch.uint8 and indices.shape == (rows, bytes_a_row)
    assert torch.equal(packed24.unpack(values, indices), weight)
    assert packed24.is_24(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_groups_of_zeros_with_and_without_a_sign_ones_ties_and_tiny_values(dtype):
    """`weight * mask` leaves zeros with a sign; those for which a group has a place keep it."""
    groups = degenerate.groups((0.0, -0.0, 1.0, -1.0, degenerate.DENORMAL, float("nan"))).to(dtype)
    groups = groups[(groups != 0).sum(1) <= 2]
    weight = torch.cat((groups, groups[-len(groups) % 2 or len(groups) :]))
    weight = weight[: len(weight) // 2 * 2].view(-1, 8)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize]
    values, indices = packed24.pack(weight)
    back = packed24.unpack(values, indices)
    fits = (((weight != 0) | weight.signbit()).view(-1, 4).sum(1) <= 2)[:, None].expand(-1, 4).reshape(weight.shape)
    assert torch.equal(back.view(bits)[fits], weight.view(bits)[fits]) and fits.any() and not fits.all()
    torch.testing.assert_close(back, weight, rtol=0, atol=0, equal_nan=True)


def test_places_ascend_within_their_group_at_the_bits_that_are_documented():
    weight = torch.tensor([[0.0, 5.0, 0.0, 7.0, 1.0, 0.0, 2.0, 0.0]])
    values, indices = packed24.pack(weight)
    assert values.tolist() == [[5.0, 7.0, 1.0, 2.0]]
    assert indices.tolist() == [[1 | 3 << 2 | 0 << 4 | 2 << 6]]


def test_sizes_are_those_that_are_promised():
    for dtype, share in ((torch.float32, 17 / 32), (torch.bfloat16, 9 / 16)):
        weight = pruned(64, 64, dtype=dtype)
        assert sum(part.nbytes for part in packed24.pack(weight)) / weight.nbytes == share


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), -1e-45])
def test_what_is_not_2_4_is_refused_and_nothing_is_dropped(value):
    weight = pruned(4, 16)
    weight[2, 4:8] = torch.tensor([1.0, value, 2.0, 0.0])
    assert not packed24.is_24(weight)
    with pytest.raises(ConfigError, match="not 2:4: 1 of 16 groups"):
        packed24.pack(weight)


@pytest.mark.parametrize("shape", [(4, 12), (4, 7), (8,), (2, 2, 8)])
def test_shapes_that_cannot_be_packed_are_refused(shape):
    with pytest.raises(ConfigError, match="not a multiple of 8"):
        packed24.pack(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [8, 16, 24, 64, 200])
def test_the_native_product_agrees_with_float64(inputs, dtype):
    for rows in (1, 3, 4, 65, 130):
        weight = pruned(rows, inputs, seed=rows, dtype=dtype)
        values, indices = packed24.pack(weight)
        for columns in (1, 2, 3, 5, 8):
            x = torch.randn(columns, inputs, generator=torch.Generator().manual_seed(columns)).to(dtype)
            kernel = packed24._kernel()
            assert kernel is not None
            y = packed24._native(kernel, x, values, indices).double()
            exact, scale = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
            assert y.shape == exact.shape
            bound = 2e-6 if dtype is torch.float32 else 4.1e-3  # of bf16: the result is rounded to it
            assert bool(((y - exact).abs() <= bound * scale + 1e-30).all())


def test_more_rows_and_other_types_go_through_the_unpacked_weight():
    for dtype, rows in ((torch.float64, 1), (torch.float32, 500)):
        weight = pruned(16, 32, dtype=dtype)
        x = torch.randn(rows, 32, dtype=dtype)
        assert torch.equal(packed24.packed_linear(x, *packed24.pack(weight)), x @ weight.T)


def test_a_packed_layer_stands_for_a_linear_one():
    linear = nn.Linear(24, 10)
    linear.weight.data = pruned(10, 24)
    layer = packed24.PackedLinear.from_linear(linear)
    x = torch.randn(2, 3, 24)
    torch.testing.assert_close(layer(x), linear(x))
    model = nn.Sequential(nn.Linear(24, 10))
    packed24.replace(model, ["0"])
    model.load_state_dict(nn.Sequential(layer).state_dict())
    torch.testing.assert_close(model(x), linear(x))
    assert not list(model.parameters())


def test_only_linear_layers_are_replaced():
    with pytest.raises(ConfigError, match="`0` is a ReLU, not a linear layer"):
        packed24.replace(nn.Sequential(nn.ReLU()), ["0"])


def test_an_input_of_another_width_is_an_error_before_memory_is_read():
    values, indices = packed24.pack(pruned(8, 16))
    with pytest.raises(RuntimeError, match="8 features for a layer of 16"):
        packed24.packed_linear(torch.ones(1, 8), values, indices)
    with pytest.raises(ConfigError, match="do not fit"):
        packed24.PackedLinear(values, indices[:4])


def test_it_compiles_without_a_break():
    layer = packed24.PackedLinear(*packed24.pack(pruned(8, 16)), torch.ones(8))
    x = torch.randn(2, 16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_without_a_compiler_the_weight_is_unpacked_which_is_said_once(monkeypatch, caplog):
    weight = pruned(8, 16)
    packed = packed24.pack(weight)
    packed24._kernel.cache_clear(), native.load.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    try:
        with pytest.raises(native.CompileError, match="needs a C compiler"):
            native.load("packed24")
        x = torch.randn(1, 16)
        for _ in range(2):
            assert torch.equal(packed24.packed_linear(x, *packed), nn.functional.linear(x, weight))
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "slower than dense ones: `packed24.c` needs a C compiler" in warning
    finally:
        packed24._kernel.cache_clear()


@pytest.fixture
def sparse_gpt(tmp_path):
    """A folder with a GPT whose feed-forward layers are 2:4, and the model."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=32, hidden=64, layers=2, heads=2, kv_heads=2, context=32)).eval()
    for block in model.blocks:
        for linear in (block.mlp.gate_up, block.mlp.down):
            linear.weight.data = pruned(*linear.weight.shape)
    saving.save_model(model, None, tmp_path / "dense", {})
    (tmp_path / "dense" / "notes.txt").write_text("mine")
    return tmp_path / "dense", model


def test_a_packed_folder_opens_as_the_model_that_it_was(sparse_gpt, tmp_path):
    dense, model = sparse_gpt
    packing, _ = load_model(dense)
    names = saving.save_packed(packing, dense, tmp_path / "packed")
    assert names == [f"blocks.{i}.mlp.{name}" for i in (0, 1) for name in ("gate_up", "down")]
    packed, _ = load_model(tmp_path / "packed")
    tokens = torch.randint(64, (1, 20))
    torch.testing.assert_close(packed(tokens), model(tokens), atol=1e-4, rtol=0)
    drawn = [
        list(generate(each.double(), [1, 2, 3], max_new=20, sampling=Sampling(seed=5))) for each in (packed, model)
    ]
    assert drawn[0] == drawn[1]
    assert (tmp_path / "packed" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("save", [saving.save_packed, saving.save_like])
def test_files_beside_the_weights_are_copied_and_the_weights_in_other_formats_are_not(sparse_gpt, tmp_path, save):
    """In the cache of Hugging Face files are links; to another folder they would lead nowhere."""
    dense, model = sparse_gpt
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0a1b").write_text("{}")
    (dense / "tokenizer_config.json").symlink_to(Path("../blobs/0a1b"))
    (dense / "pytorch_model.bin").write_bytes(b"the dense weights")
    (dense / "onnx").mkdir()
    folder = tmp_path / "elsewhere" / "made"
    save(model, dense, folder)
    made = sorted(path.name for path in folder.iterdir())
    assert made == ["config.json", "model.safetensors", "notes.txt", "tokenizer_config.json"]
    assert (folder / "tokenizer_config.json").read_text() == "{}"


def test_a_model_that_is_not_2_4_is_not_packed(tmp_path):
    model = GPT(GPTConfig(vocab_size=64, dim=32, hidden=64, layers=1, heads=2, kv_heads=2, context=32))
    saving.save_model(model, None, tmp_path / "dense", {})
    with pytest.raises(ConfigError, match=r"no linear layer of .* is 2:4"):
        saving.save_packed(model, tmp_path / "dense", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("damage", ["cut", "names", "dtype"])
def test_a_damaged_packed_folder_is_one_clear_error(sparse_gpt, tmp_path, damage):
    dense, model = sparse_gpt
    folder = tmp_path / "packed"
    saving.save_packed(model, dense, folder)
    config = json.loads((folder / "config.json").read_text())
    if damage == "cut":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "names":
        config["shoestring"]["layers"]["2:4"] = ["blocks.9.mlp.down"]
    else:
        config["shoestring"]["dtype"] = "load"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="cannot load the packed model"):
        load_model(folder)
