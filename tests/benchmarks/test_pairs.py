"""The pairs for the planner: their runs can be built, and their plans fit them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parallel.pairs import NO_GAIN, PAIRS, merged
from shoestring.core.compose import compose
from shoestring.core.feature import DATA, arrange_mesh
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.data.loader import check_batch
from shoestring.models.loading import build_model
from shoestring.run import parse
from shoestring.training.data_loading import own_data
from shoestring.training.user_code import import_user_code

BY_NAME = {pair.name: pair for pair in (*PAIRS, *NO_GAIN)}
PLANS = [(pair.name, plan) for pair in BY_NAME.values() for plan in pair.plans]


def meta_model(run):
    with torch.device("meta"):
        return build_model(run.settings.model, run.model, {}, run.settings.seed)


def test_there_are_twelve_pairs_of_which_six_are_measured():
    assert len(BY_NAME) == 12 + len(NO_GAIN) and len(PAIRS) == 12
    assert sum(pair.measured for pair in PAIRS) == 6
    assert {pair.rate for pair in PAIRS} == {"20mbit", "100mbit", "1gbit"}
    assert all(pair.hosts in (2, 4) and 2 <= pair.hosts * pair.ranks <= 4 for pair in PAIRS)
    assert all(len(pair.plans) >= 5 for pair in PAIRS)
    assert all(not {"parallel", "memory"} & pair.run.keys() for pair in PAIRS)


def test_plans_of_a_pair_differ():
    for pair in BY_NAME.values():
        documents = [pair.document(plan) for plan in pair.plans]
        assert all(document not in documents[:place] for place, document in enumerate(documents)), pair.name


def test_tables_are_merged_and_stay_as_they_were():
    tables = {"run": {"batch": 8}, "model": {"dim": 4}}
    assert merged(tables, {"run": {"accumulate": 2, "batch": 4}}, {"parallel": {"ddp": {}}}) == {
        "run": {"batch": 4, "accumulate": 2}, "model": {"dim": 4}, "parallel": {"ddp": {}},
    }  # fmt: skip
    assert tables == {"run": {"batch": 8}, "model": {"dim": 4}}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_model_takes_the_data(name):
    run = parse(BY_NAME[name].run)
    code, model = import_user_code(run), meta_model(run)
    batch = {key: value.to("meta") for key, value in own_data(run).first_batch(2).items()}
    total, _ = code.loss(code.forward(model, batch), batch)
    assert total.shape == ()


@pytest.mark.parametrize("name", [pair.name for pair in BY_NAME.values() if pair.gib])
def test_a_replica_does_not_fit_under_a_limit(name):
    """The state of a replica alone is larger: weights, gradients and both moments of AdamW."""
    pair = BY_NAME[name]
    state = 4 * sum(parameter.nbytes for parameter in meta_model(parse(pair.run)).parameters())
    assert state / pair.hosts / pair.ranks < pair.gib * 2**30 < state


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_a_plan_fits(name, plan):
    pair = BY_NAME[name]
    world = World(size=pair.hosts * pair.ranks, local_size=pair.ranks)
    written = parse(pair.document(plan))
    run = written.completed(world)
    defaults = {feature.name for feature in run.features} - {feature.name for feature in written.features}
    assert defaults == {"optim.adamw", "checkpoint.tiered"}  # the plan itself keeps all ranks equal
    assert not any(feature.inexact for feature in run.features)
    code, readers = import_user_code(run), arrange_mesh(world, run.features).ranks_over(DATA)
    check_batch(run.settings.batch, 0, readers, run.settings.accumulate)
    compose(Job(meta_model(run), code.forward, code.loss, world=world), run.features, dry=True)
