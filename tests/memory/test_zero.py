"""ZeRO against DDP, on two ranks, bit by bit."""

import pytest
import torch
import zero_ranks
from pytest import approx, fixture, mark, raises

from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.memory import Zero
from shoestring.testing.pool import Pool
from shoestring.testing.suite import shared


@fixture(scope="module")
def pool(request):
    return shared(request.config)["pool"]


def same(one, other):
    assert [rank["losses"] for rank in one] == [rank["losses"] for rank in other]
    assert [rank["weights"] for rank in one] == [rank["weights"] for rank in other]


@mark.parametrize("stage", [1, 2])
def test_losses_and_weights_are_those_of_ddp(pool, stage):
    same(pool.call(zero_ranks.train, stage=stage), pool.call(zero_ranks.train))


def test_gradients_accumulated_whole_are_those_of_ddp(pool):
    same(pool.call(zero_ranks.train, stage=1, micro=3), pool.call(zero_ranks.train, micro=3))


def test_gradients_accumulated_in_shards_are_those_of_ddp_that_exchanges_each(pool):
    for rank in pool.call(zero_ranks.accumulate):
        assert rank["zero"] == rank["ddp"]


def test_clipping_differs_by_the_order_of_the_norm_s_sum_alone(pool):
    zero, ddp = (pool.call(zero_ranks.train, clip=0.5, **stage)[0] for stage in ({"stage": 2}, {}))
    assert zero["losses"] == approx(ddp["losses"], rel=1e-6)


def test_parameters_that_no_rank_or_one_rank_uses_are_stepped_as_under_ddp(pool):
    arguments = {"unused": True, "steps": 12}
    same(pool.call(zero_ranks.train, stage=2, **arguments), pool.call(zero_ranks.train, **arguments))


@pytest.mark.slow
def test_small_buckets_and_few_bytes_in_flight_change_no_bit(pool):
    few = pool.call(zero_ranks.train, stage=2, bucket_mb=1e-3, in_flight_mb=1e-3)
    same(few, pool.call(zero_ranks.train, stage=2))
    assert all(kind == "DTensor" for kind in few[0]["placed"].values())


def test_masters_of_bf16_parameters_are_saved_and_resumed_on_another_number_of_ranks(pool, tmp_path):
    two, _ = pool.call(zero_ranks.reduced, folder=str(tmp_path))
    one = zero_ranks.reduced(folder=str(tmp_path), resume=True)
    assert one["state"] == two["state"] and one["weights"] == two["weights"]
    masters = {name: torch.tensor(two["state"][f"/model/{name}"]) for name in two["weights"]}
    assert any(not torch.equal(master, master.bfloat16().double()) for master in masters.values())
    for name, rounded in two["weights"].items():
        assert masters[name].float().bfloat16().tolist() == rounded, name
    parameters = sum(torch.tensor(value).numel() for value in two["weights"].values())
    assert two["facts"]["zero_held"] == approx((2 + 14 / 2) * parameters, rel=0.03)
    assert two["facts"]["zero_without"] == approx(16 * parameters, rel=0.03)


@fixture(scope="module")
def four():
    with Pool(4) as ranks:
        yield ranks


def close(ranks, flat):
    """All ranks have the same bits, and those of ranks that divide all of it but for the order of sums."""
    one, *others = ranks
    assert all(other["weights"] == one["weights"] for other in others)
    assert one["losses"] == approx(flat["losses"], rel=1e-9)
    for ours, theirs in zip(one["weights"], flat["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-8, atol=1e-8)


@mark.slow
def test_inside_hosts_it_leaves_what_is_between_them_to_a_codec(four):
    close(four.call(zero_ranks.in_hosts, hosts=2), four.call(zero_ranks.in_hosts, hosts=1)[0])


@mark.slow
@mark.parametrize("unused", [False, True])
def test_hosts_that_are_replicas_hold_the_state_once_each(four, unused):
    replicas = four.call(zero_ranks.in_hosts, hosts=2, how="replicate", unused=unused, steps=8)
    flat, *_ = four.call(zero_ranks.in_hosts, hosts=1, unused=unused, steps=8)
    close(replicas, flat)
    assert all(rank["buffers"] == replicas[0]["buffers"] for rank in replicas)
    # Of D bytes of double parameters, a rank holds D, and of gradients and averages a half, or a quarter of all.
    doubles = 8 * sum(torch.tensor(each).numel() for each in flat["weights"])
    assert replicas[0]["held"] == approx(doubles * (1 + 3 / 2), rel=0.1)
    assert flat["held"] == approx(doubles * (1 + 3 / 4), rel=0.1)
    # Inside a host half of the gradients and of the parameters, and between hosts as much again of half of them.
    assert replicas[0]["sent"] == approx(1.5 * doubles, rel=0.15)


@mark.slow
@mark.parametrize("name", ["mean_of_whole", "broadcast"])
def test_hosts_that_go_their_own_ways_are_seen(four, name):
    with raises(AssertionError):
        faulty, flat = (
            four.call(zero_ranks.without_between, name=name),
            four.call(zero_ranks.in_hosts, hosts=1, unused=True, steps=8)[0],
        )
        close(faulty, flat)
        assert all(rank["buffers"] == faulty[0]["buffers"] for rank in faulty)


def test_one_rank_a_host_has_nothing_to_divide():
    world = World(size=2, local_size=1)
    with raises(ConfigError, match="divides nothing if each host has one rank"):
        Zero(hosts="replicate").check(attachments_of(Job(zero_ranks.wide(), world=world)))


@mark.slow
@mark.parametrize("name", ["LARS", "LAMB", "Muon"])
def test_optimizers_that_exchange_what_they_need_of_shards_are_those_of_ddp(pool, name):
    (zero, other), (ddp, _) = (pool.call(zero_ranks.by_optimizer, name=name, zero=on) for on in (True, False))
    assert zero["losses"] == approx(ddp["losses"], rel=1e-5)
    assert zero["weights"] == other["weights"]


def test_an_optimizer_that_needs_whole_tensors_is_refused(pool):
    assert pool.call(zero_ranks.refused, of="AdamW") == ["", ""]
    for message in pool.call(zero_ranks.refused, of="LBFGS"):
        assert message.startswith("`memory.zero` lets each rank update its shards of the parameters, but LBFGS")
    for message in pool.call(zero_ranks.refused, of="Adafactor"):
        assert "Adafactor" in message


def test_buffers_are_the_first_rank_s(pool):
    (zero, other), (ddp, _) = (pool.call(zero_ranks.train, stage=stage) for stage in (2, 0))
    assert zero["buffers"] == other["buffers"] == ddp["buffers"]
