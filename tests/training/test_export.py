"""What a run exports is replaced by one act: weights, adapter, tokenizer and configuration are of the same step."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from shoestring.cli import main
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import save_pretrained
from shoestring.models.loading import load_model
from tests.killed_acts import killed_before
from tests.small_runs import write_run_file, write_texts

SHAPE = GPTConfig(vocab_size=257, dim=16, layers=1, heads=2, kv_heads=1, hidden=32, context=16)


def write_base(folder: Path) -> Path:
    torch.manual_seed(0)
    folder.mkdir()
    save_pretrained(GPT(SHAPE), folder)
    byte_tokenizer().save(folder / "tokenizer.json")
    return folder


def agrees(model: Path) -> bool:
    """Whether a merged model computes what its adapter does over the base."""
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        one, other = (load_model(path)[0](tokens) for path in (model, model / "adapter"))
    return torch.allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("exchanging", [True, pytest.param(False, marks=pytest.mark.all_cases)])
@pytest.mark.parametrize("folder", ["model", "best"])
def test_a_kill_leaves_a_merged_model_with_its_own_adapter(folder, exchanging, tmp_path, monkeypatch):
    if not exchanging:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    tables = {
        "run": {
            "model": str(write_base(tmp_path / "base")), "data": write_texts(tmp_path / "texts"), "steps": 2,
            "folder": str(tmp_path / "run"), "resume": "auto", "evaluate_every": 2, "save_best": True,
        },
        "model": dict.fromkeys(("dim", "layers", "heads", "kv_heads", "hidden")),
        "data": {"tokenizer": "model"},
        "optim": {"adamw": {"lr": 1e-2}},
        "checkpoint": {"plain": {"every": 1}},
        "memory": {"lora": {"rank": 2}},
    }  # fmt: skip
    file = write_run_file(tmp_path / "run.toml", tables)
    assert main(["train", str(file)]) == 0
    assert agrees(tmp_path / "run" / folder)
    (tmp_path / "run" / folder / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "run", tmp_path / "first")
    killed, number = True, 0
    while killed:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "first", tmp_path / "run")
        train = lambda: main(["train", str(file), "--run.steps", "4"])  # noqa: E731
        killed = killed_before(number, train, ("os.rename", "os.rmdir"), f"run/.{folder}.")
        assert load_model(tmp_path / "run" / folder) and agrees(tmp_path / "run" / folder)
        assert (tmp_path / "run" / folder / "notes.txt").read_text() == "mine"
        number += 1
