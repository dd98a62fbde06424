"""What a tenant gets of a pretended host, what it gives back, and the setting."""

import os
import sys
import threading
import time
from dataclasses import replace

import pytest
from broker_hosts import Pretended

from shoestring.core.errors import ConfigError
from shoestring.core.leases import HostMemory, Priority
from shoestring.core.world import World
from shoestring.memory import Broker
from shoestring.memory.broker.tenant import LASTS, BrokeredMemory, Sights, Terms
from shoestring.planning.system import memory_bounds
from tests.rigs.checkpointing.surroundings import listening
from tests.waiting import until

GIB = 1 << 30
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
LIMIT = 60  # seconds for what takes a hundredth of one


@pytest.fixture
def host(tmp_path):
    return Pretended(tmp_path / "user" / "broker")


# -- what core's leases promise, on a host that others use, too -------------------------------------------------------


def test_alone_it_is_what_core_has(host):
    memory = host.tenant()
    assert memory.take("a", 600, Priority.CACHE) and not memory.take("b", 500, Priority.CACHE)
    assert memory.take("b", 400, Priority.CACHE) and memory.take("a", 600, Priority.CACHE)
    assert memory.leases == {"a": (600, Priority.CACHE), "b": (400, Priority.CACHE)}
    memory.give("b")
    assert memory.take("a", 1000, Priority.CACHE) and memory.take("needed", 10**6)
    memory.leave()
    assert not memory.take("c", 10**6, Priority.CACHE) or memory.budget == float("inf")  # a plain one again


def test_a_budget_of_the_user_counts_besides(host):
    memory = host.tenant()
    memory.budget = 100
    assert memory.take("a", 60, Priority.CACHE) and not memory.take("a", 101, Priority.CACHE)
    assert memory._record.leases["a"].nbytes == 60 and not memory._record.wants
    memory.settle(10**9)
    assert memory.budget == 100
    memory.leave()


def test_what_is_leased_and_not_touched_is_not_free(host):
    one, other = host.tenant("one"), host.tenant("other")
    assert one.take("a", 700, Priority.CACHE) and not other.take("b", 301, Priority.CACHE)
    assert other.take("b", 300, Priority.CACHE)
    host.touched = {one._key: 700}  # what is touched counts once
    other.give("b")
    assert other.take("b", 300, Priority.CACHE) and not other.take("b", 301, Priority.CACHE)
    one.leave(), other.leave()


def test_what_a_process_had_at_its_peak_is_kept_free_for_it(host):
    """Between two steps activations are gone; the next step needs them again."""
    one, other = host.tenant("one"), host.tenant("other")
    host.touched = {one._key: 500}
    one.look()
    host.touched = {one._key: 100}
    host.now += 1
    one.look()
    assert not other.take("b", 501, Priority.CACHE) and other.take("b", 500, Priority.CACHE)
    for _ in range(3):  # a peak is forgotten some time
        host.now += 61
        one.look()
    assert other.take("b", 900, Priority.CACHE)
    one.leave(), other.leave()


def test_what_an_earlier_start_left_in_memory_is_not_counted_twice(host):
    """Slots of checkpoints that are files in memory: they are no process's until they are mapped."""
    host.outside = 600
    memory, other = host.tenant(), host.tenant()
    assert not memory.take("slots", 600, Priority.CHECKPOINT)
    memory.settle(10**9, ranks=2, there=1200)
    memory.look()
    assert memory.take("slots", 600, Priority.CHECKPOINT)
    assert other.take("b", 400, Priority.CACHE) and not other.take("b", 401, Priority.CACHE)
    memory.leave(), other.leave()


def test_a_lease_that_is_called_back_is_refused_until_it_is_given(host):
    one, other = host.tenant("one"), host.tenant("other")
    assert one.take("slots", 700, Priority.CHECKPOINT) and one.take("cache", 100, Priority.CACHE)
    assert not other.take("cache", 500, Priority.CACHE)
    one.look()
    assert one.called_back == {"slots"}
    assert one.take("cache", 100, Priority.CACHE) and not one.take("slots", 700, Priority.CHECKPOINT)
    assert one.leases["slots"] == (700, Priority.CHECKPOINT) and not other.take("cache", 500, Priority.CACHE)
    assert one.take("slots", 300, Priority.CHECKPOINT) and not one.called_back  # less of it may do, too
    assert other.take("cache", 500, Priority.CACHE) and not one.take("slots", 700, Priority.CHECKPOINT)
    one.leave(), other.leave()


def test_what_is_waited_for_is_forgotten_when_nobody_asks_again(host):
    one, other = host.tenant("one"), host.tenant("other")
    assert one.take("slots", 900, Priority.CHECKPOINT) and not other.take("cache", 500, Priority.CACHE)
    one.look()
    assert one.called_back == {"slots"}
    host.now += LASTS
    other.look(), one.look()
    assert not one.called_back and not other._record.wants
    one.leave(), other.leave()


def test_a_thread_answers_and_what_is_required_waits_for_it(host):
    one, other = host.tenant("one", watch=True), host.tenant("other", wait=LIMIT)
    assert one.take("slots", 900, Priority.CHECKPOINT)
    one.when_called("slots", lambda: one.give("slots"))
    assert other.take("needed", 500)
    assert one.leases == {} and not one.called_back
    one.leave(), other.leave()
    assert not [thread for thread in threading.enumerate() if thread.name == "host memory"]


