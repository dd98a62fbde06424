"""What the README and the guides show is run as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import ranks

from shoestring.core.world import World
from shoestring.run import parse
from shoestring.training.loop import train
from shoestring_hub.client.logins import log_in
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import Visitor, add_person
from tests.rigs.small_tasks import write_tasks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
SCRIPTS = {  # page and number of the script in it -> on how many ranks it is to run
    ("README.md", 0): (1, 2),
    ("checkpoints.md", 0): (1,),
    ("plans.md", 0): (1,),
    ("profiling.md", 0): (1,),
    ("slow-network.md", 0): (2,),
    ("your-own-loop.md", 0): (1, 2),
    ("your-own-loop.md", 1): (1, 2),
    ("your-own-loop.md", 2): (1,),
    ("your-own-loop.md", 3): (1,),
}
OTHERS = {  # that are no whole scripts
    ("evaluation.md", 0),  # needs lm_eval: tests/decode/test_task_harness.py makes such calls
    ("evaluation.md", 1),  # below
    ("evaluation.md", 2),  # below
    *(
        (f"from-{origin}.md", 0) for origin in ("accelerate", "lightning", "torch", "trainer", "trl")
    ),  # test_coming_from
    ("fine-tuning.md", 0),  # a call that tests/memory make
    ("preferences.md", 0),  # a call that tests/preference make
    ("hugging-face.md", 0),  # needs transformers: tests/models runs such a loop
    ("memory.md", 0),  # calls that tests/memory make
    ("memory.md", 1),
    ("memory.md", 2),
    ("metrics.md", 0),  # below
    ("profiling.md", 1),  # tests/profile
    ("serving.md", 0),  # OpenAI's client, as tests/decode use it
    ("serving.md", 1),  # tests/decode/test_tools_served.py
    ("serving.md", 2),
    ("serving.md", 3),
    ("sparse.md", 0),  # a call that tests/sparse/test_training.py makes
    ("your-own-task.md", 0),  # tests/forms/test_own_task_guide.py
    ("your-own-task.md", 1),
    ("your-own-task.md", 2),  # tests/projects/test_predict.py
    ("write-a-feature.md", 0),  # tests/testing/test_guide.py
    ("write-a-feature.md", 1),
}


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [block for written_in, block in fenced if written_in == language]


def page(name: str) -> Path:
    return next(each for each in PAGES if each.name == name)


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"text {number}: " + "the quick brown fox jumps. " * 40)


def test_every_script_of_a_page_is_run():
    found = {(each.name, number) for each in PAGES for number in range(len(blocks(each, "python")))}
    assert found - OTHERS == set(SCRIPTS)


@pytest.mark.parametrize(
    ("name", "number", "size"),
    [
        pytest.param(
            *key, size, marks=() if (key[0], size) == ("README.md", 1) else (pytest.mark.slow, pytest.mark.share(2))
        )
        for key, sizes in SCRIPTS.items()
        for size in sizes
    ],
)
def test_a_script_runs(tmp_path, monkeypatch, name, number, size):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(blocks(page(name), "python")[number])
    if "run.toml" in script.read_text():
        own = '[run]\nmodel = "toy:model"\ndata = "toy:samples"\nsteps = 4\nbatch = 8\n[optim.adamw]\n'
        (tmp_path / "run.toml").write_text(own)
    if "texts/" in script.read_text():
        write_texts(tmp_path / "texts")
    if size > 1:
        ranks.run(script, size=size, local_size=size)
    else:
        command = [sys.executable, str(script)]
        done = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    if "checkpoint" in script.read_text():
        assert list((tmp_path / "checkpoints").glob("step-*"))


def test_the_readmes_first_script_learns_and_prints_once(tmp_path):
    (tmp_path / "script.py").write_text(blocks(page("README.md"), "python")[0])
    began = os.times()
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ranks.environment(), capture_output=True, text=True, timeout=120, check=True
    )
    ended = os.times()
    (line,) = done.stdout.splitlines()
    found = re.fullmatch(r"loss (\d\.\d+): after 10 comes 13", line)
    assert found and float(found[1]) < 0.01
    assert f"`{line.partition(': ')[2]}`" in page("README.md").read_text()
    spent = ended.children_user + ended.children_system - began.children_user - began.children_system
    assert spent < 30, "the README says ten seconds, on a machine that does nothing else"


def test_the_readme_lists_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = page("README.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(project["optional-dependencies"])


def test_the_sink_of_the_guide_writes_losses(tmp_path):
    defined: dict[str, Any] = {}
    exec(blocks(page("metrics.md"), "python")[0], defined)
    sink = defined["Lines"](tmp_path, "run", {})
    sink.write(1, {"loss": 2.5, "lr": 0.1})
    sink.write(1, {"held_out_loss": 2.0})
    sink.close()
    assert (tmp_path / "losses.txt").read_text() == "1 2.5000\n"


@pytest.mark.slow
def test_the_run_file_of_the_guide_to_evaluation_passes_its_check_and_runs(tmp_path):
    """As printed for the check; for the run with a smaller model, fewer steps and an early end."""
    write_texts(tmp_path / "texts")
    guide = page("evaluation.md")
    (tmp_path / "run.toml").write_text(blocks(guide, "toml")[1])
    (tmp_path / "mytask.py").write_text(blocks(guide, "python")[1])

    def shoestring(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoestring", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=ranks.environment(), capture_output=True, text=True, timeout=120
        )

    assert shoestring("trust", "run.toml").returncode == 0
    checked = shoestring("check", "run.toml")
    assert checked.returncode == 0 and "by `mytask:inverse_root`" in checked.stdout, checked.stderr
    for changed, message in (
        ("--run.evaluate=mytask:acuracy", "acuracy"),
        ("--optim.schedule.function=mytask:TEXT", "no callable `TEXT`"),
        ('--optim.adamw.groups=[{pattern = "embd.*"}]', "`embd.*`"),
    ):
        refused = shoestring("check", "run.toml", changed)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr

    small = ["--model.dim=16", "--model.layers=1", "--model.heads=2", "--model.kv-heads=1", "--data.sequence=64"]
    short = ["--run.batch=4", "--run.steps=12", "--run.evaluate-every=2", "--data.held-out=0.2"]
    trained = shoestring("train", "run.toml", *small, *short)
    assert trained.returncode == 0, trained.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["accuracy"] <= 1 for row in rows if "held_out_loss" in row)
    rates = [row["lr"] for row in rows if "lr" in row]
    assert max(rates) == pytest.approx(rates[0] * len(rates), rel=1e-3)  # the first of 20 steps of warm-up
    assert (folder / "best" / "model.safetensors").is_file()


def test_the_evaluation_of_the_guide_makes_a_table(tmp_path, monkeypatch):
    (tmp_path / "guide_errors.py").write_text(blocks(page("evaluation.md"), "python")[2])
    monkeypatch.syspath_prepend(tmp_path)
    own = {"model": "shoestring.testing.jobs:tiny", "data": "tests.training.test_evaluation:learnable", "steps": 2}
    own |= {"batch": 8, "evaluate": "guide_errors:errors", "folder": str(tmp_path / "run")}
    errors = train(parse({"run": own}), World()).metrics["errors"]
    (row,) = map(json.loads, (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines())
    shares = [share for _, share in row["rows"]]
    assert row["head"] == ["class", "share"] and min(shares) <= errors <= max(shares)


@pytest.mark.slow
def test_the_readmes_script_is_refused_where_its_ranks_do_not_join(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        blocks(page("README.md"), "python")[0].replace(
            "with ss.join() as world:", "world = ss.World.current()\nif True:"
        )
    )
    with pytest.raises(AssertionError, match="several ranks were started, but have not joined"):
        ranks.run(script, size=2, local_size=2)


@pytest.mark.slow
def serves(command: list[str], folder: Path) -> None:
    """It says where it listens, answers there, and ends when it is asked to."""
    with subprocess.Popen(command, cwd=folder, env=ranks.environment(), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = next(found for line in server.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
            with urllib.request.urlopen(f"{address.group()}/health", timeout=30) as answer:
                assert answer.status == 200
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0


@pytest.mark.slow
def test_the_readmes_commands_run_one_after_the_other_in_a_folder_of_any_name(tmp_path, monkeypatch):
    """The README's run file and commands as printed; only the run is made shorter and the model smaller."""
    here = tmp_path / "my project"
    write_texts(here / "texts")
    (run_file,) = blocks(page("README.md"), "toml")
    short = run_file.replace("steps = 2000", "steps = 4\nbatch = 4")
    small = "[model]\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = 1\n[data]\nsequence = 16\nvocabulary = 300\n"
    assert short != run_file
    (here / "script.py").write_text("import torch\nprint(torch.ones(3).sum())\n")
    (here / "run.toml").write_text(short + small + "held_out = 0.2\n")
    (task,) = write_tasks(here / "tasks", ("choices",))
    shown = next(each for each in blocks(page("README.md"), "") if "shoestring check" in each)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with HubServer(tmp_path / "hub") as hub:
        person = Visitor(hub.port)
        person.set_password(add_person(hub.folder, "ada"), "ada")
        person.make_project("runs")
        log_in(hub.address, person.make_token("runs"))
        for line in shown.replace("piqa", shlex.quote(task)).splitlines():  # public tasks come from a hub of models
            verb, *arguments = shlex.split(line.partition("#")[0])
            assert verb == "shoestring"
            command = [sys.executable, "-m", "shoestring", *arguments]
            if arguments[0] == "serve":
                serves([*command, "--port", "0"], here)
                continue
            environment = {"env": ranks.environment(), "timeout": 120}
            done = subprocess.run(command, cwd=here, capture_output=True, text=True, **environment)
            assert done.returncode == 0, (line, done.stderr)
    assert json.loads((here / "runs" / "run" / "summary.json").read_text())["ranks"][1]["rank"] == 1
