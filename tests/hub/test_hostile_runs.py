"""Run folders of strangers and of other versions: pushed, shown and pulled, whatever is in them."""

import json
from random import Random

import pytest

from shoestring_hub.client.pull import pull
from shoestring_hub.client.push import push
from tests.hostile import run_folders
from tests.rigs.hub.folders import contents


@pytest.mark.parametrize("seed", range(12))
def test_tampered_runs_are_shown_and_arrive_as_they_are(project, ada, tmp_path, seed):
    draw, folder = Random(seed), tmp_path / "run"
    run_folders.write_run(folder)
    for name in draw.sample(("metrics.jsonl", "history.jsonl", "summary.json", "environment.json"), 3):
        run_folders.tamper_lines(draw, folder / name)
    run_folders.tamper_toml(draw, folder / "run.toml")
    assert not push(folder).left_out
    for address in ("", "?sort=setting.run.steps&where=setting.run.steps>1", "runs/1", "compare?run=1", "runs.csv"):
        assert ada.get(f"/{project}/{address}").status == 200, address
    pull(1, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(folder)


def test_a_run_of_a_later_version_is_shown(project, ada, tmp_path):
    folder = tmp_path / "run"
    run_folders.write_run(folder)
    (folder / "run.toml").write_text('[run]\nname = "later"\n[quantum.entangled]\npairs = 3\n[[new.list]]\na = 1\n')
    (folder / "summary.json").write_text(json.dumps({"format": 9, "name": ["no", "text"], "status": {"is": "new"}}))
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "time": 9, "loss": {"mean": 1}, "speed": 2}\n{"kind": "header"}\n'
    )
    push(folder)
    page = ada.get(f"/{project}/runs/1")
    assert page.status == 200 and "quantum.entangled.pairs" in page.text and "speed" in page.text


def test_clocks_that_go_back_change_no_order_of_steps(project, ada, tmp_path):
    folder = tmp_path / "run"
    run_folders.write_run(folder)
    rows = ({"step": step, "time": 1e9 - 100 * step, "loss": step} for step in range(1, 60))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    push(folder)
    page = ada.get(f"/{project}/runs/1").text
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["runs"][0]["step"] == list(range(1, 60)) and data["runs"][0]["seconds"][1] == -100
