"""Exchanges between four real ranks: equal replicas, any buckets, any order of completion, and what DDP may do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import exchanges

from shoestring import comm, parallel
from shoestring.core.feature import Feature
from shoestring.testing.pool import Pool
from shoestring.testing.scenarios import encode

EXCHANGES: list[Feature] = [
    comm.Dense(transport=comm.Transport(parts=3, channels=2)),
    comm.BF16(),
    comm.PowerSGD(rank=2),
    comm.PowerSGD(rank=2, alternate=True, transport=comm.Transport(parts=3, channels=2)),
    comm.Quantize(bits=4, rounding="nearest", feedback=True),
    comm.Sign(),
    comm.TernGrad(transport=comm.Transport(channels=2)),
    comm.TopK(density=0.2, wire="int8"),
    comm.RandomK(density=0.3),
    comm.DGC(lr=0.05, density=0.2),
    comm.PowerSGD(rank=2, transport=comm.Transport(select="hypernetwork", kb_per_step=3)),
    comm.BF16(transport=comm.Transport(select="knapsack", kb_per_step=3)),
    comm.BF16(transport=comm.Transport(select="per-node", kb_per_step=3)),
]


slow = pytest.mark.slow


def quick(features: list[Feature], *kept: int) -> list[object]:
    """Parameters of which those at these places are in the quick tests, and half of the others in the slow ones."""
    some = (slow, pytest.mark.share(2))
    return [each if number in kept else pytest.param(each, marks=some) for number, each in enumerate(features)]


def label(feature: Feature) -> str:
    return repr(feature).partition("(")[2][:60]


@pytest.fixture(scope="module")
def pool(four: Pool) -> Pool:
    return four


def equal(results: list[dict]) -> bool:
    return all(each["digests"] == results[0]["digests"] for each in results)


# One of each kind: dense, low rank, quantised, sparse, chosen layers. All of them meet an infinite gradient below.
@pytest.mark.parametrize("feature", quick(EXCHANGES, 7), ids=label)
def test_replicas_are_equal_at_every_step(pool, feature):
    results = pool.call(exchanges.train, features=[encode(feature)], steps=24)
    assert equal(results)
    losses = results[0]["losses"]
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature",
    quick(
        [
            comm.PowerSGD(rank=2),
            comm.PowerSGD(rank=2, transport=comm.Transport(parts=4, channels=3)),
            comm.Quantize(bits=4, rounding="nearest", feedback=True, transport=comm.Transport(parts=5)),
        ],
        0,
    ),
    ids=label,
)
def test_late_ranks_and_many_buckets_change_nothing(pool, feature):
    """Torch's PowerSGD hook aborts here: it issues from completion threads, whose order differs between ranks."""
    prompt = pool.call(exchanges.train, features=[encode(feature)], steps=8)
    late = pool.call(exchanges.train, features=[encode(feature)], steps=8, delays=True)
    assert late[0]["digests"] == prompt[0]["digests"]
    assert equal(late)


def test_dense_is_ddp(pool):
    ours = pool.call(exchanges.train, features=[encode(comm.Dense())], steps=10)
    ddp = pool.call(exchanges.train, features=[], steps=10)
    assert ours[0]["losses"] == pytest.approx(ddp[0]["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "wrap"), [
    pytest.param(comm.Dense(), True, id="dense-ddp"),
    pytest.param(comm.Dense(), False, id="dense-plain", marks=slow),
    pytest.param(comm.PowerSGD(rank=2), True, id="powersgd-ddp", marks=slow),
    pytest.param(comm.PowerSGD(rank=2), False, id="powersgd-plain", marks=slow),
])  # fmt: skip
def test_hosts_exchange_rows_that_their_ranks_have_summed(pool, feature, wrap):
    """Two hosts of two: the codec sees two ranks, and a host sends each row once."""
    torus = pool.call(exchanges.train, features=[encode(feature)], steps=10, local=2, wrap=wrap)
    flat = pool.call(exchanges.train, features=[encode(feature)], steps=10, local=4, wrap=wrap)
    assert equal(torus)
    if isinstance(feature, comm.Dense):
        assert torus[0]["losses"] == pytest.approx(flat[0]["losses"], rel=1e-5)
        assert torus[0]["numbers"]["wire_mb"] < 0.4 * flat[0]["numbers"]["wire_mb"]


@slow
@pytest.mark.parametrize("feature", EXCHANGES[1:7:2], ids=label)
def test_shards_of_fsdp_travel_between_hosts(pool, feature):
    results = pool.call(
        exchanges.train, features=[encode(parallel.FSDP(hosts="leave")), encode(feature)], steps=20, local=2, wrap=False
    )
    losses = [result["losses"] for result in results]
    assert results[0]["digests"] == results[2]["digests"]  # the same shards of the two hosts
    assert results[1]["digests"] == results[3]["digests"]
    assert sum(losses[0][-5:]) < sum(losses[0][:5])


@pytest.mark.slow
@pytest.mark.parametrize(("bucket_mb", "no_sync"), [
    (0.001, True),
    pytest.param(25, False, marks=slow),
    pytest.param(0.001, False, marks=slow),
    pytest.param(25, True, marks=slow),
])  # fmt: skip
def test_a_foreign_script_needs_one_line(pool, no_sync, bucket_mb):
    arguments = {"steps": 12, "bucket_mb": bucket_mb, "no_sync": no_sync}
    results = pool.call(exchanges.foreign, feature=encode(comm.PowerSGD(rank=4)), **arguments)
    assert equal(results)
    assert results[0]["numbers"]["wire_mb"] > 0
    assert sum(results[0]["losses"][-5:]) < sum(results[0]["losses"][:5])


@pytest.mark.parametrize("feature", quick(EXCHANGES, 0, 4, 10), ids=label)
def test_an_infinite_gradient_is_seen_by_all_and_kept_by_none(pool, feature):
    results = pool.call(exchanges.nan, features=[encode(feature)], at=2)
    for result in results:
        assert result["finite"] == [True, True, False, True, True]
        assert result["kept"]
        assert result["digest"] == results[0]["digest"]
