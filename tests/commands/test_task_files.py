"""Files of tasks of lm-evaluation-harness, which may name code: in somebody else's run file they need trust."""

import pytest

from shoestring.cli import main
from shoestring.core.errors import DataError
from shoestring.naming import harness_tasks
from shoestring.run import look, parse
from shoestring.run_code import code_of
from shoestring.training.data_loading import check_form
from tests.small_runs import write_run_file, write_texts


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text("task: sums\n")
    (tmp_path / "tasks" / "helpers.py").write_text("")
    settings = {"data": write_texts(tmp_path / "texts"), "evaluate": f"lm-eval:piqa,{tmp_path}/tasks/sums.yaml"}
    return write_run_file(tmp_path / "run.toml", {"run": {**settings, "model": "shoestring.models.gpt:tiny"}})


def test_names_of_tasks_are_no_code_and_their_files_are():
    assert harness_tasks("lm-eval:piqa, sums.yaml") == ["piqa", "sums.yaml"] and harness_tasks("mytask:run") is None
    assert code_of({"run": {"evaluate": "lm-eval:piqa"}}) == {}
    assert code_of({"run": {"evaluate": "lm-eval:piqa,a/sums.yaml"}}) == {"run.evaluate": ("lm-eval:a/sums.yaml",)}


def test_a_task_file_is_left_unread_until_the_user_vouches_for_it_and_again_once_it_changes(path, tmp_path, capsys):
    assert "run.evaluate" in look(str(path)).unread
    assert main(["check", str(path)]) == 0
    assert "run.evaluate: lm-eval:piqa," in capsys.readouterr().out
    assert main(["trust", str(path)]) == 0
    assert "sums.yaml" in capsys.readouterr().out
    assert not look(str(path)).unread
    (tmp_path / "tasks" / "helpers.py").write_text("import os\n")
    assert "run.evaluate" in look(str(path)).unread


def test_tasks_need_the_tokenizer_of_text():
    run = parse({"run": {"data": "mytask:images", "evaluate": "lm-eval:piqa"}})
    with pytest.raises(DataError, match=r"`run\.evaluate` names tasks on text, and this data set has no tokenizer"):
        check_form(run)
