"""Pruning without training, against Wanda's formula in double precision, and the verb as a user types it."""

import pytest
import torch
from torch import nn

from shoestring import sparse
from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.models import packed24
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from shoestring.sparse import masks

SHAPE = {"vocab_size": 64, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "context": 16}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 4)
        self.calls = []
        self.head.register_forward_hook(lambda *_: self.calls.append(1))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net().double()


def batches():
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(-1, 1, 8, dtype=torch.float64)
    return [{"inputs": torch.randn(3, 5, 8, dtype=torch.float64, generator=generator) * scale} for _ in range(4)]


def kept_by(scores):
    """The two largest of every four, by sorting."""
    groups = scores.abs().reshape(-1, 4)
    return torch.zeros_like(groups).scatter(1, groups.argsort(1, descending=True)[:, :2], 1).bool().view(scores.shape)


def test_magnitude_keeps_the_two_largest_of_four_and_says_how_much_that_is():
    model, before = net(), net().state_dict()
    result = sparse.prune(model)
    assert list(result.kept_energy) == [f"blocks.{block}.{name}" for block in (0, 1) for name in ("up", "down")]
    for name, kept in result.kept_energy.items():
        weight = before[f"{name}.weight"]
        expected = weight * kept_by(weight)
        assert torch.equal(model.get_submodule(name).weight, expected)
        assert kept == pytest.approx(float(expected.square().sum() / weight.square().sum()))
    assert result.others == ["head"] and torch.equal(model.head.weight, before["head.weight"])
    assert result.share == pytest.approx(1 - 32 / (4 * 128 + 32))


def test_wanda_weighs_by_norms_of_inputs_that_pruned_blocks_return():
    model, reference = net().train(), net().eval()
    sparse.prune(model, metric="wanda", batches=batches())
    x = torch.cat([batch["inputs"] for batch in batches()])
    with torch.no_grad():
        for number, block in enumerate(reference.blocks):
            hidden = torch.relu(block.up(x))
            for layer, inputs in ((block.up, x), (block.down, hidden)):
                norms = inputs.square().sum((0, 1)).sqrt()
                expected = layer.weight * kept_by(layer.weight * norms)
                assert not torch.equal(expected, layer.weight * kept_by(layer.weight))
                layer.weight.copy_(expected)
            for name in ("up", "down"):
                pruned = getattr(model.blocks[number], name).weight
                assert torch.equal(pruned, getattr(block, name).weight)
            x = x + block(x)
    assert model.training and model.blocks[0].dropout.training  # as it was
    assert not model.calls  # nothing after a block is computed
    assert not model.blocks[0].up._forward_pre_hooks and not model.blocks[0]._forward_hooks


def test_a_layer_that_no_token_reaches_goes_by_magnitude():
    model = net()
    model.blocks[0].up.weight.data.zero_(), model.blocks[0].up.bias.data.fill_(-1.0)  # `down` sees zeros
    expected = model.blocks[0].down.weight * kept_by(model.blocks[0].down.weight)
    sparse.prune(model, metric="wanda", batches=batches())
    assert torch.equal(model.blocks[0].down.weight, expected)


def test_layers_by_patterns_and_why_others_stay_dense():
    model = net()
    model.blocks[1].up = nn.Linear(6, 16).double()
    result = sparse.prune(model, ["*.up", "head"])
    assert list(result.kept_energy) == ["blocks.0.up", "head"]
    assert result.dense == {"blocks.1.up": "16 x 6 does not divide into groups of four"}
    assert result.others == ["blocks.0.down", "blocks.1.down"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": ["nothing"]}, "no linear layer of Net can be pruned"),
        ({"metric": "wanda"}, "needs batches"),
    ],
)
def test_what_cannot_be_pruned_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        sparse.prune(net(), **arguments)


def test_on_gaussian_weights_it_keeps_what_is_known():
    """0.868 of the sum of squares, which torch's default by signed values is far from."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(1024, 1024, bias=False)])
    nn.init.normal_(model.blocks[0].weight)
    assert sparse.prune(model).kept_energy["blocks.0"] == pytest.approx(0.868, abs=0.002)


# -- the verb ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run."""
    root = tmp_path_factory.mktemp("prune")
    (root / "text.txt").write_text("\n\n".join(f"the {n} lazy dogs jump over {n * n} foxes" for n in range(400)))
    shape = "\n".join(f"{name} = {value}" for name, value in SHAPE.items() if name not in ("vocab_size", "context"))
    (root / "run.toml").write_text(
        f'[run]\ndata = "{root / "text.txt"}"\nsteps = 2\nbatch = 4\nfolder = "{root / "run"}"\n'
        f'[model]\n{shape}\nlayers = 2\n[data]\ntokenizer = "bytes"\nsequence = 16\nheld_out = 0.3\n'
    )
    assert main(["train", str(root / "run.toml")]) == 0
    return root / "run"


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_the_verb_writes_a_model_that_generates(trained, tmp_path, capsys, method, form):
    out = tmp_path / "out"
    assert main(["prune", str(trained), "--out", str(out), "--method", method, "--format", form, "--samples", "9"]) == 0
    said = capsys.readouterr().out
    assert f"2:4 by {method}: 8 layers, 100% of the weights of all linear layers" in said
    assert "  blocks.*.mlp.down: 2 layers, kept energy 0." in said
    assert "B before, " in said and f"written to {out}" in said
    dense, pruned = load_model(trained)[0], load_model(out)[0]
    named = {name: layer for name, layer in dense.named_modules() if isinstance(layer, nn.Linear)}
    for name, layer in named.items():
        after = pruned.get_submodule(name)
        assert isinstance(after, packed24.PackedLinear) == (form == "packed")
        weight = packed24.unpack(after.values, after.indices) if form == "packed" else after.weight
        masks.require_2_4(weight)
        assert torch.equal(weight, layer.weight * (weight != 0))
        by_magnitude = torch.equal(weight != 0, masks.row_mask(layer.weight))
        assert by_magnitude or method == "wanda"
    assert main(["generate", str(out), "--tokens", "3"]) == 0


def test_the_verb_says_which_layers_stay_dense_and_why(trained, tmp_path, capsys):
    assert main(["prune", str(trained), "--out", str(tmp_path / "out"), "--layers", "blocks.*.mlp.*"]) == 0
    said = capsys.readouterr().out
    assert "4 layers, 60% of the weights" in said
    assert "dense: blocks.0.attention.qkv and 3 more (no pattern matches)" in said


def test_what_the_verb_refuses_in_one_line(trained, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    bare = tmp_path / "bare"
    torch.manual_seed(0)
    from shoestring.models.saving import save_model

    save_model(GPT(GPTConfig(**SHAPE, layers=1)), None, bare, {})
    for arguments, message in (
        ([str(trained), "--out", str(tmp_path / "full")], "is not empty"),
        ([str(tmp_path / "full"), "--out", str(tmp_path / "new")], "holds no model"),
        ([str(bare), "--out", str(tmp_path / "new"), "--method", "wanda"], "has no tokenizer.json"),
        ([str(trained), "--out", str(tmp_path / "new"), "--layers", "no.*"], "no linear layer of GPT can be pruned"),
        ([str(trained / "model"), "--out", str(tmp_path / "new"), "--method", "wanda"], "name a text with --data"),
    ):
        assert main(["prune", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "new").exists()
