"""comm's benchmark: its arithmetic on curves that are known, its store, and one launch of every kind of method."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.comm import gpu_rows
from benchmarks.comm.__main__ import rows
from benchmarks.comm.added import OURS, THEIRS
from benchmarks.comm.auto import AUTO
from benchmarks.comm.contest import TRIAL, Contest, Sizes
from benchmarks.comm.curves import efficiency, final, step_seconds, steps_to, stretches
from benchmarks.comm.families import OURS as OURS_FAMILIES
from benchmarks.comm.families import PEERS, PER_STEP
from benchmarks.comm.methods import BF16, DDP, EPFML, NONE, TORCH, local, muon, ours
from benchmarks.comm.pace import Pace
from benchmarks.comm.peers import has_epfml
from benchmarks.comm.pictures import draw
from benchmarks.comm.setting import Setting
from benchmarks.comm.spec import Spec
from benchmarks.comm.store import Store
from benchmarks.comm.wire_bytes import ALL, codecs, sparse
from benchmarks.comm.worker import sent_bytes
from benchmarks.rows import unique
from shoestring import comm
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.testing.netlab import netlab_available

REASON = netlab_available()


def falling(speed, last=190, look=10):
    """A loss that falls as exp(-speed step / 100)."""
    return [(step, float(np.exp(-speed * step / 100))) for step in range(0, last + 1, look)]


# -- curves -----------------------------------------------------------------------------------------------------------


def test_a_method_that_learns_half_as_fast_needs_twice_the_steps():
    target = final(falling(1.0), 90)
    fast, slow = steps_to(falling(1.0), target), steps_to(falling(0.5), target)
    assert fast == pytest.approx(90, abs=0.5)
    assert slow == pytest.approx(180, rel=0.03)


def test_a_loss_that_is_never_reached_needs_no_number_of_steps():
    assert steps_to(falling(0.1), 0.1) is None


def test_smoothing_does_not_shift_a_straight_line_and_takes_noise_away():
    line = [(step, 5 - step / 100) for step in range(0, 200, 10)]
    assert steps_to(line, 4.0) == pytest.approx(100)
    noise = np.random.default_rng(0).normal(0, 0.05, len(line))
    rough = [(step, loss + bump) for (step, loss), bump in zip(line, noise, strict=True)]
    assert abs(steps_to(rough, 4.0) - 100) < abs(steps_to(rough, 4.0, window=1) - 100)


def test_a_single_lucky_look_does_not_reach_the_target():
    rough = [(step, 5 - step / 100 - (1.0 if step == 50 else 0.0)) for step in range(0, 200, 10)]
    assert steps_to(rough, 4.0, window=1) < 50
    assert steps_to(rough, 4.0) > 70


def test_the_step_of_local_steps_counts_their_merges():
    seconds = [1.0, 1.0, 1.0, 5.0] * 5
    assert step_seconds([{"seconds": seconds}], 4) == 2.0
    assert step_seconds([{"seconds": seconds}], 1) == 1.0  # a median of single steps would not see them
    assert stretches([{"seconds": seconds[:3]}], 4) == [1.0]


def test_ranks_that_share_a_core_are_done_with_the_last_one():
    ranks = [{"seconds": [0.5, 0.5, 2.0, 2.0]}, {"seconds": [1.0, 1.0, 1.0, 1.0]}]
    assert stretches(ranks, 2) == [1.0, 2.0]


def test_efficiency_is_one_on_a_free_network_and_falls_with_steps_and_seconds():
    assert efficiency((100, 0.9), (100, 0.9)) == 1
    assert efficiency((100, 0.9), (200, 0.9)) == 0.5
    assert efficiency((100, 0.9), (100, 3.6)) == 0.25


# -- the contest ------------------------------------------------------------------------------------------------------

SPEED = {"ddp": 1.0, "bf16": 1.0, "torch": 0.9, "epfml": 0.9, "ours": 1.0, "none": 0.0}
KILOBYTES = {"ddp": 32000, "bf16": 16000, "torch": 700, "epfml": 700, "ours": 100, "none": 0}
BITS = {"": 1e12, "1mbit": 1e6, "10mbit": 1e7, "100mbit": 1e8}


class KnownResults(Store):
    """A store whose launches are computed: 1 s a step and the wire; the best rate of learning is 3e-3."""

    made = longest = 0

    def get(self, spec):
        return self.kept(spec.key, lambda: self.computed(spec))

    def computed(self, spec):
        self.made += 1
        self.longest = max(self.longest, spec.turn)
        return {"logs": [[self.log(spec, method)] * 4 for method in spec.methods]}

    def log(self, spec, method):
        sent = 1e3 * KILOBYTES[method.kind] * (0.3 if method.settings.get("alternate") else 1)
        if method.local:
            sent *= 1 if "start" in method.settings else 1 / method.settings["every"]
        speed = (
            SPEED[method.kind] * (1 - abs(np.log(method.lr / 3e-3)) / 4) * (1.2 if method.optimizer == "muon" else 1)
        )
        seconds = [1 + 8 * sent / BITS[spec.rate]] * spec.steps
        speed *= 1 + bool(spec.cool) / 10
        curve = [(step, loss + spec.seed / 1e6) for step, loss in falling(speed, spec.steps, spec.look or spec.steps)]
        curve = [(step, loss) for step, loss in curve if loss > spec.until * 0.9]
        return {"seconds": seconds, "sent": [sent] * spec.steps, "held_out": curve, "losses": [], "facts": {}}


@pytest.fixture
def contest(tmp_path):
    return Contest(KnownResults(tmp_path), Sizes(marks=(50, 100, 150), look=10))


def test_the_best_rate_of_learning_is_found_though_it_is_not_on_the_first_grid(contest, monkeypatch):
    assert contest.dense.lr == 3e-3
    assert contest.chosen(PEERS[0], "100mbit").lr == 3e-3
    monkeypatch.setattr("benchmarks.comm.contest.LRS", (1.2e-2, 2.4e-2, 4.8e-2))
    assert contest.tuned(TORCH).lr == 3e-3


def test_the_curves_can_be_made_before_any_time_is_measured(contest):
    contest.prepare()
    made = contest.store.made
    for rate in ("100mbit", "1mbit"):
        for family in (PER_STEP, PEERS[0]):
            contest.worth(contest.learner(contest.chosen(family, rate)))
    assert contest.store.made == made
    contest.best(PER_STEP, "1mbit")
    assert contest.store.made > made  # its seconds on slow links


def test_what_figures_need_is_kept_where_the_cache_is_not(tmp_path):
    def figure(cache):
        contest = Contest(KnownResults(tmp_path / cache), Sizes(marks=(50, 100), look=10), tmp_path / "kept")
        return contest.best(PEERS[0], "10mbit"), contest.store.made

    (first, made), (second, made_again) = figure("one"), figure("two")
    assert made > 0 and made_again == 0
    assert str(first) == str(second)


def test_every_setting_can_be_attached_to_the_small_model():
    model = Sizes().learner.model(0)
    for method in (method for family in (*OURS_FAMILIES, *PEERS) for method in family.bases if method.kind == "ours"):
        job = Job(model, world=World(size=4, local_size=1))
        job.progress.total = method.horizon or Sizes().steps
        method.build(getattr(comm, method.feature)).check(attachments_of(job))


def test_a_slow_link_is_given_the_setting_with_fewer_bytes(contest):
    assert contest.chosen(PER_STEP, "1mbit").settings["alternate"]


def test_the_figure_is_steps_and_seconds(contest):
    figure = contest.figure(contest.tuned(TORCH), "10mbit")
    assert figure.worth[150] == pytest.approx((0.9,) * 3, rel=0.02)
    assert not figure.bounded
    assert figure.seconds == pytest.approx(1 + 8 * 700e3 / 1e7)
    assert figure.value == pytest.approx(np.prod([figure.worth[150][0], figure.free, 1 / figure.seconds]), rel=0.01)


def test_what_does_not_get_there_is_bounded_and_not_nothing(contest):
    slow = TORCH.at(3e-5)  # does not get there in three times the steps
    figure = contest.figure(slow, "10mbit")
    assert 150 in figure.bounded and figure.worth[150] == pytest.approx((1 / 3,) * 3, rel=0.01)
    assert "at most" in str(figure)


def test_with_a_cool_down_a_step_is_worth_what_ddp_needs_with_one(contest):
    assert contest.cooled(TORCH.at(3e-3)) == pytest.approx((0.9,) * 3, rel=0.03)


def test_losses_are_compared_at_equal_times(contest):
    figure = contest.figure(contest.tuned(TORCH), "100mbit")
    at = contest.loss_at(figure, 100 * figure.seconds)
    assert at == pytest.approx(np.exp(-0.9), rel=0.01)
    assert contest.loss_at(figure, 1e6) is None


def test_the_best_peer_comes_first_and_all_are_there(contest):
    peers = contest.peers("1mbit")
    assert [peer.value for peer in peers] == sorted((peer.value for peer in peers), reverse=True)
    there = {"ddp", "bf16", "torch", "ours"} | ({"epfml"} if has_epfml() else set())
    assert {peer.method.kind for peer in peers} == there
    dense = sorted(
        (peer.method.kind, peer.method.optimizer, peer.method.bucket_mb) for peer in peers if peer.method.dense
    )
    kinds = [("bf16", "adamw"), ("ddp", "adamw"), ("ddp", "muon")]
    assert dense == [(*kind, bucket) for kind in kinds for bucket in (1.0, 25.0)]
    assert len(peers) == len(there) + 5


def test_what_an_optimizer_gains_is_told_apart(contest):
    figure = contest.figure(muon(TORCH.at(3e-3)), "10mbit")
    assert figure.optimizer == pytest.approx(1.2, rel=0.02)
    assert figure.worth[150] == pytest.approx((0.9 * 1.2,) * 3, rel=0.02)
    assert "of which the optimizer alone 1.2" in str(figure)
    alone = next(peer for peer in contest.dense_figures("10mbit") if peer.method.optimizer == "muon")
    assert alone.worth[150] == pytest.approx((1.2,) * 3, rel=0.02)


def test_a_schedule_is_timed_by_its_parts(contest):
    method = local("scheduled", "LocalSGD", every=4, final_every=20, start=30, horizon=300)
    figure = contest.figure(method, "1mbit")
    merge, steps = 8 * 100e3 / 1e6, np.arange(150)
    seconds = 1 + np.where(steps < 30, merge, merge / (4 + 16 * steps / 300))
    assert figure.pace.elapsed(150) == pytest.approx(seconds.sum(), rel=1e-3)
    assert figure.needed(150) == pytest.approx(150, rel=0.01)
    assert contest.loss_at(figure, seconds.sum()) == pytest.approx(np.exp(-1.5), rel=0.01)


def test_a_pace_is_the_same_in_both_directions():
    pace = Pace(first=2.0, last=1.0, every=2, final_every=8, horizon=100, starting=5.0, start=10)
    assert pace.elapsed(10) == 50 and pace.steps(pace.elapsed(77)) == pytest.approx(77)
    assert pace.elapsed(201) - pace.elapsed(200) == pytest.approx(1.0)
    assert Pace(3.0).elapsed(7) == 21


def test_slow_methods_are_measured_for_fewer_steps(contest):
    assert contest.slow_spec(DDP, "1mbit").steps == 4
    assert contest.slow_spec(DDP, "100mbit").steps >= 20
    assert contest.slow_spec(TORCH, "1mbit").steps >= 20


def test_a_merge_that_takes_too_long_is_computed_from_its_bytes(tmp_path):
    contest = Contest(KnownResults(tmp_path), Sizes(patience=0.5))
    method = local("rare", "LocalSGD", every=4)
    assert contest.slow(method, "1mbit") == pytest.approx((1.0, 1 + 0.8 / 4))
    made = contest.store.made
    contest.slow(method, "100mbit")
    assert contest.store.made == made + 1  # at this rate it is measured


def test_bytes_of_rare_merges_are_counted_at_a_shorter_period(contest):
    rare = muon(local("rare", "DiLoCo", every=100))
    assert contest._wire_seconds(rare, "1mbit") == pytest.approx(8 * 100e3 / 100 / 1e6)
    assert contest.store.longest == 8
    assert contest.slow_spec(rare, "1mbit").turn == 100


def test_peers_are_tuned_as_long_as_ours():
    assert {len(family.bases) for family in (*PEERS, *OURS_FAMILIES)} == {3}


def test_seeds_for_choosing_are_not_reported():
    assert Sizes().tuning_seed not in Sizes().seeds


@pytest.mark.slow
def test_curves_become_pictures(tmp_path):
    pictures = draw(Contest(KnownResults(tmp_path / "store"), TRIAL), tmp_path)
    assert len(pictures) == 4
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)


# -- bars and launches ------------------------------------------------------------------------------------------------


def test_every_bar_has_an_id_of_its_own(contest):
    bars = unique(rows(lambda: contest, Sizes()), "comm")
    assert {bar.id for bar in gpu_rows()} == {bar.id for bar in bars if bar.gpu}
    assert len(bars) > 25


def test_a_row_on_fewer_seeds_names_the_command_that_repeats_it(contest):
    one, all_three = (
        {bar.id: bar for bar in rows(lambda: contest, Sizes(seeds=Sizes().seeds[:count]))} for count in (1, 3)
    )
    assert one["comm.ahead-10"].command.endswith("--only comm.ahead-10 --seeds 1")
    assert one["comm.ahead-10"].seeds == Sizes().seeds[:1]
    assert all_three["comm.ahead-10"].command == one["comm.encoding"].command == ""


def test_a_spec_survives_json_and_its_key_says_what_it_does():
    spec = Spec(methods=(DDP, ours("x", "PowerSGD", rank=2)), turn=3, rate="10mbit", setting=Setting(dim=32))
    assert Spec.parse(spec.text()) == spec
    assert len({spec.key, replace(spec, seed=1).key, replace(spec, methods=(BF16,)).key}) == 3


def test_what_is_stored_is_not_made_again(tmp_path):
    store, made = Store(tmp_path), []
    for _ in range(2):
        assert store.kept("one", lambda: made.append(1) or [1, 2]) == [1, 2]
    assert made == [1]
    assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_a_run_that_breaks_off_leaves_nothing(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(ZeroDivisionError):
        store.kept("one", lambda: 1 / 0)
    assert store.kept("one", lambda: 1) == 1


def test_encoded_bytes_of_sparse_messages_are_near_the_entropy():
    n, density = 1 << 20, 0.01
    entropy = n * (-density * np.log2(density) - (1 - density) * np.log2(1 - density)) / 8
    assert entropy < sparse(n, density, 0) < 1.1 * entropy


def test_messages_of_all_codecs_are_counted():
    assert sorted(case.name for case in ALL if case.message >= 256 * 1024) == sorted(codecs())


def test_interface_counters_leave_loopback_out(tmp_path):
    head = "Inter-| Receive\n face |bytes\n"
    line = "{}: 1 2 3 4 5 6 7 8 {} 10 11 12 13 14 15 16\n"
    (tmp_path / "dev").write_text(head + line.format("lo", 500) + line.format("  eth0", 70))
    assert sent_bytes(tmp_path / "dev") == 70


@pytest.mark.netlab
@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_every_kind_of_method_trains_on_four_hosts(tmp_path):
    low_rank = muon(local("LocalSGD", "LocalSGD", every=2, start=1, codec="powersgd(rank=2)"))
    methods = (NONE, DDP, BF16, TORCH, OURS, THEIRS, AUTO, local("SparseLoCo", "SparseLoCo", every=2), low_rank)
    spec = Spec(methods=methods, turn=2, rounds=2, warm=2, setting=TRIAL.setting, rate="1gbit")
    result = Store(tmp_path, timed=False).get(spec)
    by_name = {method.name: ranks for method, ranks in zip(methods, result["logs"], strict=True)}
    assert all(len(log["seconds"]) == len(log["sent"]) == 4 for ranks in result["logs"] for log in ranks)
    losses = [[log["losses"] for log in ranks] for ranks in result["logs"]]
    assert all(np.isfinite(each).all() for each in losses)
    dense, none = (np.mean(by_name[name][0]["sent"]) for name in ("DDP fp32", "no communication"))
    assert none < 0.01 * dense
    assert 0.4 * dense < np.mean(by_name["DDP bf16 hook"][0]["sent"]) < 0.6 * dense
    assert json.loads(spec.text()) == result["spec"]
    assert EPFML.kind == "epfml"  # not among the methods: its package comes from its repository
