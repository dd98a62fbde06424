"""The choice between exchanges at every step and local steps: prices, worth, and what it does to a job."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import merging
from by_hand import train

from shoestring.checkpoint import Plain
from shoestring.comm import Auto, DiLoCo, LocalSGD, PowerSGD, Quantize, Sign, SparseLoCo, Transport
from shoestring.comm.auto.decision import Measurements, RankMeasurements
from shoestring.comm.auto.probes import CodecTiming
from shoestring.comm.auto.replicas import choose_method
from shoestring.comm.local.schedule import MergeSchedule, merges_per_step
from shoestring.comm.settings.worth import estimate_worth
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import DATA
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.parallel import DDP
from shoestring.planning.cluster import Collective
from shoestring.planning.simulate import Decision
from shoestring.run import load
from shoestring.testing import Pool, jobs

MB = 1_000_000
STEP, CODE = 1.0, 0.05  # seconds of a forward and backward pass, and of a codec on all gradients
LOCAL = {"localsgd(every=8)": LocalSGD(every=8), "overlapped": LocalSGD(every=8, delay=6)}


def measured(bandwidth: float, *calls: str) -> Measurements:
    """One gradient of 8 MB, of which a codec sends a tenth."""
    sizes = {"weight": 8 * MB}
    coded = {"dense": [CodecTiming((0.0, 0.0), ({"all-reduce": 8 * MB},))] * 2}
    coded |= {call: [CodecTiming((CODE, 0.0), ({"all-reduce": 8 * MB // 10},))] * 2 for call in calls}
    rank = RankMeasurements(marks={"forward": 0.4, "weight": STEP, "end": STEP}, coded=coded, slowdown={})
    link = Collective(kind="all-reduce", over=DATA, ranks=4, latency=0.0, bandwidth=bandwidth)
    return Measurements(
        sizes=sizes, arrival=["weight"], pieces=[8 * MB], links=(link,), ranks=[rank] * 4, bucket=0, lanes=2
    )


def chosen(bandwidth: float, worth: dict[str, float], total: int = 0, **local: LocalSGD) -> Decision:
    methods = local or LOCAL
    first = [f"{call} of gradients" for call in methods]
    found = measured(bandwidth, "4bit", *methods, *first)
    return choose_method(found, ["dense", "4bit"], methods, worth, total)


# -- prices -----------------------------------------------------------------------------------------------------------


def test_merges_cost_their_share_of_a_step() -> None:
    predicted = chosen(MB / 10, {}).predicted  # a compressed exchange takes 8 s
    assert predicted["dense"] == pytest.approx(STEP + 80)
    assert predicted["4bit"] == pytest.approx(STEP + CODE + 8)
    assert predicted["localsgd(every=8)"] == pytest.approx(STEP + (CODE + 8) / 8)
    assert predicted["overlapped"] == pytest.approx(STEP + (CODE + 8 - 6) / 8)


def test_no_more_than_a_period_hides_a_merge() -> None:
    """Four fragments, two steps each, at a period of four: two are under way at a time, and each has half the link."""
    streamed = LocalSGD(every=4, fragments=4, delay=2)
    assert chosen(MB / 10, {}, streamed=streamed).predicted["streamed"] == pytest.approx(STEP + (CODE + 8 - 4) / 4)


def test_a_schedule_costs_what_its_merges_do() -> None:
    growing = LocalSGD(every=2, final_every=20, start=100)
    predicted = chosen(MB / 10, {}, total=1000, growing=growing).predicted["growing"]
    merges = math.log(10) / 18
    assert predicted == pytest.approx(STEP + 0.1 * (CODE + 8) + 0.9 * merges * (CODE + 8))
    real = sum(len(MergeSchedule(2, 20, 1).due(step, step + 1, 1000)) for step in range(1000)) / 1000
    assert merges_per_step(2, 20, 1000) == pytest.approx(real, rel=0.1)
    assert merges_per_step(2, 20, 0) == 0.5


def test_a_slow_link_takes_local_steps_and_a_fast_one_exact_gradients() -> None:
    worth = {"overlapped": 0.76, "localsgd(every=8)": 0.76}
    assert chosen(MB / 10, worth).choice == "overlapped"
    assert chosen(1000 * MB, worth).choice == "dense"


def test_the_choice_is_by_what_steps_are_worth() -> None:
    """At 1.6 s against 1.0 s a step, a method that learns less than 0.62 of the other loses."""
    assert chosen(1.4 * MB, {"overlapped": 0.8, "localsgd(every=8)": 0.8}).choice == "overlapped"
    decision = chosen(1.4 * MB, {"overlapped": 0.5, "localsgd(every=8)": 0.5})
    assert decision.choice == "4bit"
    assert decision.seconds > decision.predicted["overlapped"]


def test_known_values_of_steps() -> None:
    assert estimate_worth(Quantize(bits=4, feedback=True), 0) == 1.0
    assert estimate_worth(PowerSGD(rank=4), 0) == 0.5
    assert [estimate_worth(Sign(group_size=bucket), 0) for bucket in (32, 64, 512)] == [0.48, 0.48, 0.28]
    assert estimate_worth(SparseLoCo(), 0) is None and estimate_worth(LocalSGD(codec="terngrad"), 0) is None
    for moment, known in (("own", (0.85, 0.7, 0.46)), ("global", (0.94, 0.8, 0.6))):
        local = partial(LocalSGD, second_moment=moment)
        periods = [estimate_worth(local(every=every), 0) for every in (1, 4, 8, 16, 32, 100, 500)]
        assert periods == sorted(periods, reverse=True) and (periods[0], periods[2], periods[4]) == known
        assert estimate_worth(local(every=8, start=50), 100) == pytest.approx((1.0 + known[1]) / 2)
        signs = local(every=4, fragments=4, delay=2, codec="sign")
        assert estimate_worth(signs, 0) == estimate_worth(local(every=8), 0)  # as old on average
    assert estimate_worth(LocalSGD(every=2, codec="sign"), 0) == 0.85 < (estimate_worth(LocalSGD(every=2), 0) or 0)


# -- in a job ---------------------------------------------------------------------------------------------------------

LOCAL_CALL, CODEC_CALL = "localsgd(every=3, codec='4bit')", "quantize(bits=8)"


@pytest.mark.parametrize(("worth", "feature"), [
    ((1e6, 1.0), LocalSGD(every=3, codec="4bit", replica="rank")),
    pytest.param((1.0, 1e6), Quantize(bits=8, transport=Transport(parts=1)), marks=pytest.mark.slow),
])  # fmt: skip
def test_the_chosen_method_trains_as_if_it_had_been_named(pool: Pool, worth: Any, feature: Any) -> None:
    auto = Auto(allow=(LOCAL_CALL, CODEC_CALL), worth=worth, trials=1)
    ones, others = (train(pool, each, steps=5, precise=False) for each in (auto, feature))
    for one, other in zip(ones, others, strict=True):
        assert one["digests"] == other["digests"]
        assert one["tokens"] == other["tokens"]
    assert ones[0]["digests"][-1] == ones[1]["digests"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("worth", [(1e6, 1.0), (1.0, 1e6)])
def test_a_resumed_run_continues_with_its_choice(pool: Pool, tmp_path: Path, worth: Any) -> None:
    arguments: dict[str, Any] = {"steps": 8, "precise": False, "folder": str(tmp_path)}
    auto = Auto(allow=(LOCAL_CALL, "quantize(bits=4, feedback=True)"), worth=worth, trials=1)
    through = train(pool, Plain(every=1, keep=9), auto, **arguments)
    for path in merging.saves(str(tmp_path))[1:5]:
        arguments["folder"] = str(tmp_path / "again")
        rest = train(pool, Plain(), Auto(allow=auto.allow, worth=worth[::-1], trials=1), resume=path, **arguments)
        for one, other in zip(rest, through, strict=True):
            assert one["digests"] == other["digests"][-len(one["digests"]) :]


@pytest.mark.slow
def test_a_plan_without_ddp_is_written(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of {n * n}" for n in range(4000)))
    source = tmp_path / "run.toml"
    shape = "[model]\ndim = 32\nlayers = 1\nheads = 2\nkv_heads = 2\nhidden = 64\n"
    auto = '[comm.auto]\nallow = ["localsgd(every=8, delay=6)", "bf16"]\nworth = [1e6, 0]\n'
    settings = f"[run]\ndata = '{tmp_path / 'text.txt'}'\nfolder = '{tmp_path / 'run'}'\nbatch = 4\n"
    source.write_text(f"{settings}{shape}[data]\ntokenizer = 'bytes'\nsequence = 32\n{auto}")
    command = [sys.executable, "-m", "shoestring", "plan", str(source), "--workers", "2", "--tries", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "against dense, by what steps learn" in done.stdout
    assert "localsgd(every=8, delay=6) (a step is worth 1e+06)   <- chosen" in done.stdout
    assert "with their merges" in done.stdout
    (feature,) = load(str(tmp_path / "plan.toml")).features
    assert feature == LocalSGD(every=8, delay=6, replica="rank")


def test_without_other_ranks_nothing_is_chosen() -> None:
    with compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()), [Auto(allow=(LOCAL_CALL,))]) as job:
        job.step(jobs.batch(0))
        assert attachments_of(job).features[0].explain(attachments_of(job)) == "off: one rank"


@pytest.mark.parametrize(("features", "kind", "said"), [
    ([Auto(allow=("localsgd(evry=8)",))], ConfigError, "did you mean `every`"),
    ([Auto(allow=("localsgd(every=0)",))], ConfigError, "`comm.localsgd.every` must be at least 1"),
    ([Auto(allow=(LOCAL_CALL, "topk"))], ConfigError, "does not know how many DDP steps"),
    ([Auto(allow=("bf16", "topk"), worth=(0, 0))], ConfigError, "does not know how many DDP steps"),
    ([Auto(allow=(LOCAL_CALL,), worth=(0.5, 0.5))], ConfigError, "for each of the 1 methods in `allow`"),
    ([Auto(allow=(LOCAL_CALL,)), DDP()], ConflictError, "both own SHARD"),
    ([Auto(allow=(LOCAL_CALL,)), DiLoCo()], ConflictError, "both own SHARD"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(features: list[Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()), features)
