"""The planner: fits, prices on hand-made steps, decisions, and what it does to a job of several ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import choosing_ranks

import shoestring as ss
from shoestring import comm
from shoestring.cli import main
from shoestring.comm import Auto
from shoestring.comm.auto import cost_model
from shoestring.comm.auto.cost_model import CodecCost
from shoestring.comm.auto.decision import Candidate, Measurements, RankMeasurements, decide, explain_spread
from shoestring.comm.auto.probes import CodecTiming, solve_slowdown, time_codec
from shoestring.comm.codecs.codec import ExchangeContext
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.powersgd import PowerSGDCodec
from shoestring.comm.exchange.coordinator import deal_cohorts
from shoestring.comm.selection.selective import SelectiveCodec
from shoestring.comm.settings.auto import parse_method
from shoestring.comm.settings.calls import parse_call, parse_exchange
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Cluster, Collective
from shoestring.planning.links import fit_line
from shoestring.planning.simulate import makespan
from shoestring.run import load
from shoestring.testing import FeatureSuite

MB = 1_000_000
SIZES = {f"layer{each}": MB for each in range(8)}
ORDER = list(reversed(SIZES))


def step(forward=0.1, layer=0.1, optimizer=0.05):
    """A forward pass, eight gradients of 1 MB one after the other, and the optimizer."""
    trace, now = Trace(origin=0.0), forward
    trace.record("forward", "compute", 0.0, forward)
    for name in ORDER:
        trace.record(name, "compute", now, now + layer, SIZES[name])
        now += layer
    trace.record("optimizer", "compute", now, now + optimizer)
    return trace


def cluster(bandwidth, latency=0.0, **slowdown):
    kinds = ("all-reduce", "all-gather", "all-to-all")
    links = (Collective(kind=kind, over=DATA, ranks=4, latency=latency, bandwidth=bandwidth) for kind in kinds)
    return Cluster(collectives=tuple(links), slowdown=slowdown)


def cost(seconds=(0.0, 0.0), ratio=1.0, latency=(0.0, 0.0)):
    """A codec of one stage that sends `ratio` of the bytes; seconds for all 8 MB, spread evenly."""
    knots = np.array([0.0, 8 * MB])
    sums = np.array([[0.0, each] for each in seconds])
    return CodecCost(knots, sums, {"all-reduce": np.array([[0.0, 8 * MB * ratio]])}, np.array(latency))


# -- measuring --------------------------------------------------------------------------------------------------------


@given(st.floats(0, 0.1), st.floats(1e-9, 1e-6))
def test_a_line_is_found_again(a, b):
    sizes = [1 << 10, 1 << 14, 1 << 18, 1 << 22]
    found = fit_line(sizes, [a + b * size for size in sizes])
    assert found == (pytest.approx(a, rel=1e-3, abs=1e-9), pytest.approx(b, rel=1e-3))


@given(st.lists(st.tuples(st.floats(1, 1e8), st.floats(1e-6, 10)), min_size=1, max_size=6))
def test_a_fit_is_never_negative(points):
    a, b = fit_line(*zip(*points, strict=True))
    assert a >= 0 and b > 0


@given(st.floats(0.1, 2), st.floats(0.1, 2), st.floats(1, 3), st.floats(1, 3))
def test_hindrance_is_found_from_times_side_by_side(one, other, slows_one, slows_other):
    both = min(one * slows_one, other * slows_other)
    beside = [both + alone - both / factor for alone, factor in ((one, slows_one), (other, slows_other))]
    found = solve_slowdown(one, other, *beside)
    assert found == {"one": pytest.approx(slows_one), "other": pytest.approx(slows_other)}


def test_a_codec_is_timed_without_touching_the_gradients():
    grads = {"a": torch.randn(16, 8), "b": torch.randn(16)}
    before = {name: grad.clone() for name, grad in grads.items()}
    found = time_codec(lambda: PowerSGDCodec(2), grads, ExchangeContext(1, 4, 0))
    assert len(found.seconds) == len(found.nbytes) + 1 == 3
    assert all(seconds > 0 for seconds in found.seconds)
    assert found.nbytes == ({"all-reduce": 4 * (16 * 2 + 16)}, {"all-reduce": 4 * 8 * 2})
    assert all(torch.equal(grads[name], before[name]) for name in grads)


def test_a_codec_that_alternates_is_priced_by_what_two_steps_send():
    found = time_codec(lambda: PowerSGDCodec(2, alternate=True), {"a": torch.randn(16, 8)}, ExchangeContext(1, 4, 0))
    assert found.nbytes == ({"all-reduce": 4 * (16 * 2 + 8 * 2) // 2},)


def test_costs_add_up_over_neighbouring_pieces():
    pieces = [CodecTiming((0.2, 0.3), ({"all-reduce": 10},)), CodecTiming((0.4, 0.6), ({"all-reduce": 20},))]
    found = CodecCost.fit([100, 200], pieces, CodecTiming((0.6, 0.9), ({"all-reduce": 30},)))
    assert found.computing(0, 300) == pytest.approx([0.6, 0.9], rel=1e-6)
    assert found.computing(0, 100) == pytest.approx([0.2, 0.3], rel=1e-6)
    assert found.sending(0, 100, 300) == {"all-reduce": pytest.approx(20)}
    assert found.sending(0, 100, 200) == {"all-reduce": pytest.approx(10)}


def test_pieces_may_need_fewer_stages_than_others():
    pieces = [
        CodecTiming((0.1, 0.1), ({"all-reduce": 8},)),
        CodecTiming((0.1, 0.1, 0.1), ({"all-reduce": 4}, {"all-gather": 2})),
    ]
    found = CodecCost.fit([100, 100], pieces, CodecTiming((0.2, 0.2, 0.1), ({"all-reduce": 12}, {"all-gather": 2})))
    assert found.sending(1, 0, 100) == {}
    assert found.sending(1, 100, 200) == {"all-gather": pytest.approx(2)}


# -- prices -----------------------------------------------------------------------------------------------------------


def test_one_bucket_hides_nothing():
    predicted = cost_model.PricedDDP(DATA, 25 * MB).predict(step(), cluster(16 * MB, latency=0.01))
    assert makespan(predicted) == pytest.approx(0.1 + 0.8 + 0.01 + 0.5 + 0.05)


def test_buckets_travel_while_the_backward_pass_continues():
    # Each bucket of 2 MB takes 0.125 s on the wire, less than the 0.2 s until the next one: only the last is seen.
    predicted = cost_model.PricedDDP(DATA, 2 * MB).predict(step(), cluster(16 * MB))
    assert makespan(predicted) == pytest.approx(0.1 + 0.8 + 0.125 + 0.05)


def test_a_slow_link_works_from_the_first_bucket_on():
    predicted = cost_model.PricedDDP(DATA, 2 * MB).predict(step(), cluster(1 * MB))
    assert makespan(predicted) == pytest.approx(0.1 + 0.2 + 8 + 0.05)


def test_an_exchange_codes_sends_and_codes_again():
    plan = cost_model.PricedExchange(
        DATA, (cost((0.08, 0.16), ratio=0.5),), deal_cohorts(SIZES, 2), channels=1, bucket=MB
    )
    # The second half: ready at 0.9, 0.04 s of coding, 2 MB at 16 MB/s, 0.08 s of coding.
    assert makespan(plan.predict(step(), cluster(16 * MB))) == pytest.approx(0.9 + 0.04 + 0.125 + 0.08 + 0.05)


def test_without_buckets_everything_follows_the_backward_pass():
    plan = cost_model.PricedExchange(DATA, (cost(),), deal_cohorts(SIZES, 4), channels=1, bucket=0)
    assert makespan(plan.predict(step(), cluster(16 * MB))) == pytest.approx(0.9 + 0.5 + 0.05)


def test_shared_cores_make_hidden_work_dear():
    plan = cost_model.PricedExchange(DATA, (cost((0.0, 0.4)),), deal_cohorts(SIZES, 2), channels=1, bucket=MB)
    alone = makespan(plan.predict(step(), cluster(1e15)))
    shared = makespan(plan.predict(step(), cluster(1e15, **{"compute beside compute": 2.0})))
    assert alone == pytest.approx(0.9 + 0.2 + 0.05)  # one half of the coding is hidden
    assert shared == pytest.approx(0.9 + 0.4 + 0.05)  # on one core nothing is


# -- decisions --------------------------------------------------------------------------------------------------------


def evidence(bandwidth, layer=0.1, coding=0.02, ratio=1 / 100, latency=1e-4):
    marks = {"forward": 0.1, "end": 0.1 + 8 * layer}
    marks |= {name: 0.1 + (at + 1) * layer for at, name in enumerate(ORDER)}
    dense = [CodecTiming((1e-6, 1e-6), ({"all-reduce": n},)) for n in (*SIZES.values(), 8 * MB)]
    small = [
        CodecTiming((n * coding / 8 / MB,) * 2, ({"all-reduce": int(n * ratio)},)) for n in (*SIZES.values(), 8 * MB)
    ]
    seen = RankMeasurements(marks=marks, coded={"dense": dense, "powersgd(rank=4)": small}, slowdown={})
    links = cluster(bandwidth, latency).collectives
    return Measurements(
        sizes=SIZES, arrival=ORDER, pieces=[MB] * 8, links=links, ranks=[seen] * 4, bucket=25 << 20, lanes=2
    )


def test_a_fast_link_keeps_ddp():
    plan, choice = decide(evidence(1e11))
    assert plan.choice == "DDP" and not choice.codec and choice.bucket == 25 << 20
    assert "more than 5% faster" in plan.reason


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ([(0.4, 0.5), (0.6, 0.5)], ""),
        ([(0.07, 0.08), (0.07, 0.5)], "rough: equal forward and backward passes took 0.07 to 0.5 s"),
    ],
)
def test_a_prediction_from_passes_of_very_unequal_length_says_so(passes, words):
    found = evidence(1e11)
    found = replace(found, ranks=[replace(found.ranks[0], passes=each) for each in passes])
    assert (words in explain_spread(found)) if words else not explain_spread(found)


@pytest.mark.slow
def test_a_trial_counts_neither_as_a_step_nor_in_the_first_rates(pool):
    for rank in pool.call(choosing_ranks.rates):
        assert rank["aside"] > 0
        assert rank["step_seconds"][0] <= rank["wall"][0] - rank["aside"]
        assert rank["tokens_per_second"][0] == pytest.approx(32 / rank["step_seconds"][0])


def test_a_slow_link_compresses_everything():
    plan, choice = decide(evidence(MB))
    assert choice.codec == "powersgd(rank=4)" and not choice.whole
    assert plan.seconds < plan.predicted["DDP"] / 5


def test_a_codec_whose_steps_are_worth_little_is_not_taken():
    worth = {"powersgd(rank=4)": 0.05}
    plan, choice = decide(evidence(MB), worth)
    assert choice.codec in ("", "dense")
    assert plan.predicted[plan.choice] > min(plan.predicted.values())


def test_between_them_what_travels_in_time_stays_whole():
    plan, choice = decide(evidence(12 * MB))
    assert choice.codec == "powersgd(rank=4)"
    assert choice.whole == tuple(ORDER)[: len(choice.whole)] and 0 < len(choice.whole) < 8
    assert plan.seconds <= min(plan.predicted.values()) * 1.051


def test_without_leave_to_compress_only_sizes_of_buckets_change():
    found = evidence(10 * MB)
    exact = replace(found, ranks=[replace(s, coded={"dense": s.coded["dense"]}) for s in found.ranks])
    plan, choice = decide(exact)
    assert choice.codec in ("", "dense") and choice.bucket < 8 * MB
    assert plan.seconds < plan.predicted["DDP"]


def test_a_torus_pays_inside_hosts_and_sends_less_between_them():
    inner = Collective(kind="all-reduce", over=("local",), ranks=2, latency=0.0, bandwidth=80 * MB)
    outer = Collective(kind="all-reduce", over=("hosts",), ranks=2, latency=0.0, bandwidth=8 * MB)
    plan = cost_model.PricedExchange(
        ("hosts",), (cost(),), deal_cohorts(SIZES, 1), channels=1, bucket=MB, inner=("local",), shard=2
    )
    assert makespan(plan.predict(step(), Cluster(collectives=(inner, outer)))) == pytest.approx(0.9 + 0.1 + 0.5 + 0.05)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_codecs_are_written_as_calls():
    assert parse_call("powersgd(rank=4, wire='bf16')") == ("powersgd", {"rank": 4, "wire": "bf16"})
    assert parse_exchange("powersgd(rank=7)").rank == 7


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("powersdg", "did you mean `powersgd`"),
        ("powersgd(rnk=4)", "did you mean `rank`"),
        ("powersgd(4)", "write"),
        ("powersgd(rank=open('x'))", "cannot read"),
        ("import os", "cannot read"),
        ("powersgd(parts=2)", "no setting `transport`"),
        ("powersgd(rank='x')", "`powersgd.rank` must be a whole number, got 'x'"),
        ("quantize(bits=3)", '`quantize.bits` must be one of "8", "4", got 3'),
        ("localsgd(every='x')", "`localsgd.every` must be a whole number"),
        ("topk(wire='fp8')", "`topk.wire` cannot be 'fp8'"),
    ],
)
def test_wrong_calls_say_what_is_near(call, words):
    with pytest.raises(ConfigError) as caught:
        parse_method(call)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "feature",
    [
        comm.RandomK(block_size=0),
        comm.DGC(lr=-1.0),
        comm.DGC(momentum=2.0),
        comm.DGC(warmup=-3),
        comm.DGC(max_norm=-1.0),
        comm.DGC(weight_decay=-0.1),
    ],
    ids=lambda feature: feature.name,
)
def test_numbers_out_of_range_are_refused(feature):
    with pytest.raises(ConfigError, match="must"):
        ss.compose(ss.Job(nn.Linear(4, 4)), [feature])


# -- selective compression --------------------------------------------------------------------------------------------


def test_chosen_parameters_travel_whole_and_others_as_the_codec_does_it():
    torch.manual_seed(0)
    grads = [
        {"a.weight": torch.randn(8, 6), "b.weight": torch.randn(24, 20), "b.bias": torch.randn(24)} for _ in range(3)
    ]
    alone = [{"b.weight": each["b.weight"].clone(), "b.bias": each["b.bias"].clone()} for each in grads]
    mean = torch.stack([each["a.weight"] for each in grads]).mean(0)
    ours = [SelectiveCodec(PowerSGDCodec(2, seed=5), ("a.*",)) for _ in grads]
    theirs = [PowerSGDCodec(2, seed=5) for _ in grads]
    traffic, reference = run_lockstep(ours, grads), run_lockstep(theirs, alone)
    assert len(traffic.stages) == 2 and traffic.total("all-reduce") == reference.total("all-reduce") + mean.nbytes
    for mine, other in zip(grads, alone, strict=True):
        assert torch.allclose(mine["a.weight"], mean)
        assert all(torch.equal(mine[name], other[name]) for name in other)
    again = SelectiveCodec(PowerSGDCodec(2, seed=5), ("a.*",))
    again.load_state_dict(ours[0].state_dict())
    assert again.norm("residual") == theirs[0].norm("residual") > 0


def test_all_whole_is_dense():
    grads = [{"a": torch.full((3,), float(rank))} for rank in range(2)]
    run_lockstep([SelectiveCodec(PowerSGDCodec(2), ("*",)) for _ in grads], grads)
    other = [{"a": torch.full((3,), float(rank))} for rank in range(2)]
    run_lockstep([DenseCodec() for _ in other], other)
    assert torch.equal(grads[0]["a"], other[0]["a"])


# -- in a job ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_measuring_leaves_no_trace(pool):
    for found in pool.call(choosing_ranks.trial_leaves_nothing):
        assert found["same"] and found["gradients"] == 0
        assert sorted(set(found["kinds"])) == ["all-gather", "all-reduce", "all-to-all"]
        assert all(factor >= 1 for factor in found["slowdown"].values())


def test_ddp_forms_buckets_anew(pool):
    for as_they_were, at_once, later in pool.call(choosing_ranks.rebucketed):
        assert at_once == pytest.approx(as_they_were) and later == pytest.approx(as_they_were)


def test_ddp_as_it_is_has_no_hook(pool):
    for found in pool.call(choosing_ranks.steps, choice=vars(Candidate("", 1, 1, 25 << 20))):
        assert not found["hooked"]


def test_a_measured_choice_is_said_and_priced(pool):
    one, other = pool.call(choosing_ranks.steps)
    assert one["digest"] == other["digest"]
    assert one["facts"].keys() == {"predicted_ddp_seconds", "predicted_step_seconds", "predicted_worth"}
    # How long an optimizer's step takes is measured by each rank, and comes last.
    assert one["said"].split(";")[:2] == other["said"].split(";")[:2] and "s a step" in one["said"]
    assert "in all for what a step of DDP learns" in one["said"]
    assert not [name for name in one["kept"] if name == "comm"]


def test_a_chosen_codec_is_that_codec(pool):
    choice = Candidate("powersgd(rank=2)", 1, 1, 25 << 20)
    one, other = pool.call(choosing_ranks.steps, choice=vars(choice))
    assert one["hooked"] and one["digest"] == other["digest"]


def test_a_resumed_run_continues_with_its_choice_and_its_residuals(pool):
    for found in pool.call(choosing_ranks.again):
        assert found["whole"] == found["again"]
        assert "residual" in found["kinds"]


@pytest.mark.slow
def test_the_verb_writes_a_run_file_with_the_choice(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n} of {n * n}" for n in range(4000)))
    source = tmp_path / "run.toml"
    shape = "[model]\ndim = 32\nlayers = 1\nheads = 2\nkv_heads = 2\nhidden = 64\n"
    data = "[data]\ntokenizer = 'bytes'\nsequence = 32\n[comm.bf16]\n"
    source.write_text(f"[run]\ndata = '{text}'\nfolder = '{tmp_path / 'run'}'\nbatch = 4\n{shape}{data}")
    command = [
        sys.executable,
        "-m",
        "shoestring",
        "plan",
        str(source),
        "--workers",
        "2",
        "--tries",
        "0",
        "--comm.bf16.transport.parts",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any("<- chosen" in line for line in lines) and any(" bf16 in 1 part" in line for line in lines)
    planned = load(str(tmp_path / "plan.toml"))
    assert planned.settings == load(str(source)).settings
    assert {f.name for f in planned.features} <= {"parallel.ddp", "comm.dense", "comm.bf16", "comm.selective"}


def test_one_rank_has_nothing_to_exchange(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("")
    assert main(["plan", str(tmp_path / "run.toml"), "--workers", "1", "--tries", "0"]) == 2
    assert "a single rank has nothing to exchange" in capsys.readouterr().err


@pytest.mark.slow
class TestAuto(FeatureSuite):
    feature = Auto(trials=1)
    representative = False
