"""Names in somebody else's folder become code only where the user vouches for it; what only looks imports nothing."""

import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from shoestring.cli import main
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.models.loading import build_model, load_model, open_model
from shoestring.naming import OURS, Trust, TrustError, is_name, resolve
from tests.commands.strangers import NO_SHAPE, OWN, imported, own_run, refused
from tests.small_runs import write_run_file

# -- models -----------------------------------------------------------------------------------------------------------


def marked(folder, mark, ours):
    """A model folder that somebody else made: `mark` is what its config.json says to shoestring."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"shoestring": mark}))
    shutil.copy(ours / "run" / "tokenizer.json", folder / "tokenizer.json")
    return folder


def hostile(kind, folder, ours):
    flag = folder / "flag"
    module = {
        "format": "module",
        "model": "subprocess:check_output",
        "arguments": {"args": ["touch", str(flag)]},
        "offered": {},
    }
    if kind == "import":
        module["model"] = "intruder:model"
    if kind == "disguised":  # what it is made of is ours, what it names is not
        module["of"] = {"format": "module", "model": "shoestring.models.gpt:tiny", "arguments": {}, "offered": {}}
    if kind == "indirect":  # an imported function of a module of ours
        module["model"] = "shoestring.run:import_package"
        module["arguments"] = {"name": "intruder"}
    if kind in ("quantized", "packed", "adapted"):
        module = {"format": kind, "of": module, "dtype": "float32", "layers": {"2:4": []}}
    if kind == "run":
        marked(folder / "run" / "model", module, ours)
        return folder / "run"
    made = marked(folder / "made", module, ours)
    if kind != "adapter":
        return made
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(made)})
    )
    save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    return adapter


KINDS = ["plain", "import", "disguised", "indirect", "quantized", "packed", "adapted", "adapter", "run"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_verb_runs_code_of_a_models_folder(kind, here, ours, capsys):
    folder = hostile(kind, here / "theirs", ours)
    verbs = [
        ["generate", folder, "--prompt", "the "],
        ["generate", ours / "run", "--prompt", "the ", "--draft", folder],
        ["prune", folder, "--out", here / "pruned"],
        ["quantize", folder, "--out", here / "quantized"],
        ["skip", folder],
    ]
    if kind == "adapter":  # prune and the like take whole models
        verbs = verbs[:2]
    for verb in verbs:
        refused(capsys, *verb)
    with pytest.raises(TrustError):
        open_model(str(folder))
    assert not imported(here) and not (here / "theirs" / "flag").exists()
    assert not (here / "quantized").exists() and not (here / "pruned").exists()


def test_the_server_does_not(here, ours, capsys):
    pytest.importorskip("starlette")
    folder = hostile("plain", here / "theirs", ours)
    refused(capsys, "serve", folder, "--port", "0")
    refused(capsys, "serve", ours / "run", "--port", "0", "--draft", folder)
    assert not (here / "theirs" / "flag").exists()


@pytest.mark.parametrize("kind", ["plain", "import"])
def test_training_does_not(kind, here, ours, capsys):
    """From the folder; with it as a teacher, as a reference, or on the command line; and what foretells training."""
    folder, texts = hostile(kind, here / "theirs", ours), str(ours / "texts/*.txt")
    start = {"run": {"data": texts, "steps": 2, "model": str(folder), "folder": "runs/a"}}
    taught = {"run": {"data": texts, "steps": 2, "folder": "runs/b"}, "decode": {"distill": {"teacher": str(folder)}}}
    write_run_file(here / "start.toml", start | {"model": NO_SHAPE, "data": {"tokenizer": "model"}})
    write_run_file(here / "taught.toml", taught)
    refused(capsys, "train", "start.toml")
    refused(capsys, "train", "taught.toml")
    refused(capsys, "distill", "taught.toml")
    refused(capsys, "train", ours / "run.toml", "--decode.distill.teacher", folder, "--run.folder", "runs/c")
    refused(capsys, "check", "start.toml")
    refused(capsys, "check", "taught.toml")
    assert not imported(here) and not (here / "theirs" / "flag").exists()
    assert not (here / "runs" / "a" / "model").exists()


def test_what_a_configuration_names_must_be_a_callable(here, ours):
    for name in ("../elsewhere", "", None, 3, ["subprocess:run"]):
        folder = marked(
            here / f"of-{name!r:.5}".replace("/", ""), {"format": "module", "model": name, "arguments": {}}, ours
        )
        with pytest.raises(CheckpointError, match=r"names no model|lacks model|model is"):
            load_model(folder)


def test_builders_of_ours_open_for_everybody(here, ours):
    mark = {"format": "module", "model": "shoestring.testing.jobs:tiny", "arguments": {}, "offered": {}}
    with pytest.raises(CheckpointError, match="cannot load"):  # it has no weights
        load_model(marked(here / "theirs", mark, ours))


def test_those_are_builders_and_nothing_that_a_module_imports():
    for name in OURS:
        assert resolve(name, "x", Trust(place=os.devnull)).__module__ == name.partition(":")[0]
    for name in ("shoestring.models.gpt:rotary_table", "shoestring.models.loading:resolve", "shoestring:open_model"):
        with pytest.raises(TrustError):
            resolve(name, "x", Trust(place=os.devnull))


@pytest.mark.parametrize("text", ["hf:NAME", "a", "a:", ":b", "a:b:c", "a b:c", "../a:b", "a.:b", "a:b.c", "", 3, None])
def test_what_is_no_name_is_never_imported(text):
    assert not is_name(text)
    with pytest.raises(ConfigError, match="not of the form"):
        resolve(text if isinstance(text, str) else "", "run.loss")


# -- the user's word --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_own_run_opens_without_a_question_and_changed_content_does_not(here, ours, capsys):
    assert main(["train", own_run(here, ours, evaluate_every=1, save_best=True)]) == 0
    assert sys.path[-1] == str(here)
    for folder in ("own", "own/best"):
        assert main(["generate", folder, "--prompt", "the ", "--tokens", "2"]) == 0
    assert main(["prune", "own", "--out", "pruned", "--layers", "head"]) == 0
    assert main(["quantize", "own", "--out", "rounded"]) == 0
    for folder in ("pruned", "rounded"):  # what is made of it opens, too
        load_model(folder)
    assert main(["train", "own", "--run.folder", "again"]) == 0  # the folder names the same code
    assert main(["train", own_run(here, ours, model="own", folder="further"), "--data.tokenizer", "model"]) == 0
    shutil.move("own", "moved")
    assert main(["generate", "further", "--prompt", "the ", "--tokens", "2"]) == 0
    assert main(["generate", "moved", "--prompt", "the ", "--tokens", "2"]) == 0
    config = here / "moved/model/config.json"
    before = config.read_text()
    config.write_text(before.replace('"offered"', '"else": 1, "offered"'))
    refused(capsys, "generate", "moved")
    config.write_text(before)
    load_model("moved")
    (here / "intruder.py").write_text(OWN + "# changed\n")
    assert "shoestring trust moved/model" in refused(capsys, "generate", "moved")[1]


def test_the_users_word_is_asked_once_shown_and_taken_back(here, ours, capsys):
    folder = hostile("import", here / "theirs", ours)
    built = build_model("intruder:model", {"vocab_size": 258}, {})
    save_file({name: value.contiguous() for name, value in built.state_dict().items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["shoestring"]["arguments"] = {"vocab_size": 258}
    (folder / "config.json").write_text(json.dumps(config))
    assert isinstance(load_model(folder, trust=True)[0], type(built))  # for this call
    refused(capsys, "generate", folder)
    capsys.readouterr()
    assert main(["trust", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder} may run intruder:model: {here / 'intruder.py'}\n"
    load_model(folder)
    assert main(["trust", str(folder), "--forget"]) == 0
    refused(capsys, "generate", folder)
    assert main(["trust", str(ours / "run")]) == 0
    assert "names no code" in capsys.readouterr().out
    assert main(["trust", str(here)]) == 2
    assert "holds no run and no model" in capsys.readouterr().err


def test_it_is_kept_where_no_other_user_can_give_it(here, ours, capsys):
    folder = hostile("import", here / "theirs", ours)
    assert main(["trust", str(folder)]) == 0
    place = here / "state/shoestring/trusted"
    assert place.stat().st_mode & 0o777 == 0o700 and len(list(place.iterdir())) == 1
    (here / "link").symlink_to(here / "state/shoestring")
    os.environ["XDG_STATE_HOME"] = str(here / "other")
    (here / "other").mkdir()
    (here / "other/shoestring").symlink_to(here / "state/shoestring")
    refused(capsys, "generate", folder)


def test_a_package_of_many_files_is_one_that_any_of_them_changes(here, ours, capsys):
    folder = hostile("import", here / "theirs", ours)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("intruder:model", "intruding.deep.inner:model"))
    (here / "intruding/deep").mkdir()
    (here / "intruding/deep/inner.py").write_text("from intruding import other\n")
    (here / "intruding/other.py").write_text("")
    assert main(["trust", str(folder)]) == 0

    def trusted():
        main(["generate", str(folder)])  # which has no weights, and so ends with another error
        return "names code" not in capsys.readouterr().err

    assert trusted()
    (here / "intruding/other.py").write_text("x = 1\n")
    assert not trusted()