def test_a_callback_that_fails_keeps_the_thread(host):
    one, other = host.tenant("one", watch=True), host.tenant("other")
    assert one.take("a", 500, Priority.CACHE) and one.take("b", 500, Priority.PEERS)
    one.when_called("b", lambda: 1 // 0)
    with listening() as said:
        assert other.take("needed", 300)
        until(lambda: [line for line in said if "could not be given" in line])
    one.when_called("b", lambda: one.give("b"))
    host.now += 1
    until(lambda: list(one.leases) == ["a"])
    one.leave(), other.leave()


def test_what_is_required_waits_for_nobody_twice_in_vain(tmp_path):
    """An owner that gives back between two steps only must not stop others for each byte that they grow by."""
    host = Pretended(tmp_path / "user" / "broker")
    one, other = host.tenant("one"), host.tenant("other", wait=0.2)
    other.sights = replace(other.sights, clock=time.monotonic)
    assert one.take("slots", 900, Priority.CHECKPOINT)
    began = time.monotonic()
    assert other.take("needed", 500)
    waited = time.monotonic() - began
    assert waited >= 0.2
    assert other.take("needed", 600) and time.monotonic() - began < 2 * waited
    one.leave(), other.leave()


def test_pressure_calls_back_where_memory_is_scarce(host):
    memory = host.tenant(reserve=0.1)
    assert memory.take("held", 100, Priority.PEERS) and memory.take("slots", 650, Priority.CHECKPOINT)
    host.touched = {memory._key: 750}
    host.waits = 50.0
    host.now += 1
    memory.look()
    assert not memory.called_back  # others wait for memory in a group of their own: here is enough
    host.outside = 100
    host.now += 1
    memory.look()
    assert memory.called_back == {"held"}
    memory.leave()


def test_tenants_of_one_priority_get_their_shares(host):
    """Each takes as much as it can in parts; whoever came first gives what exceeds its share."""
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    tenants = {name: host.tenant(name, share=share) for name, share in weights.items()}

    def fill():
        for memory in tenants.values():
            for number in range(100):
                if f"{number}" not in memory.leases and not memory.take(f"{number}", 20, Priority.CACHE):
                    break

    for _ in range(30):
        fill()
        host.now += 1.1
        for memory in tenants.values():
            memory.look()
            for name in sorted(memory.called_back):
                memory.give(name)
    fill()
    held = {name: sum(nbytes for nbytes, _ in memory.leases.values()) for name, memory in tenants.items()}
    assert held["a"] >= 230 and held["b"] >= 230 and held["c"] >= 480, held
    for memory in tenants.values():
        memory.leave()


# -- limits -----------------------------------------------------------------------------------------------------------

FILES = {  # of cgroups of both versions
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("memory.max", "memory.current", "inactive_file"),
}


def group(root, kind, path, limit, used):
    """A cgroup below a root of our own."""
    folder = root / "sys/fs/cgroup" / kind / path
    folder.mkdir(parents=True)
    most, now, cache = FILES[kind]
    (folder / most).write_text(f"{limit}\n")
    (folder / now).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cache} 0\n")


@pytest.mark.parametrize("kind", FILES)
def test_groups_limit_those_that_are_in_them(tmp_path, kind):
    """Two in one group and one in another, on a host with room for all."""
    root, sights = tmp_path / "system", {}
    group(root, kind, "a", 4 * GIB, GIB)
    group(root, kind, "b", 40 * GIB if kind else "max", GIB)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\n")
    (root / "proc/pressure").mkdir()
    (root / "proc/pressure/memory").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n")
    for name in "ab":
        (root / "proc/self/cgroup").write_text(f"4:{kind}:/{name}\n" if kind else f"0::/{name}\n")
        found = list(memory_bounds(root))
        assert len(found) == (2 if name == "a" or kind else 1)
        sights[name] = Sights(lambda found=found: found, lambda seen: 0)
    terms = Terms(tmp_path / "user" / "broker", reserve=0.0, wait=0.0)
    one, two, other = (BrokeredMemory(terms=terms, sights=sights[name]) for name in "aab")
    for memory in (one, two, other):
        memory.join(watch=False)
    assert one.take("a", 2 * GIB, Priority.CACHE) and not two.take("b", 2 * GIB, Priority.CACHE)
    assert other.take("c", 5 * GIB, Priority.CACHE) and not other.take("c", 10 * GIB + 1, Priority.CACHE)
    assert two.take("b", GIB, Priority.CACHE) and not two.take("d", 1, Priority.CACHE)
    assert two.take("needed", GIB)
    other._surveyed = one._surveyed = -1e9
    other.look(), one.look()
    assert one.called_back == {"a"} and not other.called_back  # what the other one holds is in another group
    for memory in (one, two, other):
        memory.leave()


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_the_setting_gives_a_world_whose_memory_is_brokered_once(tmp_path):
    world = World(rank=1, size=4, local_size=2)
    setting = Broker(folder=str(tmp_path), tenant="mine", weight=3.0)
    arranged = setting.arrange(world)
    assert arranged == world and isinstance(arranged.memory, BrokeredMemory) and type(world.memory) is HostMemory
    assert setting.arrange(arranged) is arranged
    terms = arranged.memory.terms
    assert terms.tenant == "mine rank 1" and terms.share == 1.5
    assert terms.folder == tmp_path / f"shoestring-{os.geteuid()}" / "broker" and not list(tmp_path.iterdir())
    assert Broker(folder=str(tmp_path), all_users=True).place == tmp_path / "shoestring-broker"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weight": 0.0}, "weight` must be above 0 and at most 1000, got 0.0"),
        ({"reserve": 1.0}, "reserve` must be at least 0 and below 1, got 1.0"),
        ({"wait": -1.0}, "wait` must be from 0 to 30 seconds, got -1.0"),
        ({"folder": "/dev/nothing"}, "there is no folder `/dev/nothing`"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Broker(**wrong).check(None)
