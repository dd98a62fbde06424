"""The keys of run files: listed, searched, and shown with a recipe."""

import json
import re
import subprocess
import sys
import tomllib

import pytest
import tomli_w

from shoestring import recipes, run
from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.other_names import NAMES
from shoestring.verbs.keys import all_keys, keys_of_run, search


def test_every_key_can_be_given_as_the_flag_that_is_listed():
    for key in all_keys():
        document = {}
        run.override(document, [key.flag, "1"])
        table = document
        for word in key.table.split("."):
            table = table[word]
        assert table == {key.name: 1}


@pytest.mark.parametrize(
    ("words", "first", "others"),
    [
        (["lr"], "--optim.adamw.lr", {"--optim.muon.lr"}),
        (["--lr"], "--optim.adamw.lr", set()),
        (["adamw", "betas"], "--optim.adamw.betas", set()),
        (["optim.adamw.lr"], "--optim.adamw.lr", set()),
        (["evaluate-every"], "--evaluate_every", set()),
        (["early", "stopping"], "--patience", set()),
        (["CHUNKEDLOSS"], "--memory.chunkedloss.", set()),
    ],
)
def test_names_come_before_help_texts(words, first, others):
    flags = [key.flag for key in search(words)]
    assert flags[0].startswith(first) and others <= set(flags)


def test_a_former_name_finds_the_present_one():
    assert search(["run.keep_best"])[0].flag == "--save_best"


def test_nothing_that_matches_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="no key matches `vairant`") as refusal:
        search(["vairant"])
    assert refusal.value.hint == "did you mean `variant`?"


@pytest.mark.parametrize("recipe", recipes.find())
def test_a_recipe_is_shown_with_each_value_that_it_sets(recipe):
    lines = list(keys_of_run(recipe))
    _, document = run.read(recipe)
    for area, tables in document.items():
        tables = (
            {area: tables} if area in ("run", "data") else {f"{area}.{key}": table for key, table in tables.items()}
        )
        for table, content in tables.items() if area != "model" else ():
            assert any(line.startswith(f"[{table}] ") for line in lines)
            for key, value in content.items():
                if (table, key) == ("data", "arguments"):  # as [model]: those of the function that the file names
                    continue
                flag = f"--{key}" if table == "run" else f"--{table}.{key}"
                (line,) = (line for line in lines if line.startswith(f"  {flag} "))
                if value == "":
                    assert line == f"  {flag} (must be given)"
                else:
                    assert tomllib.loads(f"value {line.partition(flag)[2]}") == {"value": value}


@pytest.mark.slow
def test_help_with_a_recipe_shows_its_keys_without_torch(tmp_path):
    (tmp_path / "own.toml").write_text(tomli_w.dumps({"run": {"steps": 7}, "comm": {"topk": {}}, "mine": {"x": {}}}))
    code = "import sys; from shoestring.cli import main\ntry: main(sys.argv[1:])\n"
    code += "finally: assert 'torch' not in sys.modules"
    said = subprocess.run(
        [sys.executable, "-c", code, "train", "own.toml", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert "usage: shoestring train" in said.stdout
    assert "\n  --steps = 7\n" in said.stdout and "\n  --comm.topk.density (" in said.stdout
    assert "\n  --comm.topk.transport." in said.stdout


def test_help_lists_the_tables_that_the_command_line_names(capsys):
    overrides = ["--workers", "2", "--comm.topk.density=0.2", "--comm.dgc.lr", "0.3", "--optim.ema.decay"]
    with pytest.raises(SystemExit):
        main(["train", "quickstart", *overrides, "--help"])
    shown = capsys.readouterr().out
    assert "\n  --comm.topk.density = 0.2\n" in shown and "\n  --comm.dgc.lr = 0.3\n" in shown
    assert "\n  --optim.ema.decay (" in shown


def test_help_without_a_recipe_says_how_to_see_the_keys(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert re.search("shoestring train NAME --help; recipes: .*finetune", capsys.readouterr().out)


def test_the_verb_prints_keys_and_json(capsys):
    assert main(["keys", "patience"]) == 0
    assert capsys.readouterr().out.startswith("  --patience (0)\n      Early stopping: ")
    assert main(["keys", "patience", "--json"]) == 0
    (key,) = (key for key in json.loads(capsys.readouterr().out) if key["name"] == "patience")
    assert (key["flag"], key["type"], key["default"]) == ("--patience", "a whole number", "0")
    assert main(["keys", "no-such-key-anywhere"]) == 2


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--lr", "did you mean `--optim.adamw.lr` or"),
        ("--sequence", "did you mean `--data.sequence`"),
        ("--rank", "`--memory.lora.rank`"),
        ("--stpes", "did you mean `steps`"),
        ("--learning-rate", "here it is `--optim.adamw.lr`: shoestring keys learning_rate"),
        ("--per_device_train_batch_size", "`--batch` and `--accumulate`"),
    ],
)
def test_a_key_without_its_table_is_told_its_table(flag, hint, capsys):
    assert main(["check", "finetune", "--model", "m", "--data", "d", flag, "1"]) == 2
    assert hint in capsys.readouterr().err


def test_names_of_other_tools_are_keys_here_and_found_by_a_search(capsys):
    keys = all_keys()
    here = {key.flag.removeprefix("--") for key in keys} | {key.table for key in keys}
    assert {key for named in NAMES.values() for key in named} <= here
    assert main(["keys", "gradient_accumulation_steps"]) == 0
    assert capsys.readouterr().out.startswith("  --accumulate (1)")


def test_a_hint_that_sets_a_key_shows_its_flag(capsys):
    assert main(["check", "finetune", "--model", "shoestring.models.gpt:tiny", "--data", "python-stdlib"]) == 2
    assert 'set data.tokenizer = "bpe" (here: --data.tokenizer bpe)' in capsys.readouterr().err


def test_the_usage_of_a_run_names_it(capsys):
    with pytest.raises(SystemExit):
        main(["train", "finetune", "--help"])
    assert capsys.readouterr().out.startswith("usage: shoestring train finetune [-h]")


@pytest.mark.parametrize("named", [{"model": "nosuch"}, {"data": "nosuch.jsonl"}])
def test_what_is_not_there_is_refused_by_check_and_train_in_the_same_words(named, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("{}")
    flags = {"model": str(tmp_path), "data": str(tmp_path / "a.jsonl")} | named
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    said = [(main([verb, "finetune", *words]), capsys.readouterr().err) for verb in ("check", "train")]
    assert said[0] == said[1] and "nosuch" in said[0][1] and said[0][0] == 2
