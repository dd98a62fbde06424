"""Projects: run files with their code beside them, started from any folder; and recipes of other packages."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring import recipes, run
from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.naming import TrustError

TASK = """
import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"inputs": torch.full((2,), float(index)), "targets": torch.tensor(index % 2)}


def data():
    return Samples(), Samples()


def model():
    return nn.Linear(2, 2)


def measure(model):
    return {"measure": 1.0}
"""
RUN = """# A task to test projects with.
# a second on one core
[run]
model = "{package}:model"
data = "{package}:data"
evaluate = "{package}:measure"
steps = 2
batch = 4

[optim.sgd]
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another folder as the current one, an import path of its own, and a record of trust of its own."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ours = str(Path(__file__).parents[1])  # pytest puts folders of other tests there, one of which has a module `toy`
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(ours)])
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("task_", "recipe_", "toy_recipe", "my_")):
            del sys.modules[name]


def project(folder: Path, package: str) -> Path:
    folder.mkdir()
    (folder / f"{package}.py").write_text(TASK)
    (folder / "run.toml").write_text(RUN.format(package=package))
    return folder


def measured(folder: Path) -> float:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["measure"] for row in lines if "measure" in row][-1]


@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_project_trains_resumes_and_opens_from_any_folder(elsewhere, named):
    package = f"task_{named}"
    source = project(elsewhere / "project", package)
    assert main(["train", str(source if named == "folder" else source / "run.toml"), "--folder", "run"]) == 0
    assert measured(Path("run")) == 1.0
    code = f"""
import sys
from shoestring.cli import main
from shoestring.models.loading import load_model
assert main(["train", "run", "--folder", "run", "--resume", "true", "--steps", "4"]) == 0
print(type(load_model("run")[0]).__name__, {package!r} in sys.modules)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(run.__file__).parents[1])}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, cwd=elsewhere / "elsewhere", env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.split() == ["Linear", "True"], done.stderr


@pytest.mark.slow
def test_several_ranks_find_the_project(elsewhere):
    source = project(elsewhere / "project", "task_ranks")
    assert main(["train", str(source), "--folder", "run", "--workers", "2"]) == 0
    assert measured(Path("run")) == 1.0


def test_what_only_looks_imports_nothing_of_a_project(elsewhere, capsys):
    source = project(elsewhere / "project", "task_looked")
    (source / "task_looked.py").write_text("raise SystemExit('imported')")
    assert main(["check", str(source)]) == 0
    assert "nobody has vouched" in capsys.readouterr().out and "task_looked" not in sys.modules
    assert str(source) not in sys.path
    (source / "task_looked.py").write_text(TASK)
    assert main(["trust", str(source / "run.toml")]) == 0
    assert "task_looked.py" in capsys.readouterr().out
    assert main(["check", str(source)]) == 0 and str(source) in sys.path


def test_a_changed_module_is_asked_about_again(elsewhere):
    source = project(elsewhere / "project", "task_changed")
    assert main(["trust", str(source / "run.toml")]) == 0
    assert run.look(str(source)).unread == {}
    (source / "task_changed.py").write_text(TASK + "\n# changed\n")
    assert "run.model" in run.look(str(source)).unread


def test_somebody_elses_run_folder_is_no_project(elsewhere):
    """It has the environment that a run writes."""
    source = project(elsewhere / "project", "task_run")
    (source / "environment.json").write_text("{}")
    with pytest.raises(TrustError):
        run.load(str(source))
    assert "task_run" not in sys.modules


def test_a_file_that_names_no_code_adds_no_folder(elsewhere):
    """Otherwise a name that the user types could be found in a folder of somebody else."""
    source = elsewhere / "project"
    source.mkdir()
    (source / "run.toml").write_text(f'[run]\nproject = "{source}"\n')
    (source / "task_typed.py").write_text("raise SystemExit('imported')")
    assert run.look(str(source), ["--loss", "task_typed:loss"]).settings.project == ""
    assert run.load(str(source), ["--loss", "task_typed:loss"], trusted=False).settings.project == ""
    assert str(source) not in sys.path


def test_a_project_that_is_no_place_of_code_is_not_searched(elsewhere, monkeypatch):
    """Somebody else's file could name any folder, whose files would be read for the digest."""
    walked = []
    monkeypatch.setattr("os.walk", lambda root: walked.append(root) or iter(()))
    (elsewhere / "project").mkdir()
    for project, name in (("/", "usr:x"), ("/usr", "lib:x"), (str(elsewhere), "project:x")):
        (elsewhere / "project/run.toml").write_text(f'[run]\nproject = "{project}"\nloss = "{name}"\n')
        assert "run.loss" in run.look(str(elsewhere / "project")).unread
    (elsewhere / "project/run.toml").write_text('[run]\nproject = 3\nloss = "a:b"')
    assert run.look(str(elsewhere / "project")).settings.project == ""
    with pytest.raises(ConfigError, match="must be a string"):
        run.load(str(elsewhere / "project"))
    (elsewhere / "project/run.toml").write_text("run = 3")
    with pytest.raises(ConfigError, match="must be a table"):
        run.look(str(elsewhere / "project"))
    assert not walked


