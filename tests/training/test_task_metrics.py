"""Tasks of lm-evaluation-harness during training: their metrics are those of the model at that step."""

import json

import pytest
import torch

from shoestring.cli import main
from shoestring.core.world import World
from shoestring.models.loading import load_model
from shoestring.run import load
from shoestring.testing import Pool
from shoestring.training.loop import train
from shoestring.verbs.evaluate import evaluate
from shoestring.verbs.settings import TaskEvaluation
from tests.rigs.small_tasks import write_tasks
from tests.small_runs import write_run_file, write_texts

pytestmark = pytest.mark.slow  # lm_eval is imported
pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

METRICS = ("choices/acc", "answers/exact_match", "prose/bits_per_byte")


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # for the ranks
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder, name="run", evaluate="", tables=None):
    tasks = write_tasks(folder / "tasks")
    settings = {"data": write_texts(folder / "texts"), "steps": 4, "evaluate_every": 2, "folder": str(folder / name)}
    settings["evaluate"] = evaluate or f"lm-eval:{','.join(tasks)}"
    settings["model"] = "shoestring.models.gpt:tiny"
    return write_run_file(folder / f"{name}.toml", {"run": settings, "data": {"sequence": 32}} | (tables or {})), tasks


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_of_tasks_are_written_at_each_evaluation_and_change_nothing_else(tmp_path):
    path, tasks = write(tmp_path)
    result = train(load(str(path)), World())
    evaluated = {row["step"]: row for row in rows(tmp_path / "run") if METRICS[0] in row}
    assert list(evaluated) == [2, 4] and set(METRICS) <= evaluated[2].keys() & result.metrics.keys()
    assert evaluated[2]["prose/bits_per_byte"] > evaluated[4]["prose/bits_per_byte"]
    afterwards = evaluate(tmp_path / "run", TaskEvaluation(tasks=tuple(tasks)))["results"]
    assert afterwards["prose"]["bits_per_byte,none"] == pytest.approx(result.metrics["prose/bits_per_byte"], abs=1e-5)
    assert afterwards["choices"]["acc,none"] == result.metrics["choices/acc"]
    assert "prose/bits_per_byte" in (tmp_path / "run" / "report.html").read_text()
    trace = (tmp_path / "run" / "trace-0.jsonl").read_text()
    assert '"tasks"' in trace
    path, _ = write(tmp_path, "plain", "shoestring.testing.jobs:tiny")
    path.write_text(path.read_text().replace('evaluate = "shoestring.testing.jobs:tiny"\n', ""))
    train(load(str(path)), World())
    weights = [load_model(tmp_path / name)[0].state_dict() for name in ("run", "plain")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def on_two_ranks(path):
    result = train(load(path), World.current())
    return {name: result.metrics[name] for name in METRICS}


@pytest.mark.parametrize("features", [{}, {"parallel.fsdp": {}}], ids=["ddp", "fsdp"])
def test_all_ranks_have_the_metrics_of_the_first_also_of_a_sharded_model(tmp_path, features):
    tables = {"parallel": {"fsdp": {}}} if features else {}
    path, tasks = write(tmp_path, tables=tables)
    with Pool(2, timeout=100) as pool:
        first, second = pool.call(on_two_ranks, path=str(path))
    assert first == second
    afterwards = evaluate(tmp_path / "run", TaskEvaluation(tasks=tuple(tasks)))["results"]
    assert afterwards["prose"]["bits_per_byte,none"] == pytest.approx(first["prose/bits_per_byte"], abs=1e-5)


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        ("lm-eval:none.yaml", "`run.evaluate`: there is no file `none.yaml`"),
        ("lm-eval:", "`run.evaluate` names no task"),
        ("lm-eval:hellaswagg", "has no task `hellaswagg`"),
    ],
)
def test_check_says_that_a_task_does_not_exist(tmp_path, capsys, evaluate, said):
    path, _ = write(tmp_path, evaluate=evaluate)
    assert main(["trust", str(path)]) == 0
    assert main(["check", str(path)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_tasks_whose_data_is_missing_end_a_run_before_its_first_step(tmp_path, capsys):
    path, _ = write(tmp_path)
    (tmp_path / "tasks" / "rows.jsonl").unlink()
    assert main(["train", str(path)]) == 2
    assert "`run.evaluate`: cannot load" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
