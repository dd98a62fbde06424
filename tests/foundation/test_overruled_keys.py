"""Keys of a run file of which one overrules others: a flag counts over the file, and two of one place are refused."""

import copy
from dataclasses import MISSING, fields

import pytest
import tomli_w

from shoestring import run
from shoestring.core.errors import ConfigError
from shoestring.precedence import OVERRULING

VALUES = {
    "run.steps": 20, "run.minutes": 3.5, "run.epochs": 2.0, "data.tokenizer": "bytes", "data.vocabulary": 512,
    "optim.schedule.function": "mine:rate", "optim.schedule.shape": "trapezoid", "optim.schedule.warmup": 7,
    "optim.schedule.cooldown": 0.5, "optim.schedule.final": 0.5, "memory.lora.adapter": "folder",
    "memory.lora.rank": 3, "memory.lora.alpha": 5.0, "memory.lora.dora": True, "memory.lora.layers": ["a.*"],
    "memory.lora.modules_to_train": ["b"], "memory.lora.seed": 9, "profile.callpaths.max_overhead": 0.05,
    "profile.callpaths.sample_rate": 0.5,
}  # fmt: skip
PAIRS = [(rule, f"{rule.table}.{name}") for rule in OVERRULING for name in rule.others]
LENGTHS = ("run.steps", "run.minutes", "run.epochs")


def load(tmp_path, in_file, flags):
    document = {}
    for key in in_file:
        *tables, name = key.split(".")
        table = document
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = VALUES[key]
    path = tmp_path / "given.toml"
    path.write_text(tomli_w.dumps(document))
    arguments = [f"--{key}={tomli_w.dumps({'value': VALUES[key]}).partition('= ')[2].strip()}" for key in flags]
    return run.load(str(path), [argument.replace("\n", "") for argument in arguments])


def value(loaded, key):
    table, _, name = key.rpartition(".")
    if table in ("run", "data"):
        return getattr(loaded.settings if table == "run" else loaded.data, name)
    return next(getattr(feature, name) for feature in loaded.features if feature.name == table)


def default(loaded, key):
    table, _, name = key.rpartition(".")
    owner = {"run": loaded.settings, "data": loaded.data}.get(table)
    owner = owner or next(feature for feature in loaded.features if feature.name == table)
    (found,) = (each.default for each in fields(owner) if each.name == name)
    assert found is not MISSING
    return found


def plain(given):
    return tuple(given) if isinstance(given, list) else given


@pytest.mark.parametrize(("rule", "other"), PAIRS, ids=[f"{rule.key}-{other}" for rule, other in PAIRS])
def test_a_flag_overrules_the_file_and_two_of_one_place_are_refused(rule, other, tmp_path):
    key = rule.key
    if rule.in_file:
        assert value(load(tmp_path, (key, other), ()), key) == VALUES[key]
    for in_file, flags in [((), (key, other))] + [((key, other), ())] * (not rule.in_file):
        with pytest.raises(ConfigError, match=f"`{key}` leaves `{other}` without effect|both say how long"):
            load(tmp_path, in_file, flags)
    loaded = load(tmp_path, (other,), (key,))
    assert value(loaded, key) == VALUES[key]
    assert value(loaded, other) == default(loaded, other)
    if rule.yields:
        loaded = load(tmp_path, (key,), (other,))
        assert value(loaded, other) == plain(VALUES[other])
        assert value(loaded, key) == default(loaded, key)
    else:
        with pytest.raises(ConfigError, match=f"`{key}` leaves `{other}` without effect"):
            load(tmp_path, (key,), (other,))


@pytest.mark.parametrize("flag", LENGTHS)
@pytest.mark.parametrize("source", ["quickstart", "finetune", "images"])
def test_the_length_of_a_flag_is_that_of_the_run(flag, source):
    needed = ["--model=hf:some", "--data=some.jsonl"] if source == "finetune" else []
    loaded = run.load(source, [*needed, f"--{flag.removeprefix('run.')}", "2"])
    lengths = loaded.settings.minutes, loaded.settings.epochs
    assert value(loaded, flag) == 2 and sum(map(bool, lengths)) == (flag != "run.steps")
    assert run.parse(loaded.document, name=loaded.name) == run.load(source, [*needed, f"--{flag}=2"])


@pytest.mark.parametrize("key", LENGTHS)
def test_a_resolved_file_says_one_length_and_another_can_be_given(key, tmp_path):
    document = load(tmp_path, (key,), ()).document
    assert [name for name in LENGTHS if name.removeprefix("run.") in document["run"]] == [key]
    for flag in LENGTHS:
        changed = copy.deepcopy(document)
        run.override(changed, [f"--{flag}", "2"])
        assert value(run.parse(changed), flag) == 2


def test_the_lengths_that_earlier_versions_listed_are_read():
    assert run.parse({"run": {"steps": 400, "minutes": 3.5, "epochs": 0.0}}).settings.minutes == 3.5
    with pytest.raises(ConfigError, match=r"`run.minutes` leaves `run.steps` without effect"):
        run.parse({"run": {"steps": 20, "minutes": 3.5, "epochs": 0.0}})


@pytest.mark.parametrize(("flags", "missing"), [(["--data", "c.jsonl"], "model"), (["--model", "hf:m"], "data")])
def test_what_a_recipe_leaves_to_its_user_is_asked_for(flags, missing):
    with pytest.raises(ConfigError, match=f"`--{missing}` is missing"):
        run.load("finetune", flags)
