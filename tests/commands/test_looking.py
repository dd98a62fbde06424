"""Run files and studies of others: what only looks at them imports nothing, and the current folder is searched last."""

import shutil
import subprocess
import sys
import tomllib

import pytest

from shoestring import run as runs
from shoestring.cli import main
from shoestring.naming import TrustError
from tests.commands.strangers import imported, own_run, refused
from tests.small_runs import write_run_file

# -- run files --------------------------------------------------------------------------------------------------------

NAMES = {
    "run.model": {"run": {"model": "intruder:model"}},
    "run.data": {"run": {"data": "intruder:data"}},
    "run.loss": {"run": {"loss": "intruder:loss"}},
    "run.evaluate": {"run": {"evaluate": "intruder:evaluate"}},
    "run.sinks": {"run": {"sinks": ["intruder:sink"]}},
    "run.packages": {"run": {"packages": ["intruding"]}, "intruding": {"noise": {}}},
    "optim.schedule": {"optim": {"schedule": {"function": "intruder:factor"}}},
    "decode.distill": {"decode": {"distill": {"teacher": "intruder:model"}}},
}


@pytest.mark.parametrize("key", NAMES)
def test_check_imports_nothing_of_a_file_that_nobody_vouches_for(key, here, ours, capsys):
    tables = {"run": {"data": str(ours / "texts/*.txt")} | NAMES[key].get("run", {})}
    file = str(write_run_file(here / "theirs.toml", NAMES[key] | tables))
    assert main(["check", file]) == 0
    shown = capsys.readouterr().out
    assert "not looked at" in shown and "shoestring trust" in shown and "order of application:" in shown
    assert ("parameters: " in shown) is (key != "run.model")
    assert {"run", "optim"} <= set(tomllib.loads(shown.partition("order of application:")[0]))
    refused(capsys, "plan", file, "--workers", "1")
    assert not imported(here) and str(here) not in sys.path
    capsys.readouterr()
    assert main(["trust", file]) == 0
    main(["check", file])
    assert "not looked at" not in capsys.readouterr().out
    if key in ("run.loss", "run.packages", "optim.schedule"):
        assert imported(here)


def test_check_and_plan_obey_what_is_typed_and_what_was_trained(here, ours, capsys):
    assert main(["check", str(ours / "run.toml"), "--loss", "intruder:loss"]) == 0
    assert "not looked at" not in capsys.readouterr().out and imported(here)
    file = own_run(here, ours, loss="intruder:loss")
    assert main(["check", file]) == 0
    assert "not looked at" in capsys.readouterr().out
    assert main(["train", file]) == 0
    capsys.readouterr()
    assert main(["check", file, "--run.steps", "9"]) == 0 and main(["check", "own", "--optim.adamw.lr", "1"]) == 0
    assert "not looked at" not in capsys.readouterr().out


def test_a_run_folder_of_somebody_else_is_not_the_users_word(here, ours, capsys):
    shutil.copytree(ours / "run", "theirs")
    document = tomllib.loads((here / "theirs/run.toml").read_text())
    document["run"] |= {"packages": ["intruding"], "folder": "runs/x"}
    write_run_file(here / "theirs/run.toml", document | {"intruding": {"noise": {}}})
    for verb in ("train", "distill", "plan"):
        refused(capsys, verb, "theirs")
    assert not imported(here) and not (here / "runs").exists()


def test_what_only_looks_imports_nothing_and_leaves_the_path_alone(here, ours, capsys):
    shutil.copytree(ours / "run", "theirs")
    document = tomllib.loads((here / "theirs/run.toml").read_text())
    document["run"] |= {"packages": ["intruding"], "loss": "intruder:loss", "folder": "theirs"}
    document["optim"]["schedule"] = {"function": "intruder:factor"}
    write_run_file(here / "theirs/run.toml", document | {"intruding": {"noise": {}}})
    before = list(sys.path)
    verbs = ["report theirs", f"compare theirs {ours / 'run'}", "checkpoint ls theirs", "checkpoint verify theirs"]
    verbs += ["checkpoint trim theirs --keep 9", "checkpoint show theirs", "check theirs", "check theirs/run.toml"]
    verbs += ["memory view theirs", "memory diff theirs theirs", "memory export theirs"]
    for verb in verbs:
        assert main(verb.split()) == 0, verb
        assert not imported(here) and sys.path == before, verb
    refused(
        capsys, "checkpoint", "export", "theirs", "--to", "out", "--as", "hf"
    )  # its features may change the weights
    assert main(["checkpoint", "export", "theirs", "--to", "dcp", "--as", "dcp"]) == 0
    assert not imported(here) and sys.path == before


