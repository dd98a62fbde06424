"""Who gives host memory back, and to whom: the rules alone, without files or processes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.leases import Priority
from shoestring.memory.broker.arbitration import Lease, Tenant, Tenants, called_back, must_end

REQUIRED, CACHE, CHECKPOINT, PEERS = Priority


def tenant(key, leases=(), wants=(), **more):
    """Leases and wants are (name, bytes, priority); the later ones are younger."""
    return Tenant(
        key,
        leases={name: Lease(nbytes, priority, at) for at, (name, nbytes, priority) in enumerate(leases)},
        wants={name: Lease(nbytes, priority, 100 + at) for at, (name, nbytes, priority) in enumerate(wants)},
        **more,
    )


def called(room, *tenants, **more):
    return sorted(f"{key}.{name}" for key, name in called_back(Tenants(tenants, {"host": room}, **more)))


def fits(host, key, name):
    return must_end(host, key, name) == []


EACH = [("needed", 40, REQUIRED), ("cache", 30, CACHE), ("slots", 20, CHECKPOINT), ("held", 10, PEERS)]


def test_nothing_is_called_back_while_everything_fits():
    assert called(50, tenant("a", EACH), tenant("b", wants=[("it", 50, REQUIRED)])) == []


def test_the_last_priority_goes_first_and_required_never():
    for short, gone in [(1, "held"), (10, "held"), (11, "slots"), (25, "slots held"), (55, "cache slots held")]:
        expected = sorted(f"a.{name}" for name in gone.split())
        assert called(0, tenant("a", EACH), tenant("b", wants=[("it", short, REQUIRED)])) == expected
    assert called(0, tenant("a", EACH), tenant("b", wants=[("it", 10**6, REQUIRED)])) == [
        "a.cache",
        "a.held",
        "a.slots",
    ]


def test_what_cannot_be_reached_calls_nothing_back():
    wanting = tenant("b", wants=[("it", 31, CHECKPOINT)])
    assert called(0, tenant("a", EACH), wanting) == []
    assert called(21, tenant("a", EACH), wanting) == ["a.held"]


def test_a_tenant_gives_way_to_its_own_more_urgent_wishes():
    assert called(0, tenant("a", EACH, [("it", 5, CACHE)])) == ["a.held"]


def test_the_youngest_goes_first_and_no_more_than_needed():
    a = tenant("a", [("old", 30, CACHE), ("new", 10, CACHE), ("newest", 10, CACHE)])
    assert called(0, a, tenant("b", wants=[("it", 10, REQUIRED)])) == ["a.newest"]
    assert called(0, a, tenant("b", wants=[("it", 30, REQUIRED)])) == ["a.old"]  # it makes the younger ones unnecessary


def test_what_others_have_filled_is_called_back_for():
    assert called(-15, tenant("a", EACH)) == ["a.slots"]  # which makes those that are held unnecessary
    assert called(-25, tenant("a", EACH)) == ["a.held", "a.slots"]


def test_only_leases_below_the_limit_that_is_short_are_called_back():
    inside = tenant("in", [("cache", 30, CACHE)], bounds=frozenset({"host", "group"}))
    outside = tenant("out", [("cache", 30, CACHE)])
    wanting = tenant("b", wants=[("it", 20, REQUIRED)], bounds=frozenset({"host", "group"}))
    assert called_back(Tenants([inside, outside, wanting], {"host": 100, "group": 0})) == {("in", "cache")}
    assert len(called_back(Tenants([inside, outside, wanting], {"host": 0, "group": 100}))) == 1
    wide = tenant("b", wants=[("it", 50, REQUIRED)], bounds=frozenset({"host", "group"}))
    assert called_back(Tenants([inside, outside, wide], {"host": 0, "group": 40})) == {
        ("in", "cache"),
        ("out", "cache"),
    }


def test_a_share_is_called_back_from_whoever_has_more_than_it():
    parts = [(f"{number}", 10, CACHE) for number in range(10)]
    greedy, late = tenant("a", parts), tenant("b", wants=[("it", 50, CACHE)])
    assert len(called(0, greedy, late)) == 5
    assert called(0, greedy, tenant("b", wants=[("it", 51, CACHE)])) == []  # more than its share
    assert len(called(0, greedy, tenant("b", wants=[("it", 75, CACHE)], share=3.0))) == 8
    assert called(0, tenant("a", [("all", 100, CACHE)]), late) == ["a.all"]
    # Then the other one is called back by nobody: whoever has its share keeps it.
    assert called(50, tenant("a", wants=[("all", 100, CACHE)]), tenant("b", [("it", 50, CACHE)])) == []


def test_another_users_leases_are_called_back_down_to_an_equal_part():
    cache = [(f"{number}", 10, CACHE) for number in range(8)]
    theirs, mine = tenant("a", cache, user=1), tenant("b", wants=[("it", 10**6, REQUIRED)], user=2)
    assert len(called(0, theirs, mine, totals={"host": 100})) == 3
    assert len(called(0, theirs, replace(mine, user=1), totals={"host": 100})) == 8


def test_who_comes_later_does_not_get_what_another_waits_for():
    waiting = tenant("a", wants=[("it", 60, REQUIRED)])
    host = Tenants([waiting, tenant("b", wants=[("cache", 30, CACHE)])], {"host": 50})
    assert not fits(host, "b", "cache")
    assert fits(replace(host, room={"host": 90}), "b", "cache") and fits(replace(host, room={"host": 90}), "a", "it")
    hopeless = tenant("a", wants=[("it", 60, CACHE)])  # what nobody can give keeps nobody waiting
    assert fits(Tenants([hopeless, tenant("b", wants=[("it", 30, CHECKPOINT)])], {"host": 50}), "b", "it")


NBYTES, PRIORITIES = st.integers(1, 50), st.sampled_from(Priority)
CLAIMS = st.dictionaries(st.sampled_from("xyz"), st.builds(Lease, NBYTES, PRIORITIES, st.floats(0, 9)), max_size=3)
BOUNDS = st.sampled_from([frozenset({"host"}), frozenset({"host", "1"}), frozenset({"host", "2"})])
TENANTS = st.builds(Tenant, st.sampled_from("abcd"), st.just(0), st.floats(0.5, 4), BOUNDS, leases=CLAIMS, wants=CLAIMS)
HOSTS = st.builds(
    Tenants,
    st.lists(TENANTS, max_size=4, unique_by=lambda each: each.key),
    st.fixed_dictionaries(dict.fromkeys(["host", "1", "2"], st.integers(-40, 60))),
)


@pytest.mark.slow
@given(HOSTS)
def test_what_is_called_back_has_a_reason(host):
    """By brute force over all hosts of a few tenants: enough and not more, in order, and for somebody more urgent."""
    leases = {(holding.tenant.key, holding.name): holding for holding in host.leases()}
    chosen = [leases[held] for held in called_back(host)]
    assert all(holding.lease.priority is not REQUIRED for holding in chosen)
    wanted = [want.lease.priority for want in host.wants()] + [REQUIRED] * any(left < 0 for left in host.room.values())
    assert all(holding.lease.priority >= min(wanted, default=REQUIRED) for holding in chosen)
    for holding in chosen:  # a less urgent lease in all the same bounds, of at least its size, would have gone first
        assert not [
            other
            for other in leases.values()
            if other.lease.priority > holding.lease.priority
            and other not in chosen
            and other.tenant.bounds >= holding.tenant.bounds
            and other.lease.nbytes >= sum(each.lease.nbytes for each in chosen)
        ]
    room = {  # with all of it back, what is served first is there
        bound: left + sum(holding.lease.nbytes for holding in chosen if bound in holding.tenant.bounds)
        for bound, left in host.room.items()
    }
    urgent = [want for want in host.wants() if want.lease.priority is REQUIRED]
    if urgent:
        first, optional = urgent[0], [holding for holding in leases.values() if holding.lease.priority is not REQUIRED]
        for bound in first.tenant.bounds:
            rest = [holding for holding in optional if bound in holding.tenant.bounds and holding not in chosen]
            assert room[bound] >= first.lease.nbytes or not rest
