"""A run that starts from the model in the folder of another run."""

import json
import shutil

import pytest
import torch
from torch import nn

from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.models.loading import build_model, load_model, origin_of
from shoestring.models.saving import save_model
from shoestring.models.tokenizer_files import require_tokenizer
from shoestring.run import parse
from shoestring.training.data_loading import tokenizer_of
from shoestring.training.loop import train

SHAPE = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "hidden": 16}


class Own(nn.Module):
    """A model of a user's module, which only its callable builds."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def own(vocab_size, width=8):
    return Own(vocab_size, width)


def run(folder, source, *, steps=1, rate=1e-30, **tables):
    settings = {"model": source, "data": str(folder.parent / "text.txt"), "steps": steps, "batch": 2}
    document = {
        "run": settings | {"folder": str(folder)},
        "data": {"vocabulary": 300, "sequence": 8, "held_out": 0.5},
        "optim": {"sgd": {"lr": rate}},
    }
    for name, table in tables.items():
        document[name] = document.get(name, {}) | table
    return parse(document)


@pytest.fixture(scope="module", params=["shoestring.models.gpt:tiny", "test_start_from:own"])
def trained(request, tmp_path_factory):
    """The folder of a finished run, beside its text."""
    root = tmp_path_factory.mktemp("trained")
    (root / "text.txt").write_text("\n\n".join(f"the {n} lazy dogs jump over {n * n} foxes" for n in range(400)))
    shape = SHAPE if request.param.endswith("tiny") else {}
    train(run(root / "first", request.param, rate=0.5, model=shape), World())
    return root


@pytest.fixture
def first(trained, tmp_path):
    """A copy of it, to be changed."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "first"


def state(folder):
    return load_model(folder)[0].state_dict()


@pytest.mark.slow
def test_training_starts_from_the_weights_and_with_the_tokenizer(first, tmp_path):
    again = run(tmp_path / "second", str(first), data={"tokenizer": "model"})
    train(again, World())
    assert tokenizer_of(again) == str(first / "model" / "tokenizer.json")
    assert all(torch.equal(before, state(tmp_path / "second")[name]) for name, before in state(first).items())
    shutil.rmtree(first)  # what leaves a run does not need the folder that it began from
    state(tmp_path / "second")
    for way in ("hf", "safetensors") if "blocks.0.mlp.down.weight" in state(tmp_path / "second") else ("safetensors",):
        out = tmp_path / f"as-{way}"
        assert main(["checkpoint", "export", str(tmp_path / "second"), "--to", str(out), "--as", way]) == 0
        assert all(torch.equal(before, state(out)[name]) for name, before in state(tmp_path / "second").items())


def test_the_tokenizer_of_a_run_that_is_still_training_lies_in_its_folder(first):
    assert require_tokenizer(first) == first / "model" / "tokenizer.json"
    shutil.rmtree(first / "model")
    assert require_tokenizer(first) == first / "tokenizer.json"
    (first / "tokenizer.json").unlink()
    for missing, message in ((first, "has no tokenizer.json"), (first / "absent", "there is no model")):
        with pytest.raises(ConfigError, match=message):
            require_tokenizer(missing)


def test_what_cannot_be_started_from_is_one_line(first):
    with pytest.raises(ConfigError, match="was made with another tokenizer"):
        tokenizer_of(run(first.parent / "second", str(first)))
    with pytest.raises(ConfigError, match="takes no arguments, got width"):
        build_model(str(first), {"width": 4}, {})
    config = json.loads((first / "model" / "config.json").read_text())
    if "vocab_size" in config:
        with pytest.raises(ConfigError, match="has a vocab_size of 300, and the data needs 301"):
            build_model(str(first), {}, {"vocab_size": 301})
        (first / "model" / "config.json").write_text(json.dumps(config | {"shoestring": {"format": "packed"}}))
        with pytest.raises(ConfigError, match="is packed and cannot be trained"):
            build_model(str(first), {}, {})


def test_without_weights_the_shape_alone_is_read(first):
    whole, shape = build_model(str(first), {}, {}), build_model(str(first), {}, {}, seed=1, weights=False)
    assert [value.shape for value in whole.state_dict().values()] == [v.shape for v in shape.state_dict().values()]
    assert any(not torch.equal(a, b) for a, b in zip(whole.parameters(), shape.parameters(), strict=True))
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in build_model(str(first), {}, {}).parameters())
    assert all(parameter.dtype is torch.float32 for parameter in whole.parameters())


def test_the_origin_of_a_model_is_what_is_in_its_folder(first, tmp_path):
    origin = origin_of(str(first), {}, {"vocab_size": 300, "context": 8})
    assert origin["model"] in ("shoestring.models.gpt:tiny", "test_start_from:own")
    plain = build_model(origin["model"], origin["arguments"], origin["offered"])
    save_model(plain, None, tmp_path / "copy", origin)
    assert state(tmp_path / "copy").keys() == state(first).keys()


@pytest.mark.slow
@pytest.mark.parametrize("slorb", [0, 4])
def test_the_checkpoint_of_a_sparse_model_is_exported_as_the_run_does(first, tmp_path, slorb):
    tables = {"ast": {"layers": ["*"], "slorb": slorb}}
    train(run(tmp_path / "second", str(first), rate=0.1, data={"tokenizer": "model"}, sparse=tables), World())
    left = state(tmp_path / "second")
    assert any(name.endswith("slorb") for name in left) == bool(slorb)
    gpt = "blocks.0.mlp.down.weight" in left
    for way in ("hf", "safetensors"):
        out = tmp_path / f"as-{way}"
        code = main(["checkpoint", "export", str(tmp_path / "second"), "--to", str(out), "--as", way])
        assert code == (0 if gpt or slorb or way == "safetensors" else 2)
        if code == 0 and (way == "hf" or not slorb):
            assert all(torch.equal(value, state(out)[name]) for name, value in left.items())


def test_a_loss_that_is_shared_with_a_teacher_is_not_given_in_bits_of_text(first, tmp_path):
    again = run(tmp_path / "second", str(first), data={"tokenizer": "model"}, sparse={"ast": {"layers": ["*"]}})
    result = train(again, World())
    assert {"loss", "task_loss", "distillation", "held_out_bits_per_byte"} <= result.metrics.keys()
    assert "bits_per_byte" not in result.metrics
    summary = json.loads((tmp_path / "second" / "summary.json").read_text())
    assert list(summary["bits_per_byte"]) == ["held out"]
    assert "Parts of the loss" in [each["title"] for each in summary["report_items"]]
    state(tmp_path / "second")