def test_a_model_that_is_exported_of_a_strangers_run_is_not_trusted_for_it(here, ours, capsys):
    shutil.copytree(ours / "run", "theirs")
    document = tomllib.loads((here / "theirs/run.toml").read_text())
    document["run"] |= {"model": "intruder:model", "folder": "theirs"}
    write_run_file(here / "theirs/run.toml", document)
    refused(capsys, "checkpoint", "export", "theirs", "--to", "out", "--as", "hf")
    assert main(["checkpoint", "export", "theirs", "--to", "out"]) == 0
    assert not imported(here)
    refused(capsys, "generate", "out")


# -- studies ----------------------------------------------------------------------------------------------------------


def test_a_study_is_looked_at_without_its_code_and_joined_only_by_the_users_word(here, ours, capsys):
    pytest.importorskip("optuna")
    from shoestring.verbs.study import join_plan, read_plan
    from shoestring.verbs.trials import start_trial

    base = {"run": {"data": str(ours / "texts/*.txt"), "packages": ["intruding"], "loss": "intruder:loss"}}
    write_run_file(here / "base.toml", base | {"intruding": {"noise": {}}})
    study = '[tune]\nname = "s"\nrun = "base.toml"\ntrials = 2\nobjective = "loss"\n'
    (here / "tune.toml").write_text(study + '[space]\n"optim.adamw.lr" = { log = [1e-4, 1e-2] }\n')
    plan = read_plan("tune.toml", look=True)
    assert plan.code == {"intruding", "intruder:loss"}
    store = plan.open_store(create=True)
    assert main(["tune", "page", "tune.toml"]) == 0
    assert not imported(here) and plan.total_steps == runs.Settings().steps
    error, hint = refused(capsys, "tune", "join", plan.url)
    assert "`intruder:loss`" in error and hint.endswith("--trust")
    assert not imported(here)
    assert join_plan(plan.url, "", trust=True).code == plan.code and imported(here)
    store.add(0, 0, {"run.loss": "subprocess:run"}, 2)  # by somebody else who may write to it
    with pytest.raises(TrustError, match="name code that the study does not: `subprocess:run`"):
        start_trial(plan, store.take("worker", 60.0), None)


# -- the path ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [["-m", "shoestring"], ["-P", "-c", "import sys; from shoestring.cli import main; sys.exit(main())"]]
)
def test_a_file_in_the_current_folder_is_no_module_of_ours(start, ours, tmp_path):
    shutil.copytree(ours / "run", tmp_path / "run")
    for name in ("numpy", "safetensors", "yaml", "torch", "tomli_w", "tokenizers", "tyro", "rich", "cattrs", "triton"):
        (tmp_path / f"run/{name}.py").write_text(
            f'open("{tmp_path}/mark", "a").write("{name} ")\nraise ImportError("x")\n'
        )
    for verb in (
        "--help",
        "report .",
        f"compare . {ours / 'run'}",
        "checkpoint ls .",
        "check run.toml",
        "memory view .",
        "generate . --max-tokens 2",
    ):
        done = subprocess.run(
            [sys.executable, *start, *verb.split()],
            cwd=tmp_path / "run",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "mark").exists(), (verb, (tmp_path / "mark").read_text())


@pytest.mark.slow
def test_two_ranks_find_what_lies_in_the_current_folder_and_shadow_nothing(here, ours):
    (here / "numpy.py").write_text('raise ImportError("shadowed")\n')
    own_run(here, ours, model="intruder:model", batch=4)
    launched = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shoestring", "train", "own.toml"]
    for number, start in enumerate((["-m", "shoestring", "train", "own.toml", "--workers", "2"], launched)):
        if start == launched:  # torchrun is not ours, and looks in the current folder first
            (here / "numpy.py").unlink()
        command = [sys.executable, *start, "--run.folder", f"own-{number}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert (here / f"own-{number}/model/config.json").is_file()
