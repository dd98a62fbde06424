"""Local steps against runs written by hand, and what must hold while replicas differ."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import merging
from by_hand import Replicas, Weights, apart, copied, outer_step, train

from shoestring.checkpoint import Plain
from shoestring.comm import DiLoCo, LocalSGD, PowerSGD, SparseLoCo
from shoestring.comm.local.outer_state import average_weights
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.optim import Clip, Muon
from shoestring.parallel import DDP, FSDP
from shoestring.testing import Pool, jobs
from shoestring.testing.scenarios import encode

# -- written by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("features", "micro"), [
    ([DiLoCo(every=3)], 1),
    ([DiLoCo(every=3)], 2),
    ([Clip(max_norm=torch.inf), DiLoCo(every=3, nesterov=False, outer_lr=0.3)], 1),
    ([DiLoCo(every=2, final_every=5)], 1),
])  # fmt: skip
def test_diloco_equals_one_written_by_hand(pool: Pool, features: list[Any], micro: int) -> None:
    settings = features[-1]
    merges = (2, 4, 7, 8) if settings.final_every else (3, 6, 8)  # the last step merges too
    results = train(pool, *features, steps=8, micro=micro)
    replicas = Replicas(2)
    common = copied(replicas)
    outer = torch.optim.SGD(common.values(), lr=settings.outer_lr, momentum=0.9, nesterov=settings.nesterov)
    for number in range(8):
        replicas.step(number)
        if number + 1 in merges:
            outer_step(replicas, common, outer)
        for rank, result in enumerate(results):
            assert apart(result["weights"][number], replicas.flat(rank)) < 1e-12
    assert apart(replicas.flat(0), Replicas(1).flat(0)) > 0.1


FRAGMENTS = (
    ["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight",
     "blocks.0.down.bias", "embedding.weight"],
    ["blocks.1.norm.weight", "blocks.1.norm.bias", "blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.weight",
     "blocks.1.down.bias", "norm.weight", "norm.bias"],
)  # fmt: skip


@pytest.mark.parametrize("late", ["move", pytest.param("mix", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("delay", "steps"), [
    (0, 9), (3, 8), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 9), (3, 9), (1, 8), (2, 7))),
])  # fmt: skip
def test_streaming_equals_one_written_by_hand(pool: Pool, delay: int, steps: int, late: Any) -> None:
    """Two fragments, H = 4: the first is due after steps 2, 6, …, the second after 4, 8, …"""
    alpha = 0.25
    merges: dict[str, Any] = {"late_merge": late} | ({"own_weight": alpha} if late == "mix" else {})
    results = train(pool, DiLoCo(every=4, fragments=2, delay=delay, **merges), steps=steps)
    replicas = Replicas(2)
    commons = [copied(replicas, names) for names in FRAGMENTS]
    outers = [torch.optim.SGD(common.values(), lr=0.7, momentum=0.9, nesterov=True) for common in commons]
    under_way: dict[int, tuple[int, Weights, list[Weights]]] = {}

    @torch.no_grad()
    def send(f: int, step: int) -> None:
        deltas = {n: torch.stack([c - w[n] for w in replicas.weights]).mean(0) for n, c in commons[f].items()}
        sent = [{name: weights[name].detach().clone() for name in commons[f]} for weights in replicas.weights]
        under_way[f] = (step + delay, deltas, sent)

    @torch.no_grad()
    def merge(f: int, share: float, *, moves: bool = False) -> None:
        _, deltas, sent = under_way.pop(f)
        for name, each in commons[f].items():
            each.grad = deltas[name]
        outers[f].step()
        for weights, before in zip(replicas.weights, sent, strict=True):
            for name, each in commons[f].items():
                mixed = share * weights[name] + (1 - share) * each
                weights[name].copy_(weights[name] + each - before[name] if moves else mixed)

    @torch.no_grad()
    def average(f: int) -> None:
        for name, each in commons[f].items():
            each.copy_(torch.stack([weights[name] for weights in replicas.weights]).mean(0))

    for step in range(1, steps + 1):
        replicas.step(step - 1)
        merged = [f for f, (due, *_) in list(under_way.items()) if due == step or step == steps]
        for f in merged:
            merge(f, alpha if delay else 0.0, moves=late == "move" and delay > 0)
            if step == steps and delay:  # its outer step was just made: what replicas have done since is averaged
                average(f)
        due = [f for f in (0, 1) if step % 4 == (2, 0)[f]] if step < steps else [f for f in (0, 1) if f not in merged]
        for f in due:
            send(f, step)
            if not delay or step == steps:
                merge(f, 0.0)
        if step == steps:
            for weights, (name, each) in ((w, i) for c in commons for i in c.items() for w in replicas.weights):
                weights[name].data.copy_(each)
        for rank, result in enumerate(results):
            assert apart(result["weights"][step - 1], replicas.flat(rank)) < 1e-12, step
    assert results[0]["digests"][-1] == results[1]["digests"][-1]


# -- merges -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_local_sgd_at_every_step_equals_ddp(pool: Pool) -> None:
    merged, reduced = train(pool, LocalSGD(every=1), steps=5), train(pool, DDP(), steps=5)
    assert apart(merged[0]["weights"][-1], reduced[0]["weights"][-1]) < 1e-12
    assert apart(merged[0]["weights"][-1], train(pool, LocalSGD(every=5), steps=5)[0]["weights"][-1]) > 1e-6


MERGES = [
    LocalSGD(every=3),
    DiLoCo(every=3, codec="bf16"),
    DiLoCo(every=3, codec="8bit"),
    DiLoCo(every=3, codec="4bit"),
    SparseLoCo(every=3, k=8),
    DiLoCo(every=3, codec="powersgd(rank=2)"),
    LocalSGD(every=3, codec="sign"),
]


@pytest.mark.parametrize("feature", MERGES, ids=lambda feature: f"{feature.name}-{getattr(feature, 'codec', '')}")
def test_replicas_are_equal_to_the_last_bit_after_a_merge_and_only_then(pool: Pool, feature: Any) -> None:
    one, other = train(pool, feature, steps=8, precise=False)
    equal = [a == b for a, b in zip(one["digests"], other["digests"], strict=True)]
    assert equal == [step in (3, 6, 8) for step in range(1, 9)]
    assert one["tokens"] == other["tokens"] == 8 * jobs.BATCH * jobs.SEQUENCE


def test_the_outer_copy_is_always_equal(pool: Pool) -> None:
    feature = DiLoCo(every=4, fragments=2, delay=1, codec="bf16")
    one, other = pool.call(merging.held, features=[encode(feature)], steps=11)
    assert one == other
    assert len(set(one)) == 6  # the first one, after the merges of steps 3, 5, 7, 9 and after the last


def test_gradients_of_the_first_steps_are_averaged_before_they_are_clipped(pool: Pool) -> None:
    clip = Clip(max_norm=0.05)  # far below their norm: the steps of replicas that clip for themselves differ
    one, other = train(pool, clip, DiLoCo(every=2, start=3), steps=6)
    equal = [a == b for a, b in zip(one["digests"], other["digests"], strict=True)]
    assert equal == [True, True, True, True, False, True]
    assert apart(one["weights"][2], train(pool, clip, DDP(), steps=3)[0]["weights"][2]) < 1e-12
    assert apart(one["weights"][2], train(pool, clip, LocalSGD(every=1), steps=3)[0]["weights"][2]) > 1e-6


def test_the_first_steps_weigh_tokens_and_not_ranks(pool: Pool) -> None:
    """Ranks bring different numbers of targets: gradients of the first steps are those of DDP all the same."""
    local, whole = (train(pool, each, steps=4, ragged=True) for each in (DiLoCo(every=2, start=9), DDP()))
    for one, other in zip(local, whole, strict=True):
        assert apart(one["weights"][-1], other["weights"][-1]) < 1e-12


def test_muon_steps_inside_of_replicas(pool: Pool) -> None:
    muon = Muon(lr=0.02)
    one, other = train(pool, muon, DiLoCo(every=2, start=3), steps=6)
    assert apart(one["weights"][2], train(pool, muon, DDP(), steps=3)[0]["weights"][2]) < 1e-12
    assert [a == b for a, b in zip(one["digests"], other["digests"], strict=True)] == [True] * 4 + [False, True]


def test_a_run_that_ends_at_the_start_sends_gradients_only(pool: Pool) -> None:
    one, other = train(pool, DiLoCo(every=2, start=9, codec="4bit"), steps=4, model="normed", precise=False)
    sent = [number["wire_mb"] for number in one["numbers"]]
    assert one["digests"][-1] == other["digests"][-1] and one["digests"][0] != other["digests"][0]  # running averages
    assert sent[3] == pytest.approx(sent[2], rel=0.05)
    assert max(sent) < 0.4 * 4e-6 * len(one["weights"][0])
    assert one["tokens"] == other["tokens"] == 4 * jobs.BATCH * jobs.SEQUENCE


@pytest.mark.slow
def test_what_ddp_has_trained_is_where_local_steps_begin(pool: Pool, tmp_path: Path) -> None:
    dense = train(pool, Plain(every=1, keep=9), DDP(), steps=4, folder=str(tmp_path))[0]["weights"]
    arguments: dict[str, Any] = {"folder": str(tmp_path / "rest"), "resume": merging.saves(str(tmp_path))[2]}
    feature = DiLoCo(every=1, outer_momentum=0.0)
    for result, _ in (
        train(pool, Plain(every=9), feature, steps=4, **arguments),
        train(pool, replace(feature, start=3), steps=4),
    ):
        before, after = torch.tensor(dense[2:], dtype=torch.float64)
        assert apart(result["weights"][-1], torch.lerp(before, after, feature.outer_lr).tolist()) < 1e-12


def test_a_larger_start_averages_weights_that_differ_already(pool: Pool, tmp_path: Path) -> None:
    train(pool, Plain(every=1), DiLoCo(every=4), steps=2, folder=str(tmp_path))
    arguments: dict[str, Any] = {"folder": str(tmp_path / "rest"), "resume": merging.saves(str(tmp_path))[0]}
    one, other = train(pool, Plain(every=9), DiLoCo(every=4, start=4), steps=5, **arguments)
    assert [a == b for a, b in zip(one["digests"], other["digests"], strict=True)] == [True, True, True, True]


def test_replicas_begin_with_the_first_ones_weights(pool: Pool) -> None:
    one, other = train(pool, DiLoCo(every=2), steps=1, draw=True)
    assert one["first"] == other["first"]


def test_running_averages_are_merged_and_masks_are_left_alone(pool: Pool) -> None:
    one, other = train(pool, DiLoCo(every=2, fragments=2, delay=1), steps=4, model="normed", precise=False)
    assert one["digests"][-1] == other["digests"][-1]


def test_one_replica_alone_is_left_as_it_is() -> None:
    def run(*features: Any) -> list[float]:
        with compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()), features) as job:
            for number in range(4):
                job.step(jobs.batch(number))
            return merging.weights(job)

    assert run(LocalSGD(every=2)) == run()
    assert run(DiLoCo(every=2)) != run()  # the outer optimizer changes what one replica does


def test_numbers_say_what_a_merge_sent(pool: Pool) -> None:
    result = train(pool, DiLoCo(every=3), steps=6, precise=False)[0]
    sent = [each["wire_mb"] for each in result["numbers"]]
    trained = 4e-6 * len(result["weights"][0])  # the ring of two ranks sends each entry once, or 2 (R - 1) / R times
    assert [value > 0 for value in sent] == [False, False, True] * 2
    assert sent[2] == pytest.approx(trained, rel=0.01, abs=1e-4)
    (reduction,) = result["reductions"]
    assert float(reduction.split()[0]) == pytest.approx(sum(sent) / 6, rel=1e-5)
    assert "2 merges" in reduction


# -- what survives ----------------------------------------------------------------------------------------------------

RESUMED = [
    DiLoCo(every=4, fragments=2, delay=2, codec="4bit"),
    DiLoCo(every=3),
    SparseLoCo(every=2, final_every=4, start=5, k=8, fragments=2, delay=1, late_merge="mix", outer_momentum=0.5),
]


@pytest.mark.slow
def test_a_run_of_muon_in_replicas_resumes_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    features = Muon(lr=0.02), DiLoCo(every=2, final_every=4, start=2, codec="4bit")
    arguments: dict[str, Any] = {"steps": 9, "precise": False, "folder": str(tmp_path)}
    through = train(pool, Plain(every=1, keep=9), *features, **arguments)
    for path in merging.saves(str(tmp_path))[:6]:
        arguments["folder"] = str(tmp_path / "again")
        rest = train(pool, Plain(), *features, resume=path, **arguments)
        for one, other in zip(rest, through, strict=True):
            assert one["digests"] == other["digests"][-len(one["digests"]) :]


@pytest.mark.slow  # a run of `test_second_moment` resumes in the quick tests
@pytest.mark.parametrize("feature", RESUMED, ids=lambda feature: f"{feature.name}-{feature.fragments}")
def test_a_run_resumes_bit_for_bit_from_any_step(pool: Pool, tmp_path: Path, feature: Any) -> None:
    arguments: dict[str, Any] = {"steps": 9, "precise": False, "folder": str(tmp_path), "micro": 2, "ragged": True}
    through = train(pool, Plain(every=1, keep=9), feature, **arguments)
    saves = merging.saves(str(tmp_path))
    assert len(saves) == 9
    for path in saves[3:6]:
        arguments["folder"] = str(tmp_path / "again")
        rest = train(pool, Plain(), feature, resume=path, **arguments)
        for one, other in zip(rest, through, strict=True):
            assert one["digests"] == other["digests"][-len(one["digests"]) :]
            assert one["tokens"] == other["tokens"]


def test_another_number_of_replicas_resumes_from_their_mean(pool: Pool, tmp_path: Path) -> None:
    through = train(pool, Plain(every=1, keep=9), DiLoCo(every=3), steps=5, folder=str(tmp_path))
    for step, path in enumerate(merging.saves(str(tmp_path)), 1):
        job = compose(Job(jobs.tiny().double(), optimizer=jobs.sgd(0.1), world=World()), [
            Plain(folder=str(tmp_path / "one")), DiLoCo(every=3)
        ])  # fmt: skip
        with job:
            assert job.restore is not None and job.restore(path) == step
            mean = torch.tensor([result["weights"][step - 1] for result in through], dtype=torch.float64).mean(0)
            assert apart(merging.weights(job), mean.tolist()) < 1e-15
            job.step(jobs.batch(step))


def test_steps_made_during_an_exchange_are_kept_by_another_number_of_replicas(pool: Pool, tmp_path: Path) -> None:
    """What two replicas sent after step 3 is merged after step 5, by one that starts from the mean of what they were
    after step 4. Nothing is left to merge: the step is the inner optimizer's alone."""
    feature = LocalSGD(every=3, delay=2, codec="8bit")
    train(pool, Plain(every=1, keep=9), feature, steps=5, folder=str(tmp_path))
    job = compose(Job(jobs.tiny().double(), optimizer=jobs.sgd(0.1), world=World()), [
        Plain(folder=str(tmp_path / "one")), feature
    ])  # fmt: skip
    with job:
        assert job.restore is not None and job.restore(merging.saves(str(tmp_path))[3]) == 4
        before = merging.weights(job)
        job.step(jobs.batch(4))
        velocity = [state["momentum_buffer"].flatten() for state in job.optimizer.state.values()]
        alone = torch.tensor(before, dtype=torch.float64) - 0.1 * torch.cat(velocity)
        assert apart(merging.weights(job), alone.tolist()) < 1e-12


