"""Adapters over a model of 8 or 4 bits: its parameters are counted, and its memory is predicted, as those of any."""

import logging
import re

import pytest
import torch

from shoestring import memory, optim
from shoestring.cli import main
from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import cross_entropy
from shoestring.core.world import World
from shoestring.memory.predicted import predict
from shoestring.models.gpt import tiny
from shoestring.models.quantized import rounded_parameters
from tests.small_runs import write_run_file, write_texts

SHAPE = {"vocab_size": 300, "dim": 64, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 64}
BASES = [(16, "int"), (8, "int"), (4, "int"), (4, "nf4")]


def base(bits, kind):
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    return {"base_bits": bits, "base_type": kind}


@pytest.mark.parametrize(("bits", "kind"), [
    (4, "int"), *(pytest.param(*each, marks=pytest.mark.slow) for each in BASES if each != (4, "int")),
])  # fmt: skip
def test_the_step_is_predicted(bits, kind):
    """Also where no gradient flows to a layer's input and rows are few: a kernel would read an address there."""
    features = [memory.LoRA(**base(bits, kind)), memory.Recompute(), optim.AdamW()]

    def held(features):
        with torch.device("meta"):
            model = tiny(**SHAPE)
        return predict(model, features, cross_entropy, (1, 8), ranks=1).window.by_kind()

    plain, rounded = held([memory.LoRA(), *features[1:]]), held(features)
    weights = [sum(kinds.get(kind, 0) for kind in ("parameter", "buffer")) for kinds in (plain, rounded)]
    assert weights[1] < 0.75 * weights[0]
    assert rounded["optimizer state"] == plain["optimizer state"]


@pytest.mark.parametrize(("bits", "kind"), [
    (0, "int"), (8, "int"), (4, "int"), pytest.param(4, "nf4", marks=pytest.mark.slow),
])  # fmt: skip
def test_layers_stand_for_the_parameters_that_they_replace(bits, kind):
    model = tiny(**SHAPE)
    whole = sum(each.numel() for each in model.parameters())
    with compose(Job(model, world=World()), [memory.LoRA(rank=2, **base(bits, kind))]) as job:
        facts = job.trace.facts
        named = sum(each.numel() for each in attachments_of(job).named().values())
        assert named + rounded_parameters(attachments_of(job).module) == whole + facts["adapter_parameters"]
        assert facts["frozen_parameters"] == whole and (facts["rounded_parameters"] > 0) == bool(bits)


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize(("bits", "kind"), [(0, "int"), *BASES[1:]])
def test_every_parameter_is_counted_once(bits, kind, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "shoestring")
    tables = {
        "run": {"steps": 1, "batch": 2, "data": write_texts(tmp_path / "texts"), "folder": "run"},
        "model": {name: value for name, value in SHAPE.items() if name != "vocab_size"},
        "memory": {"lora": {"rank": 2} | base(bits, kind)},
    }
    path = write_run_file(tmp_path / "run.toml", tables)
    assert main(["check", str(path)]) == 0
    checked = capsys.readouterr().out
    assert main(["train", str(path)]) == 0
    said = r"([\d,]+) parameters are trained beside ([\d,]+) frozen ones(?:, ([\d,]+) of them of (\d) bits)?"
    trained, frozen, rounded, width = re.search(said, caplog.text).groups()
    assert re.search(said, checked).groups() == (trained, frozen, rounded, width)
    total = int(trained.replace(",", "")) + int(frozen.replace(",", ""))
    assert f", {total:,} parameters, {trained} of them trained; " in caplog.text
    assert f"parameters: {frozen}, without those that memory.lora will add" in checked
    model = tiny(**SHAPE | {"vocab_size": 257})
    if bits:
        inside = [
            layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "blocks" in name
        ]
        assert (int(rounded.replace(",", "")), width) == (sum(layer.weight.numel() for layer in inside), str(bits))
    else:
        assert rounded is None and int(frozen.replace(",", "")) == sum(each.numel() for each in model.parameters())
