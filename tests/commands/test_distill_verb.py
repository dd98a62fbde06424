"""`shoestring distill` as a user types it: two runs from one run file, and what they are refused for."""

import json
import re
import tomllib

import pytest
import torch
from safetensors.torch import load_file

from shoestring.cli import main
from shoestring.models import gpt
from shoestring.models.saving import save_model
from tests.small_runs import write_run_file, write_texts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(texts, folder of a run) that drafters of bytes learn from."""
    root = tmp_path_factory.mktemp("target")
    texts = write_texts(root)
    run = {"data": texts, "steps": 30, "folder": str(root / "run")}
    file = write_run_file(root / "run.toml", {"run": run, "optim": {"adamw": {"lr": 1e-2}}})
    assert main(["train", str(file)]) == 0
    return texts, root / "run"


def run_file(tmp_path, target, **tables):
    texts, teacher = target
    run = {"data": texts, "steps": 8, "folder": str(tmp_path / "drafter")}
    tables = {"run": run, "decode": {"distill": {"teacher": str(teacher)}}, "optim": {"adamw": {"lr": 1e-2}}} | tables
    return str(write_run_file(tmp_path / "run.toml", tables))


def settings_of(folder):
    return tomllib.loads((folder / "run.toml").read_text())["decode"]["distill"]


@pytest.mark.slow
def test_a_reference_and_a_draft_come_from_one_run_file(tmp_path, target, capsys):
    cache = {"teacher": str(target[1]), "cache_folder": "teacher", "top_k": 32}
    file = run_file(tmp_path, target, decode={"distill": cache})
    capsys.readouterr()
    assert main(["distill", file]) == 0
    reference, draft, accepted = capsys.readouterr().out.splitlines()
    folder = tmp_path / "drafter"
    assert reference == f"reference: finished, all tokens, in {folder / 'reference'}"
    assert draft == f"draft: finished, 40% of the tokens, in {folder / 'draft'}"
    shares = {
        name: float(share) for name, share in re.findall(r"(before training|reference|draft) ([\d.]+)%", accepted)
    }
    assert shares["reference"] > shares["before training"] and shares["draft"] > shares["before training"]
    assert settings_of(folder / "reference")["reference"] == ""
    assert settings_of(folder / "draft")["reference"] == str(folder / "reference")
    assert {settings_of(folder / stage)["cache_folder"] for stage in ("reference", "draft")} == {
        str(folder / "teacher")
    }
    rows = [json.loads(line) for line in (folder / "draft" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["selected"] <= 1 and row["acceptance"] > 0 for row in rows if "loss" in row)
    assert "Acceptance of drafts in training" in (folder / "draft" / "report.html").read_text()
    assert {path.name for path in folder.iterdir()} == {"reference", "draft", "teacher"}  # one cache for both
    assert main(["distill", file]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main(["distill", file, "--run.resume", "auto"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == accepted


@pytest.mark.slow
def test_all_tokens_are_one_run_and_a_reference_of_the_users_own_is_used(tmp_path, target, capsys):
    file = run_file(tmp_path, target)
    capsys.readouterr()
    assert main(["distill", file, "--decode.distill.fraction", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"draft: finished, all tokens, in {tmp_path / 'drafter' / 'draft'}" and len(lines) == 2
    own = str(tmp_path / "drafter" / "draft")
    second = str(tmp_path / "second")
    assert main(["distill", file, "--decode.distill.reference", own, "--run.folder", second]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"draft: finished, 40% of the tokens, in {second}/draft" and "reference " in lines[1]


@pytest.mark.slow
def test_both_stages_begin_with_the_same_weights(tmp_path, target):
    """A learning rate of nothing leaves each model as it began."""
    file = run_file(tmp_path, target, optim={"sgd": {"lr": 1e-30}})
    assert main(["distill", file, "--run.steps", "2"]) == 0
    one, other = (
        load_file(tmp_path / "drafter" / stage / "model" / "model.safetensors") for stage in ("reference", "draft")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_check_shows_the_teacher_and_refuses_another_vocabulary(tmp_path, target, capsys):
    file = run_file(tmp_path, target)
    assert main(["check", file]) == 0
    assert re.search(
        r"LOSS +decode.distill +\(teacher `.*`: [\d,]+ parameters, [\d.]+ (?:KiB|MiB)", capsys.readouterr().out
    )
    small = tmp_path / "small"
    save_model(gpt.tiny(64, 16, dim=8, layers=1, heads=1, kv_heads=1, hidden=8), None, small, {})
    assert main(["check", file, "--decode.distill.teacher", str(small)]) == 2
    assert "has 64 words, and the model that learns from it has 257" in capsys.readouterr().err


def test_a_teacher_of_other_tokens_of_the_same_number_is_refused(tmp_path, target, capsys):
    """Where nothing but the tokens' meaning differs, distillation would teach nonsense without a word."""
    texts = target[0]
    run = {"data": texts, "steps": 2, "folder": str(tmp_path / "other")}
    data = {"tokenizer": "bpe", "vocabulary": 300, "sequence": 16, "held_out": 0.3}
    other = write_run_file(tmp_path / "other.toml", {"run": run, "data": data})
    assert main(["train", str(other)]) == 0
    file = run_file(tmp_path, target, data=data)
    sentence = write_texts(tmp_path / "more", sentence="how vexingly quick daft zebras jump over a sphinx of quartz! ")
    flags = ["--decode.distill.teacher", str(tmp_path / "other"), "--run.data", sentence]
    assert main(["train", file, *flags]) == 2
    error = capsys.readouterr().err
    assert "the teacher of `decode.distill` was made with another tokenizer" in error
    assert f'set data.tokenizer = "{tmp_path / "other" / "model" / "tokenizer.json"}"' in error


def test_a_run_file_without_the_table_is_refused(tmp_path, target, capsys):
    file = run_file(tmp_path, target, decode={})
    assert main(["distill", file]) == 2
    assert "has no table [decode.distill]" in capsys.readouterr().err