def test_the_mean_of_equal_weights_is_equal_to_them() -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    state = {"weight": weights, "count": torch.tensor(3)}
    assert all(torch.equal(average_weights([state] * n, 0, 1)["weight"], weights) for n in (2, 3, 5, 7))
    assert average_weights([state] * 3, 0, 1)["count"] == 3


# -- hosts of several ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [
    pytest.param(FSDP(hosts="leave"), marks=pytest.mark.slow, id="fsdp"),
    pytest.param(DDP(hosts="leave"), id="ddp"),
])  # fmt: skip
def test_a_host_of_two_ranks_is_one_replica(four: Pool, inside: Any) -> None:
    results = train(four, DiLoCo(every=3), inside, steps=8, local=2, ragged=True)
    replicas = Replicas(2, ragged=True)
    common = copied(replicas)
    outer = torch.optim.SGD(common.values(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(8):
        replicas.step(number)
        if number + 1 in (3, 6, 8):
            outer_step(replicas, common, outer)
        for rank, result in enumerate(results):
            assert apart(result["weights"][number], replicas.flat(rank // 2)) < 1e-12
    whole = 8e-6 * len(results[0]["weights"][0])
    assert results[0]["numbers"][2]["wire_mb"] == pytest.approx(whole / 2, rel=0.05)  # each rank sends its half


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4], ids=["merged", "apart"])
def test_two_hosts_of_shards_resume_on_one(four: Pool, pool: Pool, tmp_path: Path, step: int) -> None:
    """It begins with the mean of the two replicas' weights and the first one's velocity, and takes whole batches."""
    features = LocalSGD(every=3), FSDP(hosts="leave")
    arguments: dict[str, Any] = {"local": 2, "ragged": True}
    through = train(four, Plain(every=1, keep=9), *features, steps=6, folder=str(tmp_path), **arguments)
    two, one = Replicas(2, ragged=True), Replicas(1, ragged=True)
    common = copied(two)
    for number in range(step):
        two.step(number)
        if number == 2:
            outer_step(two, common, torch.optim.SGD(common.values(), lr=1.0))
    assert apart(through[2]["weights"][step - 1], two.flat(1)) < 1e-12
    for name, weight in one.weights[0].items():
        velocity = two.optimizers[0].state[two.weights[0][name]]["momentum_buffer"]
        weight.data = (two.weights[0][name].data + two.weights[1][name].data) / 2
        one.optimizers[0].state[weight]["momentum_buffer"] = velocity.clone()
    arguments |= {"folder": str(tmp_path / "one"), "resume": merging.saves(str(tmp_path))[step - 1]}
    resumed = train(pool, Plain(), *features, steps=step + 3, **arguments)
    assert max(apart(result["restored"], one.flat(0)) for result in resumed) < 1e-12
    for number in range(3):
        loss = one.loss(step + number)
        one.step(step + number)
        for result in resumed:
            assert result["numbers"][number]["loss"] == pytest.approx(loss, abs=1e-6)
            assert apart(result["weights"][number], one.flat(0)) < 1e-12


@pytest.mark.parametrize(("inside", "feature"), [
    (FSDP(hosts="leave"), SparseLoCo(every=4, k=8, fragments=2, delay=1, outer_momentum=0.5)),
    (DDP(hosts="leave"), DiLoCo(every=4, codec="8bit")),
], ids=["fsdp", "ddp"])  # fmt: skip
@pytest.mark.slow
def test_hosts_resume_bit_for_bit(four: Pool, tmp_path: Path, inside: Any, feature: Any) -> None:
    arguments: dict[str, Any] = {"steps": 7, "precise": False, "folder": str(tmp_path), "local": 2}
    through = train(four, Plain(every=1, keep=9), feature, inside, **arguments)
    arguments["folder"] = str(tmp_path / "again")
    rest = train(four, Plain(), feature, inside, resume=merging.saves(str(tmp_path))[4], **arguments)
    for one, other in zip(rest, through, strict=True):
        assert one["digests"] == other["digests"][-2:]


@pytest.mark.slow
def test_the_ranks_of_a_host_stay_equal_when_hosts_become_fewer(four: Pool, tmp_path: Path) -> None:
    """Four replicas become two of two ranks: each host takes the optimizer's state of one of them."""
    features = (Plain(every=5), DiLoCo(every=4, replica="host"), DDP(hosts="leave"))
    arguments: dict[str, Any] = {"steps": 7, "precise": False, "folder": str(tmp_path)}
    train(four, *features, local=1, **arguments)
    (tmp_path / "checkpoints/step-00000007.safetensors").unlink()
    ranks = train(four, *features, local=2, resume=str(tmp_path), **arguments)
    assert ranks[0]["digests"] == ranks[1]["digests"] and ranks[2]["digests"] == ranks[3]["digests"]
    assert [ranks[0]["digests"][i] == ranks[2]["digests"][i] for i in (0, 1)] == [False, True]


@pytest.mark.slow  # with a rank for each replica `test_local_ends` does so in the quick tests
def test_one_host_ends_all_and_one_vote_stops_all(four: Pool) -> None:
    arguments: dict[str, Any] = {"steps": 9, "local": 2}
    said = [
        result["said"] for result in train(four, DiLoCo(every=3), FSDP(hosts="leave"), poison={"2": 2}, **arguments)
    ]
    assert all("had no finite loss at step 2" in each for each in said[:2])
    assert all("the loss became nan at step 2" in each for each in said[2:])
    stopped = train(four, DiLoCo(every=3), FSDP(hosts="leave"), stops={"2": 2}, **arguments)
    assert [result["step"] for result in stopped] == [3] * 4


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("features", "kind", "said"), [
    ([DiLoCo(every=0)], ConfigError, "`comm.diloco.every` must be at least 1"),
    ([DiLoCo(every=9, final_every=8)], ConfigError, r"`comm.diloco.final_every` must be 0 or at least `every` \(9\)"),
    ([DiLoCo(codec="5bit")], ConfigError, "`comm.diloco.codec`: cannot read '5bit'"),
    ([DiLoCo(codec="dgc")], ConfigError, "`comm.diloco.codec`: there is no codec `dgc`"),
    ([DiLoCo(delay=4, own_weight=0.3)], ConfigError, 'own_weight` must be left out without late_merge = "mix", got'),
    ([DiLoCo(every=4, delay=4)], ConfigError, r"`comm.diloco.delay` must lie between 0 and `every` - 1 \(3\), got 4"),
    ([DiLoCo(every=4, fragments=5)], ConfigError, "`comm.diloco.fragments` must lie between 1 and `every`"),
    ([DiLoCo(fragments=9)], ConfigError, "`comm.diloco.fragments` must be at most 5, the groups"),
    ([DiLoCo(outer_momentum=1.0)], ConfigError, "outer_momentum"),
    ([SparseLoCo(k=5000)], ConfigError, "`comm.sparseloco.k` must lie between 1 and 4096"),
    ([DiLoCo(), DDP()], ConflictError, "both own SHARD"),
    ([DiLoCo(), PowerSGD()], ConfigError, "`comm.powersgd` exchanges gradients at every step"),
])  # fmt: skip
def test_what_cannot_work_is_refused(features: list[Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()), features)
