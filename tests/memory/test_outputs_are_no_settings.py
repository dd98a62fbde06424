"""What was chosen for a run is kept beside it and holds for it alone; a resolved run file has it chosen again."""

import json
import logging
import tomllib

import pytest
import tomli_w

from shoestring.cli import main
from shoestring.memory.step_cost import DeviceRates
from shoestring.run import load
from tests.small_runs import write_run_file, write_texts

RESULTS = {"chosen": "recomputation of 1 of 2 blocks", "predicted_gib": 0.01, "without_gib": 0.02, "added": 0.1}


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rates = DeviceRates(flops=1e11, copied=2e10, slow=5e9, launch=3e-6, chosen=2e-5, host=1e10)
    monkeypatch.setattr("shoestring.training.budget.measure_rates", lambda _: rates)
    tables = {
        "run": {"steps": 2, "batch": 8, "data": write_texts(tmp_path / "texts"), "folder": "run"},
        "model": {"layers": 1},
        "data": {"tokenizer": "bytes", "sequence": 64},
        "memory": {"budget": {"gib": 0.0022, "allow": ["accumulate"]}},
        "checkpoint": {"plain": {"every": 1}},
    }
    return write_run_file(tmp_path / "given.toml", tables)


def said(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines, next((line for line in lines if "memory.budget  (" in line), "")


@pytest.mark.slow
def test_a_resolved_file_is_chosen_for_again(run_file, tmp_path, capsys):
    lines, _ = said(capsys, "check", run_file)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text("\n".join(lines[: lines.index("order of application:")]))
    table = tomllib.loads(resolved.read_text())
    assert table["memory"]["budget"] == {"gib": 0.0022, "allow": ["accumulate"]} and table["run"]["accumulate"] == 1
    first, chosen = said(capsys, "check", run_file, "--batch", "16")
    again, _ = said(capsys, "check", resolved, "--batch", "16")
    assert "4 micro-batches" in chosen
    assert [line for line in first if "GiB" in line] == [line for line in again if "GiB" in line]


def test_results_in_an_old_file_are_ignored_and_that_is_said(run_file, tmp_path, caplog):
    document = tomllib.loads(run_file.read_text())
    document["memory"]["budget"] |= RESULTS
    old = tmp_path / "old.toml"
    old.write_text(tomli_w.dumps(document))
    caplog.set_level(logging.WARNING, "shoestring")
    assert load(str(old)).features == load(str(run_file)).features
    message = "are ignored: `chosen`, `predicted_gib`, `without_gib`, `added`"
    assert message in caplog.text and "[memory.budget]" in caplog.text


@pytest.mark.slow
def test_a_run_that_resumes_takes_its_own_choice(run_file, tmp_path, capsys):
    """The choice is not found again: times that are measured may lead to another one, and so to other numbers."""
    kept = tmp_path / "run" / "choices.json"

    def micro_batches(*flags):
        assert main(["train", str(run_file), *flags]) == 0
        settled = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
        assert settled["run"]["accumulate"] == 1 and not RESULTS.keys() & settled["memory"]["budget"].keys()
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        (why,) = (each["why"] for each in summary["features"] if each["name"] == "memory.budget")
        return why.partition(" micro")[0]

    chosen = micro_batches()
    record = json.loads(kept.read_text())
    assert chosen == str(record["memory.budget"]["choice"]["accumulate"]) != "8"
    record["memory.budget"]["choice"] |= {"accumulate": 8, "chosen": "8 micro-batches"}
    kept.write_text(json.dumps(record))
    assert micro_batches("--steps", "3", "--resume", "auto") == "8"
    assert micro_batches("--steps", "4", "--resume", "auto", "--memory.budget.gib", "0.0021") == chosen
