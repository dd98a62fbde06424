"""The table [space] and the study file: what is read, and one clear line for what is wrong."""

import numpy as np
import pytest
import tomli_w

from shoestring.cli import find_verb
from shoestring.core.errors import ConfigError
from shoestring.tune.gaussian import decode, encode, fit, propose
from shoestring.tune.population import perturb
from shoestring.tune.search import TrialSearch
from shoestring.tune.settings import Population, Study
from shoestring.tune.space import Dimension, draw, read_space
from shoestring.tune.store import Store, connect
from shoestring.verbs.study import read_plan
from shoestring.verbs.tune import write_best

LR = {"optim.adamw.lr": {"log": [1e-4, 1e-2]}}


MEMBERS = {"size": 4, "every": 5}


def plan_of(folder, space=LR, base=None, tables=None, **tune):
    (folder / "run.toml").write_text(tomli_w.dumps(base or {"run": {"steps": 10}}))
    own = {"run": str(folder / "run.toml"), "folder": str(folder / "study"), **tune}
    tables = {"tune": own, "space": space} | (tables or {})
    (folder / "tune.toml").write_text(tomli_w.dumps(tables))
    return read_plan(str(folder / "tune.toml"))


def test_keys_may_be_quoted_or_nested_tables():
    nested = read_space({"optim": {"adamw": {"lr": {"log": [1e-4, 1e-2]}}}}, "t")
    assert nested == read_space(LR, "t") == (Dimension("optim.adamw.lr", "log", 1e-4, 1e-2),)


def test_a_condition_decides_whether_a_key_exists():
    space = read_space({"data.b": {"int": [1, 4], "when": {"data.a": "x"}}, "data.a": {"choice": ["x", "y"]}}, "t")
    assert [dimension.key for dimension in space] == ["data.a", "data.b"]
    assert draw(space, lambda each: each.ends[0]) == {"data.a": "x", "data.b": 1}
    assert draw(space, lambda each: each.ends[-1]) == {"data.a": "y"}


BAD = {
    "empty": ({}, r"\[space\] has no keys"),
    "reversed": ({"run.steps": {"int": [9, 3]}}, r"the range \[9, 3\] is empty"),
    "log_of_zero": ({"optim.adamw.lr": {"log": [0.0, 1.0]}}, r"the logarithm of 0.0 does not exist"),
    "infinite": ({"optim.adamw.lr": {"float": [0.0, float("inf")]}}, "must be finite"),
    "one_end": ({"run.steps": {"int": [3]}}, "must be two whole numbers"),
    "not_whole": ({"run.steps": {"int": [3, 4.5]}}, "must be two whole numbers"),
    "no_choice": ({"run.steps": {"choice": []}}, "at least one value"),
    "misspelt": ({"run.steps": {"int": [1, 2], "wen": {}}}, "unknown key `wen`.*did you mean `when`"),
    "no_kind": ({"run.steps": {"uniform": [1, 2]}}, "must be one range or list of choices"),
    "no_table": ({"steps": {"int": [1, 2]}}, "names no table.*run.steps"),
    "condition": ({"run.steps": {"int": [1, 2], "when": {"run.x": 1}}}, "`run.x` names no key of the space"),
    "never": (
        {"run.steps": {"int": [1, 2], "when": {"run.batch": 3}}, "run.batch": {"choice": [1, 2]}},
        "can never hold: 3 is not one of its choices",
    ),
    "unknown_key": ({"optim.adamw.lrr": {"float": [0.1, 0.2]}}, r"unknown key `lrr`.*did you mean `lr`"),
    "unknown_technique": ({"optim.adamww.lr": {"float": [0.1, 0.2]}}, "unknown technique.*did you mean `adamw`"),
    "wrong_type": ({"run.batch": {"float": [1.0, 2.0]}}, "`run.batch` must be a whole number"),
    "refused_end": ({"run.batch": {"int": [0, 4]}}, "`run.batch` must be at least 1"),
    "own_key": ({"run.folder": {"choice": ["a", "b"]}}, "set by the study itself"),
}


