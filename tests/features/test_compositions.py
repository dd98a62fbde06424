"""Features together on several ranks: equal to one process, refused before anything is taken, or lossy by their word.

The slow tests draw 20 compositions, or 300 with SHOESTRING_ALL_CASES in the environment; the others are those that
have found faults, through the settings a user writes.
"""

from __future__ import annotations

import pytest

from shoestring.areas import AREAS
from shoestring.comm import DGC, Dense, DiLoCo, LocalSGD
from shoestring.core.feature import Feature
from shoestring.memory import LoRA, Offload, Zero
from shoestring.optim import EMA, LAMB, LARS, LAWA, SGD, AdamW, AdaScale, Clip, Muon, ScheduleFree
from shoestring.parallel import DDP, FSDP, Pipeline, Tensor
from shoestring.sparse import STE
from tests.rigs.compositions.draws import Composition, draw
from tests.rigs.compositions.verdict import Judge
from tests.shares import share

SEEDS = range(300)
TOGETHER = 10
"""Number of compositions in a test, so that one that fails for want of time is repeated with few others."""
LARS_SHARED = LARS(
    lr=1.0, vector_lr=0.05, trust_coefficient=0.02, share_norms=True, ratio_clip="dynamic", bound_warmup=3
)
SHARED = (LAMB(lr=0.01, share_norms=True), LARS_SHARED, Muon(lr=0.01, share_steps=True))
AVERAGED = LocalSGD(every=2, start=100, second_moment="own")  # gradients, to the end of the run


@pytest.fixture(scope="module")
def judge():
    with Judge() as judge:
        yield judge


def compose(
    *features: Feature, ranks: int = 2, hosts: int = 1, model: str = "tiny", micro_batches: int = 1, stop: int = 3
):
    return Composition(
        seed=-1,
        ranks=ranks,
        local_size=ranks // hosts,
        model=model,
        micro_batches=micro_batches,
        ragged=True,
        stop=stop,
        features=features,
    )


def check(judge: Judge, expected: str, *features: Feature, **others) -> str:
    verdict = judge(compose(*features, **others))
    assert verdict.kind == expected, f"{verdict.kind}: {verdict.detail}"
    return verdict.detail


@pytest.mark.slow
@pytest.mark.parametrize("first", SEEDS[: share(300, 20) : TOGETHER])
def test_drawn_compositions_are_equal_or_refused_or_lossy_by_their_word(first, judge):
    drawn = [draw(seed) for seed in range(first, first + TOGETHER)]
    faults = {f"{composition}": verdict for composition in drawn if not (verdict := judge(composition)).good}
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("split", [Pipeline, Tensor], ids=["pipeline", "tensor"])
@pytest.mark.parametrize("first", SEEDS[: share(300, 20) : TOGETHER])
def test_drawn_splits_are_equal_or_refused_or_lossy_by_their_word(first, split, judge):
    drawn = [draw(seed, split) for seed in range(first, first + TOGETHER)]
    faults = {f"{composition}": verdict for composition in drawn if not (verdict := judge(composition)).good}
    assert not faults


def test_the_same_seed_draws_the_same_composition_of_two_to_four_features():
    drawn = [draw(seed) for seed in SEEDS]
    assert drawn == [draw(seed) for seed in SEEDS]
    assert {len(each.features) for each in drawn} == {2, 3, 4} and {each.ranks for each in drawn} == {2, 4}
    areas = {feature.name.partition(".")[0] for each in drawn for feature in each.features}
    assert areas == {*AREAS} - {"preference"}  # whose batches are of a form of their own


@pytest.mark.parametrize(
    "optimizer", [SHARED[0], pytest.param(SHARED[1], marks=pytest.mark.slow)], ids=["lamb", "lars"]
)
def test_norms_of_shards_are_not_shared_out_as_those_of_replicas_are(judge, optimizer):
    check(judge, "equal", FSDP(), optimizer)


