"""Layers of others are replaced by what they compute and by who reads their weight, whatever their class is called."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoestring.memory.adapters.layers import choose
from shoestring.models import adapter_folder, packed24, plausible, quantized, saving
from shoestring.models.adapters import LowRank
from shoestring.models.blocks import read_by_others, routers
from shoestring.models.plain_layers import is_product, read_directly, scale_of
from shoestring.sparse.masks import prune, row_mask


class Falcon(nn.Linear):
    def forward(self, x):
        hidden = x @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x).topk(1)


class Scaled(nn.Embedding):
    def __init__(self, words, width, factor):
        super().__init__(words, width, padding_idx=1)
        self.register_buffer("factor", torch.tensor(factor), persistent=False)

    def forward(self, tokens):
        return super().forward(tokens) * self.factor.to(self.weight.dtype)


class Positions(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens + 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_product_is_known_by_what_it_computes(bias, device):
    with torch.device(device):
        assert is_product(nn.Linear(5, 7, bias=bias)) and is_product(Falcon(5, 7, bias=bias))
        assert not is_product(Router(5, 7, bias=bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.5, 5.656854, 1.0])
def test_an_embedding_is_known_by_its_factor(factor, dtype):
    expected = float(torch.tensor(factor).to(dtype))
    assert scale_of(Scaled(9, 32, factor).to(dtype)) == pytest.approx(expected)
    assert scale_of(nn.Embedding(9, 32)) == 1 and scale_of(Positions(9, 32)) is None
    layer = Scaled(40, 32, factor)
    tokens = torch.tensor([[0, 39, 7]])
    rounded = quantized.of(layer, 8)
    torch.testing.assert_close(rounded(tokens), layer(tokens), atol=0.03 * factor, rtol=0)
    torch.testing.assert_close(rounded.logits(torch.eye(32)[:1]), rounded.dense()[:, 0][None], atol=1e-3, rtol=1e-3)


class Experts(nn.Module):
    """As transformers holds them: all matrices in two tensors, which one is read of at a time, or all at once."""

    def __init__(self, count=3):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 48, 32))
        self.down = nn.Parameter(torch.randn(count, 32, 64))
        self.at_once = nn.Parameter(torch.randn(count, 32, 32))

    def forward(self, x):
        for expert in torch.arange(len(self.at_once)):
            hidden = F.linear(x, self.up[expert])
            x = x + F.linear(F.pad(hidden, (0, 16)).relu(), self.down[expert])
        return torch.bmm(x[None].expand(len(self.at_once), -1, -1), self.at_once).sum(0)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.shared = nn.Linear(32, 3, bias=False), Experts(), Falcon(32, 32)

    def forward(self, x):
        return self.experts(x) * self.gate(x).softmax(-1)[:, :1] + self.shared(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Scaled(48, 32, 4.0)
        self.layers = nn.ModuleList([Mixture() for _ in range(2)])
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, -2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.to(self.head.weight.dtype)).view(*tokens.shape, -1)


@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_experts_are_rounded_where_they_are_read_one_by_one(bits, tmp_path):
    torch.manual_seed(0)
    model = Model()
    chosen, left = quantized.choose(model, bits)
    experts = {f"layers.{layer}.experts.{name}" for layer in (0, 1) for name in ("up", "down")}
    assert experts < set(chosen) and {chosen[name] for name in experts} == {bits}
    assert left["layers.1.experts.at_once"] == "its matrices are not read one by one"
    assert left["layers.0.gate"] == "it chooses experts" and "layers.0.shared" in chosen
    expected = copy.deepcopy(model)
    for name in experts:
        weight = expected.get_parameter(name)
        flat = nn.Linear(weight.shape[2], weight.shape[0] * weight.shape[1], bias=False)
        flat.weight.copy_(weight.flatten(0, 1))
        weight.copy_(quantized.of(flat, bits).dense().view_as(weight))
    quantized.replace(model, dict.fromkeys(experts, bits), rounded=True)
    tokens = torch.tensor([[1, 5, 9]])
    torch.testing.assert_close(model(tokens), expected(tokens))
    assert quantized.quantized(model) == dict.fromkeys(experts, bits)
    again = Model()
    quantized.replace(again, quantized.quantized(model))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(tokens), model(tokens))


def test_what_reads_a_weight_without_calling_its_layer_is_seen():
    model = Model()
    assert read_directly(model) == {model.head}
    assert type(model.head) is nn.Linear and model.training and model.layers[0].training
    assert read_directly(nn.Linear(3, 3)) == set()  # it reads no tokens
    assert routers(model) == {layer.gate for layer in model.layers}


def test_a_layer_that_others_read_is_not_packed():
    model = Model()
    with torch.no_grad():
        for layer in (model.head, model.layers[0].shared):
            layer.weight.copy_(prune(layer.weight, row_mask(layer.weight)))
    assert packed24.pack_layers(model) == ["layers.0.shared"]


def test_a_state_space_mixer_is_left_but_for_its_first_product():
    mixer = nn.Module()
    mixer.in_proj, mixer.x_proj, mixer.dt_proj, mixer.out_proj = (nn.Linear(4, 4) for _ in range(4))
    mixer.A_log, mixer.D = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    assert set(read_by_others(mixer)) == {mixer.x_proj, mixer.dt_proj, mixer.out_proj}
    del mixer.D
    assert not read_by_others(mixer)


def test_adapters_leave_by_names_that_select_them_alone(tmp_path):
    """In PEFT a last part such as `0` selects blocks, too, and names of fused experts mean the experts."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)])
    adapters = {f"blocks.{block}.0": LowRank(torch.ones(1, 4), torch.ones(4, 1), 1.0) for block in range(3)}
    adapter_folder.write(tmp_path, model, adapters, base="", fingerprint="")
    assert f'"target_modules": {list(adapters)}'.replace("'", '"') in _flat(tmp_path / "adapter_config.json")
    mixture = nn.Module()
    mixture.layers = nn.ModuleList([nn.Module()])
    mixture.layers[0].gate_up_proj = nn.Parameter(torch.ones(2, 4, 4))
    mixture.layers[0].down_proj, mixture.layers[0].q_proj = nn.Linear(4, 4), nn.Linear(4, 4)
    assert list(choose(mixture, ()).adapted) == ["layers.0.q_proj"]
    assert list(choose(mixture, ("*down_proj",)).adapted) == ["layers.0.down_proj"]


def _flat(path):
    return " ".join(path.read_text().split()).replace("[ ", "[").replace(" ]", "]")


def test_sizes_named_after_layers_count_no_layers(tmp_path):
    stored = plausible.StoredWeights(tensors=40, nbytes=10_000_000)
    sizes = {"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "block_size": 1024}
    plausible.check_config({**sizes, "num_hidden_layers": 40}, stored, tmp_path)
    with pytest.raises(Exception, match="num_hidden_layers is 4,096"):
        plausible.check_config({"num_hidden_layers": 4096}, stored, tmp_path)


def test_a_model_whose_weights_are_all_rounded_is_saved_in_its_type(tmp_path):
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)).bfloat16()
    quantized.replace(model, {"0": 8, "1": 8}, rounded=True)
    origin = {"model": "torch.nn:Sequential", "arguments": {}, "offered": {}}
    saving.save_model(model, None, tmp_path / "model", origin)
    assert '"dtype": "bfloat16"' in (tmp_path / "model" / "config.json").read_text()
