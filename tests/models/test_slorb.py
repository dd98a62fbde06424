"""The adapter beside a pruned layer against its formula, and folders with adapters, which what opens models opens."""

import pytest
import torch
from torch import nn

from shoestring.core.errors import CheckpointError
from shoestring.models import packed24, saving, slorb
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model


def test_it_adds_the_product_with_sums_of_blocks():
    layer = nn.Linear(16, 6).double()
    x, factor = torch.randn(5, 3, 16, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    before = layer(x)
    undo = slorb.adapt(layer, nn.Parameter(factor))
    projection = torch.zeros(4, 16, dtype=torch.float64)
    for block in range(4):
        projection[block, 4 * block : 4 * block + 4] = 1
    torch.testing.assert_close(layer(x), before + x @ projection.T @ factor.T)
    assert slorb.adapted(layer) == {"": 4}
    undo()
    assert torch.equal(layer(x), before) and "slorb" not in dict(layer.named_parameters())


@pytest.mark.parametrize("size", [2, 4, 16])
def test_it_begins_with_the_best_approximation_by_one_number_a_block(size):
    dropped = torch.randn(6, 16, dtype=torch.float64)
    means = slorb.block_means(dropped, size)

    def error(factor):
        return (dropped - factor.repeat_interleave(size, 1)).square().sum()

    best = error(means)
    for place in range(means.numel()):
        for change in (1e-3, -1e-3):
            other = means.clone()
            other.view(-1)[place] += change
            assert error(other) > best


def test_blocks_divide_the_inputs():
    assert [slorb.block_size(columns, 16) for columns in (4096, 352, 20, 12)] == [16, 16, 4, 4]


def gpt():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=32, hidden=64, layers=2, heads=2, kv_heads=2, context=32)).eval()
    for block in model.blocks:
        block.mlp.down.weight.data.view(-1, 4)[:, ::2] = 0
    slorb.make_room(model, {"blocks.0.mlp.down": 4, "blocks.1.attention.qkv": 2})
    for name in slorb.adapted(model):
        nn.init.normal_(model.get_submodule(name).slorb)
    return model


@torch.no_grad()
def test_a_folder_with_adapters_opens_and_is_packed(tmp_path):
    model, tokens = gpt(), torch.arange(20)[None]
    saving.save_model(model, None, tmp_path / "adapted", {})
    opened, _ = load_model(tmp_path / "adapted")
    assert torch.equal(opened(tokens), model(tokens))
    names = saving.save_packed(opened, tmp_path / "adapted", tmp_path / "packed")
    assert names == ["blocks.0.mlp.down", "blocks.1.mlp.down"]
    packed, _ = load_model(tmp_path / "packed")
    assert isinstance(packed.blocks[0].mlp.down, packed24.PackedLinear)
    torch.testing.assert_close(packed(tokens), model(tokens), atol=1e-4, rtol=0)
    (tmp_path / "adapted" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot load the adapted model"):
        load_model(tmp_path / "adapted")


@torch.no_grad()
def test_weights_with_adapters_fill_a_plain_model():
    model, tokens = gpt(), torch.arange(20)[None]
    plain = GPT(model.config)
    slorb.fill(plain, model.state_dict())
    assert torch.equal(plain(tokens), model(tokens))
    with pytest.raises(RuntimeError, match="Missing"):
        slorb.fill(GPT(model.config), {})