def test_installed_packages_and_the_current_folder_come_first(elsewhere):
    source = project(elsewhere / "project", "task_first")
    Path("task_first.py").write_text(TASK.replace("1.0", "2.0"))
    assert main(["train", str(source), "--folder", "run"]) == 0
    assert measured(Path("run")) == 2.0


# -- recipes of other packages -----------------------------------------------------------------------------------------


def installed(folder: Path, entries: str = "toy = toy_recipes.kinds.toy") -> None:
    """A package with a recipe, as pip would install it into `folder`."""
    kinds = folder / "toy_recipes" / "kinds"
    (kinds / "toy").mkdir(parents=True)
    (folder / "toy_recipes" / "__init__.py").write_text("raise SystemExit('imported')")
    (kinds / "toy" / "task_toy.py").write_text(TASK)
    (kinds / "toy" / "helper.py").write_text(
        "from toy_recipes.kinds.toy.task_toy import model\nVALUE = 'toy_recipes.kinds.toyish'\n"
    )
    (kinds / "toy" / "run.toml").write_text(RUN.format(package="toy_recipes.kinds.toy.task_toy"))
    (kinds / "toy" / "README.md").write_text("# toy\n")
    info = folder / "toy_recipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[shoestring.recipes]\n{entries}\n")
    sys.path.insert(0, str(folder))  # the list of `elsewhere`; `syspath_prepend` would leave it to other tests
    importlib.invalidate_caches()


def test_recipes_of_other_packages_are_listed_without_importing_them(elsewhere, capsys):
    entries = (
        "toy = toy_recipes.kinds.toy\nimages = toy_recipes.kinds.toy\ngone = toy_recipes.kinds.gone\nodd = no_such"
    )
    installed(elsewhere / "site", entries)
    assert {"toy", "images", "quickstart"} <= recipes.find().keys() and not {"gone", "odd"} & recipes.find().keys()
    assert recipes.find()["images"].package == "shoestring_recipes.images"
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert "toy         A task to test projects with." in shown and "optim; a second on one core" in shown
    assert run.look("toy").settings.model == "toy_recipes.kinds.toy.task_toy:model" and not run.look("toy").unread
    assert "toy_recipes" not in sys.modules


def test_a_copy_is_a_project_of_ones_own(elsewhere, capsys):
    """It trains from anywhere, with the package gone; what is changed in it changes the result."""
    installed(elsewhere / "site")
    assert main(["recipes", "copy", "toy", str(elsewhere / "mine")]) == 0
    assert "shoestring train" in capsys.readouterr().out
    assert sorted(path.name for path in (elsewhere / "mine").rglob("*.*")) == [
        "README.md",
        "helper.py",
        "run.toml",
        "task_toy.py",
    ]
    helper = (elsewhere / "mine/toy/helper.py").read_text()
    assert helper == "from toy.task_toy import model\nVALUE = 'toy_recipes.kinds.toyish'\n"
    sys.path.remove(str(elsewhere / "site"))
    code = elsewhere / "mine/toy/task_toy.py"
    code.write_text(code.read_text().replace("1.0", "3.0"))
    assert main(["train", str(elsewhere / "mine"), "--folder", "run"]) == 0
    assert measured(Path("run")) == 3.0
    del sys.modules["toy"], sys.modules["toy.task_toy"]


@pytest.mark.parametrize("name", sorted(recipes.find()))
def test_every_recipe_can_be_copied_and_checked(elsewhere, name):
    assert main(["recipes", "copy", name, "copy"]) == 0
    document = run.read("copy")[1]
    assert "shoestring_recipes" not in json.dumps(document) and run.read(name)[1].keys() == document.keys()


def test_what_cannot_be_copied_is_refused(elsewhere):
    from shoestring.verbs.recipes import copy

    with pytest.raises(ConfigError, match="there is no recipe `imagse`") as caught:
        copy("imagse", elsewhere / "x")
    assert "images" in caught.value.hint
    (elsewhere / "full").mkdir()
    (elsewhere / "full" / "file").write_text("")
    for folder in (elsewhere / "full", elsewhere / "full/file"):
        with pytest.raises(ConfigError, match="is not empty"):
            copy("images", folder)
    with pytest.raises(ConfigError, match="cannot write"):
        copy("images", elsewhere / "full/file/below")