@pytest.mark.slow
@pytest.mark.share(4)
@pytest.mark.parametrize("optimizer", [SGD(lr=0.05), AdamW(lr=3e-3), *SHARED], ids=lambda each: each.name)
@pytest.mark.parametrize("spread", [
    DDP(), FSDP(), FSDP(hosts="replicate"), Zero(stage=1), Zero(stage=2), Zero(hosts="replicate"), Offload(),
], ids=lambda each: f"{each.name}-{getattr(each, 'hosts', '')}-{getattr(each, 'stage', '')}")  # fmt: skip
def test_every_optimizer_is_that_of_one_process(judge, spread, optimizer):
    check(judge, "equal", spread, optimizer, Clip(max_norm=0.5), ranks=4, hosts=2)


@pytest.mark.parametrize("average", [
    EMA(decay=0.5), pytest.param(LAWA(count=2, every=1), marks=pytest.mark.slow),
], ids=["ema", "lawa"])  # fmt: skip
def test_averages_of_replicas_are_of_merged_weights_and_resume_on_every_rank(judge, average):
    check(judge, "lossy", LocalSGD(every=2), average)


def test_averages_of_weights_that_ranks_never_share_are_refused(judge):
    assert "schedulefree" in check(judge, "refused", LocalSGD(every=2), ScheduleFree(lr=0.01))
    assert "fragments" in check(judge, "refused", DiLoCo(every=2, fragments=2), EMA())


def test_the_first_steps_weigh_the_ranks_gradients_by_their_targets(judge):
    check(judge, "equal", AVERAGED, SGD(lr=0.05))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spread", [DDP(hosts="leave"), FSDP(hosts="leave"), Zero(hosts="leave")], ids=lambda each: each.name
)
def test_what_leaves_the_hosts_apart_is_averaged_over_them_by_a_codec(judge, spread):
    check(judge, "equal", spread, Dense(), ranks=4, hosts=2)


@pytest.mark.slow
def test_the_first_steps_weigh_hosts_and_several_micro_batches(judge):
    check(judge, "equal", AVERAGED, FSDP(hosts="leave"), ranks=4, hosts=2, micro_batches=2)
    check(judge, "equal", DiLoCo(every=2, start=100, fragments=2), ranks=4, micro_batches=2)


@pytest.mark.slow
def test_adascale_measures_what_one_process_measures(judge):
    check(judge, "equal", DDP(), AdaScale(decay=0.5), AdamW(lr=3e-3))


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("spread", [
    (DDP(), Dense()), (Dense(),), (Zero(stage=1),), (Zero(stage=2),), (Offload(),), (FSDP(hosts="leave"), Dense()),
], ids=lambda each: "-".join(feature.name for feature in each))  # fmt: skip
@pytest.mark.parametrize("optimizer", [SGD(lr=0.05), AdamW(lr=3e-3)], ids=lambda each: each.name)
def test_adascale_is_that_of_one_process_or_refused(judge, spread, optimizer):
    adam_in_shards = spread[0].divided == "optimizer" and isinstance(optimizer, AdamW)
    refused = adam_in_shards or spread[0].divided == "parameters"
    check(judge, "refused" if refused else "equal", *spread, AdaScale(decay=0.5), optimizer, ranks=4, hosts=2)


def test_buffers_of_any_type_are_spread(judge):
    check(judge, "equal", DDP(find_unused=True), model="buffers")


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("spread", [
    FSDP(), Zero(), Zero(stage=1), Offload(), Dense(), LocalSGD(every=1), DGC(density=1.0),
], ids=lambda each: f"{each}")  # fmt: skip
def test_buffers_of_any_type_are_spread_by_all(judge, spread):
    check(judge, "lossy" if spread.inexact else "equal", spread, model="buffers")


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("spread", [Zero(), Zero(stage=1), Offload(), FSDP(), Dense()], ids=lambda each: f"{each}")
def test_adapters_over_a_rounded_base_are_spread(judge, spread, bits):
    check(judge, "equal", spread, LoRA(rank=2, base_bits=bits))


def test_sparse_layers_that_an_adapter_freezes_are_refused(judge):
    check(judge, "refused", DDP(), STE(layers=("blocks.*",)), LoRA(rank=2))


@pytest.mark.slow
@pytest.mark.parametrize("late", [0.3, 1.0])
def test_late_steps_resume_where_nothing_was_stepped_yet(judge, late):
    """The state of an optimizer that has made no step is laid out by one, in which weights do not decay."""
    check(judge, "lossy", Offload(late=late), SGD(lr=0.05, weight_decay=0.1), stop=1)
