"""Chats share samples only in models that keep them from seeing each other; elsewhere each has a sample of its own."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import zoo
from shoestring import run as runs
from shoestring.cli import main
from shoestring.core.task import IGNORED, call_model, cross_entropy
from shoestring.core.world import World
from shoestring.training.data_loading import open_data
from shoestring.training.user_code import import_user_code
from tests.decode.small_server import CHATML, tokenizer
from tests.small_runs import write_run_file

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def caching():
    """A factory of the user's, as transformers' documentation shows it: its cache is on."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def not_caching():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))


class Wrapped(nn.Module):
    """A module of the user's around a model of transformers."""

    def __init__(self, cache: bool):
        super().__init__()
        self.inner = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=cache))

    def forward(self, tokens, position_ids=None):
        return self.inner(tokens, position_ids=position_ids).logits


def wrapped_caching():
    return Wrapped(cache=True)


def wrapped():
    return Wrapped(cache=False)


def run_of(folder, model, **tables):
    """The run of a model on chats: a factory above, or a family of the zoo that is saved first."""
    tokenizer(CHATML).save(folder / "tokenizer.json")
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "ab" * (n % 5 + 1)}]}
        for n in range(24)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    target = f"{__name__}:{model}"
    if model not in globals():
        zoo.build(model, dtype=torch.float32).save_pretrained(folder / "model")
        target = f"hf:{folder / 'model'}"
    data = {"form": "chat", "tokenizer": str(folder / "tokenizer.json"), "sequence": 64}
    run = {"model": target, "data": str(folder / "chats.jsonl"), "steps": 2, "folder": str(folder / "run")}
    empty = dict.fromkeys(("dim", "layers", "heads", "kv_heads", "hidden"))
    return write_run_file(folder / "run.toml", {"run": run, "data": data, "model": empty, **tables})


def losses(model, sample):
    """The loss of a sample, and the sum of those of its chats alone."""
    batch = {name: value[None] for name, value in sample.items()}
    together = float(cross_entropy(call_model(model, batch), batch)[0])
    tokens, labels = sample["input_ids"], sample["labels"]
    bounds = [0, len(tokens)]
    if "position_ids" in sample:
        bounds = [*np.flatnonzero(sample["position_ids"].numpy() == 0), len(tokens)]
    alone = 0.0
    for first, last in pairwise(bounds):
        learnt = np.flatnonzero(labels[first:last].numpy() != IGNORED)
        if len(learnt):
            chat = slice(first, first + int(learnt[-1]) + 1)
            output = model(tokens[None, chat])
            logits = getattr(output, "logits", output)[0, :-1]
            alone += float(F.cross_entropy(logits, labels[chat][1:], ignore_index=IGNORED, reduction="sum"))
    return together, alone


def check_losses(folder, kind):
    """Check that no chat sees another in the samples of a run; returns whether chats share samples."""
    run = runs.load(str(run_of(folder, kind)))
    code = import_user_code(run)
    data = open_data(run, World(), folder / "prepared", code)
    model = code.model.build(data.model_arguments).double().eval()
    if kind in zoo.CASES:
        model.config._experts_implementation = "eager"  # the others multiply no float64
    with torch.no_grad():
        for part in (data.train, data.held_out):
            for index in range(len(part)):
                together, alone = losses(model, part[index])
                assert together == pytest.approx(alone, rel=1e-4)
    return len(data.train) < data.train.documents


@pytest.mark.parametrize(
    "kind, packed",
    [("llama", True), ("bloom", False), ("not_caching", True), ("caching", False), ("wrapped", True),
     ("wrapped_caching", False)],
)  # fmt: skip
def test_no_chat_sees_another(tmp_path, caplog, kind, packed):
    assert check_losses(tmp_path, kind) is packed
    messages = [record.getMessage() for record in caplog.records if "each sample holds one chat" in record.getMessage()]
    assert len(messages) == (0 if packed else 1)
    assert all("padding is 55% of them instead of 15%" in message for message in messages)
    assert ("use_cache = False" in "".join(messages)) is (kind == "caching")


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("family", sorted({zoo.family(name) for name in zoo.CASES if name not in zoo.missing()})[::3])
def test_no_chat_sees_another_in_a_third_of_all_families(tmp_path, family):
    name = next(name for name in zoo.CASES if zoo.family(name) == family)
    check_losses(tmp_path, name)


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_check_says_what_training_does(tmp_path, capsys, caplog, adapters):
    tables = {"memory": {"lora": {"rank": 2}}} if adapters else {}
    file = run_of(tmp_path, "bloom", **tables)
    assert main(["check", str(file)]) == 0
    assert "each sample holds one chat" in capsys.readouterr().err + caplog.text
    caplog.clear()
    assert main(["train", str(file)]) == 0
    assert caplog.text.count("each sample holds one chat") + capsys.readouterr().err.count("each sample holds one") >= 1