@pytest.mark.parametrize(("space", "message"), BAD.values(), ids=BAD)
def test_bad_spaces_are_refused(tmp_path, space, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(tmp_path, space)


def test_bad_studies_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key `trails`.*did you mean `trials`"):
        plan_of(tmp_path, trails=3)
    with pytest.raises(ConfigError, match="needs a budget"):
        plan_of(tmp_path, trials=0)
    with pytest.raises(ConfigError, match=r"`tune\.tokens` must not be negative"):
        plan_of(tmp_path, tokens=-1.0)
    with pytest.raises(ConfigError, match="both pause trials"):
        plan_of(tmp_path, tables={"halving": {"first": 5}, "population": MEMBERS})
    with pytest.raises(ConfigError, match=r"`model\.layers` cannot change within a run"):
        plan_of(tmp_path, {"model.layers": {"int": [1, 2]}}, tables={"population": MEMBERS})
    with pytest.raises(ConfigError, match="cannot read the study file"):
        read_plan(str(tmp_path / "missing.toml"))
    plan_of(tmp_path)
    (tmp_path / "study").mkdir()
    with pytest.raises(ConfigError, match="the store holds no study"):
        write_best(tmp_path / "tune.toml", tmp_path / "run.toml")


def test_run_may_be_left_out():
    assert find_verb(["tune"]) == ("tune run", [])
    assert find_verb(["tune", "tune.toml", "--workers", "2"]) == ("tune run", ["tune.toml", "--workers", "2"])
    assert find_verb(["tune", "--workers", "2", "tune.toml"])[0] == "tune run"
    assert find_verb(["tune", "best", "--out", "b.toml"]) == ("tune best", ["--out", "b.toml"])
    assert find_verb(["tune", "--help"]) == ("tune", ["--help"])


def test_every_end_becomes_a_run_and_the_document_reads_back(tmp_path):
    plan = plan_of(tmp_path, LR | {"model.layers": {"int": [1, 2]}})
    document = plan.run_document({"optim.adamw.lr": 0.003, "model.layers": 2})
    assert document["optim"]["adamw"]["lr"] == 0.003 and document["model"]["layers"] == 2
    assert document["run"]["steps"] == 10 and plan.total_steps == 10
    assert "optim" not in plan.base, "the base is not changed"


SPACE = (
    Dimension("a.f", "float", -5.0, 10.0),
    Dimension("a.l", "log", 1e-4, 1.0),
    Dimension("a.i", "int", 1, 9),
    Dimension("a.c", "choice", choices=("x", "y", True)),
)


def test_values_come_back_from_the_unit_cube():
    values = {"a.f": 2.5, "a.l": 1e-2, "a.i": 4, "a.c": "y"}
    found = decode(SPACE, encode(SPACE, values))
    assert found["a.i"] == 4 and found["a.c"] == "y"
    assert np.allclose([found["a.f"], found["a.l"]], [2.5, 1e-2])


def test_the_gaussian_process_predicts_a_smooth_function_and_knows_where_it_does_not():
    points = np.linspace(0, 1, 9)[:, None]
    process = fit(points, np.sin(6 * points[:, 0]))
    mean, covariance = process.at(np.array([[0.3], [0.55]]))
    assert np.allclose(mean, np.sin([1.8, 3.3]), atol=0.05)
    far = process.at(np.array([[3.0]]))[1][0, 0]
    assert far > 10 * covariance[0, 0]


def test_a_batch_does_not_propose_a_running_point_again():
    """Without the fantasies the second proposal would be next to the first."""
    space = (Dimension("a.f", "float", 0.0, 1.0),)
    seen = np.array([[0.0], [0.2], [0.8], [1.0]])
    values = np.array([1.0, 0.3, 0.35, 1.0])
    first = propose(space, seen, values, np.empty((0, 1)), np.random.default_rng(0))["a.f"]
    again = propose(space, seen, values, np.empty((0, 1)), np.random.default_rng(1))["a.f"]
    second = propose(space, seen, values, np.array([[first]]), np.random.default_rng(1))["a.f"]
    assert abs(first - again) < 0.02 < abs(first - second)


def test_settings_have_bounds():
    with pytest.raises(ConfigError, match=r"`tune\.lease` must be positive"):
        Study(run="quickstart", lease=0.0)


TYPES = [1, 1.0, True, "1"]
BETAS = [[0.9, 0.95], [0.9, 0.999], []]


@pytest.mark.parametrize("sampler", ["random", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tpe", "gp"))])
@pytest.mark.parametrize("choices", [TYPES, BETAS], ids=["types", "lists"])
def test_choices_keep_their_types_and_may_be_lists(tmp_path, sampler, choices):
    space = read_space({"a.b": {"choice": choices}, "a.c": {"int": [1, 2], "when": {"a.b": [choices[0]]}}}, "t")
    store = Store(connect(f"sqlite:///{tmp_path / 'store.db'}"), "s")
    store.create({})
    search = TrialSearch(store, Study(run="r", name="s", trials=7, sampler=sampler), space)
    met = set()
    for _ in range(7):
        lease = search.propose("w", 60.0)
        value = lease.parameters["a.b"]
        same = [choice for choice in choices if repr(choice) == repr(value)]
        assert len(same) == 1, f"{value!r} is none of {choices}"
        assert ("a.c" in lease.parameters) == (repr(value) == repr(choices[0]))
        met.add(repr(value))
        store.finish(lease, "done", 1.0)
        search.publish(lease.number)
    assert len(met) > 1
    plans = Population(size=4, every=5, resample=0.0, method="pbt")
    moved = perturb(space, {"a.b": choices[1]}, plans, np.random.default_rng(0))["a.b"]
    assert repr(moved) in (repr(choices[0]), repr(choices[2]))


def test_lists_of_choices_reach_the_run_file(tmp_path):
    plan = plan_of(tmp_path, {"optim.adamw.betas": {"choice": [[0.9, 0.95], [0.9, 0.999]]}})
    document = plan.run_document({"optim.adamw.betas": [0.9, 0.999]})
    assert document["optim"]["adamw"]["betas"] == [0.9, 0.999]
    with pytest.raises(ConfigError, match=r"`optim\.adamw\.betas` must be a list of 2"):
        plan_of(tmp_path, {"optim.adamw.betas": {"choice": [[0.9, 0.95], [0.9]]}})
    for bad in ({"x": 1}, [{"x": 1}]):
        with pytest.raises(ConfigError, match="or lists of them"):
            plan_of(tmp_path, {"optim.adamw.betas": {"choice": [bad]}})
