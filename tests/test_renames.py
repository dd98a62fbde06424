"""Former names of keys: accepted wherever a user writes a key, with the new name said once."""

from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest

from shoestring import comm, renames, run
from shoestring.comm.settings.auto import parse_method
from shoestring.comm.settings.calls import parse_exchange
from shoestring.core.errors import ConfigError
from shoestring.memory import Tracing
from shoestring.profile import CallPaths
from shoestring.tune.settings import Population
from shoestring.tune.space import read_space


@pytest.fixture(autouse=True)
def unsaid():
    """As in a new process: nothing has been said yet."""
    renames._warn.cache_clear()


def names_of(table):
    """Dotted keys that a table of a run file may have."""
    settings = {"run": run.Settings, "population": Population}.get(table) or run.technique(*table.split("."))
    for name, kind in get_type_hints(settings).items():
        if name in {each.name for each in fields(settings)}:
            yield f"{table}.{name}"
            if is_dataclass(kind):
                yield from (f"{table}.{name}.{each.name}" for each in fields(kind))


def table_of(key):
    return ".".join(key.split(".")[: 1 if key.split(".")[0] in ("run", "population") else 2])


@pytest.mark.parametrize(("old", "new"), renames.RENAMED.items())
def test_each_new_name_is_a_key_and_each_former_one_is_none(old, new):
    keys = set(names_of(table_of(new)))
    assert new in keys and old not in keys
    assert new not in renames.RENAMED


def test_one_word_has_one_meaning():
    """Words that had several each are the name of one kind of setting now."""
    keys = [key for table in ("run", *run.keys()) for key in names_of(table)]
    having = lambda word: {key for key in keys if key.rpartition(".")[2] == word}  # noqa: E731
    assert having("keep") == {"checkpoint.plain.keep", "checkpoint.tiered.keep"}
    for word in ("budget", "share", "shared", "clip", "anneal", "bucket", "selection", "memory"):
        assert not having(word), word
    assert having("beta") == {
        f"preference.{objective}.beta" for objective in ("dpo", "kto", "simpo")
    }  # a reward's scale
    assert having("alpha") == {"memory.lora.alpha"} and having("scale") == {"optim.adascale.scale"}
    assert having("decay") == {"optim.ema.decay", "optim.adascale.decay"}


def test_a_run_file_may_have_former_names_in_every_table(caplog):
    document = {
        "run": {"keep_best": True, "evaluate_every": 5},
        "comm": {"powersgd": {"rank": 2, "parts": 3, "budget_kb": 8.0, "transport": {"channels": 2}}},
        "memory": {"recompute": {"keep": ["mm"]}},
    }
    parsed = run.parse(document)
    transport = comm.Transport(parts=3, channels=2, kb_per_step=8.0)
    assert parsed.settings.save_best
    assert {feature.name: feature for feature in parsed.features}["comm.powersgd"] == comm.PowerSGD(
        rank=2, transport=transport
    )
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4 and all("\n" not in line for line in said)
    assert "`run.keep_best` is called `run.save_best` now; the next version takes only the new name" in said
    assert document["run"] == {"keep_best": True, "evaluate_every": 5}  # it is the caller's
    assert run.parse(parsed.document) == parsed  # and what is written has the new names
    run.parse(document)
    assert len(caplog.records) == 4  # each was said once


def test_the_command_line_overrules_a_key_under_any_of_its_names():
    for file in ({"parts": 3}, {"transport": {"parts": 3}}):
        for flag in ("--comm.dense.parts", "--comm.dense.transport.parts"):
            document = {"comm": {"dense": dict(file)}}
            run.override(document, [flag, "5", "--keep-best=true"])
            assert document == {"comm": {"dense": {"transport": {"parts": 5}}}, "run": {"save_best": True}}


def test_both_names_in_one_file_are_refused():
    document = {"comm": {"topk": {"selection": "exact", "topk_method": "exact"}}}
    with pytest.raises(
        ConfigError, match=r"run.toml: `comm.topk.selection` and `comm.topk.topk_method` are one setting"
    ):
        run.parse(document, source="run.toml")


def test_a_space_and_a_call_may_have_former_names():
    (dimension,) = read_space({"comm.dense.parts": {"int": [1, 4]}}, "tune.toml")
    document = {}
    run.override(document, [f"--{dimension.key}=4"])
    assert run.parse(document).features == (comm.Dense(transport=comm.Transport(parts=4)),)
    assert parse_exchange("quantize(bits=4, bucket=64)") == comm.Quantize(bits=4, group_size=64)
    local = parse_method('localsgd(every=4, delay=2, late_merge="mix", alpha=0.25)')
    assert local == comm.LocalSGD(every=4, delay=2, late_merge="mix", own_weight=0.25, replica="rank")


def test_a_key_that_is_gone_is_refused_with_what_to_write(monkeypatch):
    monkeypatch.setitem(renames.REMOVED, "comm.gone", "use [comm.topk]")
    monkeypatch.setitem(renames.REMOVED, "comm.topk.gone", "leave it out")
    for document, hint in (
        ({"comm": {"gone": {"density": 0.1}}}, "use .comm.topk."),
        ({"comm": {"topk": {"gone": 1}}}, "leave it out"),
    ):
        with pytest.raises(ConfigError, match=f"run.toml: `comm.* is no longer a setting .hint: {hint}"):
            run.parse(document, source="run.toml")
    with pytest.raises(ConfigError, match="is no longer a setting"):
        run.override({}, ["--comm.gone.density", "0.2"])


def test_a_value_of_a_nested_table_is_checked_like_any_other():
    for table, said in (
        ({"parts": "two"}, r"`comm.dense.transport.parts` must be a whole number, got 'two'"),
        ({"pars": 2}, r"unknown key `pars` in \[comm.dense.transport\].*did you mean `parts`"),
        (3, r"`comm.dense.transport` must be a table, got 3"),
    ):
        with pytest.raises(ConfigError, match=said):
            run.parse({"comm": {"dense": {"transport": table}}})


def test_a_recording_has_one_key_for_its_first_step():
    """For one version, `start` stood beside `after`, and nothing read it."""
    (feature,) = run.parse({"profile": {"callpaths": {"start": 3}}}).features
    assert feature == CallPaths(after=3) and CallPaths().after == 10
    (feature,) = run.parse({"memory": {"tracing": {"start": 3}}}).features
    assert feature == Tracing(after=3)
