"""Tenants of one host against an oracle: whatever is taken, given, called back and killed, in whatever order."""

import shutil
import tempfile
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from broker_hosts import Pretended
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shoestring.core.leases import Priority
from shoestring.memory.broker.tenant import LASTS

RESERVE = 0.1
SLOTS, NAMES = st.integers(0, 3), st.sampled_from("xyz")
OPTIONAL = st.sampled_from([Priority.CACHE, Priority.CHECKPOINT, Priority.PEERS])


class Machine(RuleBasedStateMachine):
    """Four tenants at most. The oracle is a dictionary of what was granted; memory is touched when the test says so."""

    def __init__(self):
        super().__init__()
        self.root, numbers = Path(tempfile.mkdtemp()), count()
        # Keys decide between leases of the same age: random ones would make each run of the same steps another one.
        self.keys = mock.patch("shoestring.memory.broker.ledger.secrets.token_hex", lambda _: f"{next(numbers):016x}")
        self.keys.start()
        self.host = Pretended(self.root / "user" / "broker")
        self.tenants, self.granted, self.touched = {}, {}, {}
        self.firm_in_excess = False

    def teardown(self):
        self.keys.stop()
        for memory in self.tenants.values():
            memory.leave()
        shutil.rmtree(self.root)

    def tenant(self, slot):
        if slot not in self.tenants:
            self.tenants[slot] = self.host.tenant(f"{slot}", reserve=RESERVE)
        return self.tenants[slot]

    def settle(self):
        """Let the pretended host see what was touched."""
        self.host.touched = {
            memory._key: sum(n for (slot, _), n in self.touched.items() if self.tenants[slot] is memory)
            for memory in self.tenants.values()
        }

    @property
    def left(self):
        return int(self.host.total * (1 - RESERVE)) - self.host.outside - sum(n for n, _ in self.granted.values())

    def wanted(self, slot, name):
        """Bytes that others wait for, or this tenant for other leases."""
        wants = [
            (other, lease, want)
            for other, memory in self.tenants.items()
            for lease, want in memory._record.wants.items()
            if want.at > self.host.now - LASTS
        ]
        return sum(want.nbytes for other, lease, want in wants if (other, lease) != (slot, name))

    @rule(slot=SLOTS, name=NAMES, nbytes=st.integers(1, 600), priority=OPTIONAL)
    def take(self, slot, name, nbytes, priority):
        memory = self.tenant(slot)
        before, order = self.granted.get((slot, name), (0, priority))
        called, left, wanted = name in memory.called_back, self.left, self.wanted(slot, name)
        if memory.take(name, nbytes, priority):
            if nbytes > before:
                assert nbytes - before <= left
            elif nbytes == before and order is priority:
                assert not called
            self.granted[slot, name] = nbytes, priority
            self.touched[slot, name] = min(self.touched.get((slot, name), 0), nbytes)
            self.settle()
        elif nbytes != before:
            assert nbytes - before > left - wanted  # a refusal has a reason

    @rule(slot=SLOTS, name=NAMES, nbytes=st.integers(1, 600))
    def need(self, slot, name, nbytes):
        assert self.tenant(slot).take(name, nbytes), "what is required is never refused"
        self.granted[slot, name] = nbytes, Priority.REQUIRED
        self.touched[slot, name] = min(self.touched.get((slot, name), 0), nbytes)
        self.settle()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), part=st.floats(0, 1))
    def touch(self, data, part):
        held = data.draw(st.sampled_from(sorted(self.granted)))
        self.touched[held] = int(self.granted[held][0] * part)
        self.settle()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def give(self, data):
        slot, name = data.draw(st.sampled_from(sorted(self.granted)))
        self.free(slot, name)

    def free(self, slot, name):
        self.touched.pop((slot, name), None)
        self.settle()
        self.tenants[slot].give(name)
        del self.granted[slot, name]

    @precondition(lambda self: self.tenants)
    @rule(data=st.data())
    def kill(self, data):
        """What the dead held is free at once."""
        slot = data.draw(st.sampled_from(sorted(self.tenants)))
        self.host.kill(self.tenants.pop(slot))
        for held in [held for held in self.granted if held[0] == slot]:
            del self.granted[held]
            self.touched.pop(held, None)
        self.settle()
        probe = self.host.tenant("probe", reserve=RESERVE)
        left = self.left - self.wanted("probe", "all")
        assert left <= 0 or probe.take("all", left, Priority.PEERS)
        probe.leave()

    @rule(seconds=st.sampled_from([0.5, 2.0, LASTS]))
    def wait(self, seconds):
        self.host.now += seconds

    @rule(outside=st.integers(0, 300))
    def others(self, outside):
        self.host.outside = outside

    @rule()
    def answer(self):
        """All owners give what is called back, until nothing is: then everybody who is served first has enough."""
        for _ in range(20):
            self.host.now += 1.0
            called = []
            for slot, memory in self.tenants.items():
                memory.look()
                called += [(slot, name) for name in memory.called_back]
            for held in called:
                assert self.granted[held][1] is not Priority.REQUIRED
            for held in called:  # what is less urgent would not have done
                nbytes, kind = self.granted[held]
                spared = [n for other, (n, k) in self.granted.items() if other not in called and k > kind]
                assert sum(spared) < nbytes
            if not called:
                break
            for held in called:
                self.free(*held)
        assert not called
        assert self.left >= 0 or not [kind for _, kind in self.granted.values() if kind is not Priority.REQUIRED]

    @invariant()
    def all_know_the_same(self):
        """What the tenants have written is what they were granted."""
        for slot, memory in self.tenants.items():
            mine = {name: held for (other, name), held in self.granted.items() if other == slot}
            assert memory.leases == mine
            with memory._ledger.locked(1):
                (record,) = [seen.record for seen in memory._ledger.scan() if seen.key == memory._key]
            assert {name: (lease.nbytes, lease.priority) for name, lease in record.leases.items()} == mine


BUDGET = settings(max_examples=15, stateful_step_count=30, suppress_health_check=list(HealthCheck))


def test_tenants_keep_to_what_there_is():
    run_state_machine_as_test(Machine, settings=BUDGET)


@pytest.mark.slow
def test_tenants_keep_to_what_there_is_at_length():
    run_state_machine_as_test(Machine, settings=settings(BUDGET, max_examples=150, stateful_step_count=50))


def greedy(host, key, name):
    return []


def the_other_way_round(host, room, want):
    return sorted(host.leases(), key=lambda holding: holding.lease.priority)


def a_lock_for_ever(descriptor):
    return 1


FAULTS = {
    "grants what is not there": ("shoestring.memory.broker.tenant.must_end", greedy),
    "calls back in another order": ("shoestring.memory.broker.arbitration._candidates", the_other_way_round),
    "counts the dead": ("shoestring.memory.broker.ledger._holder", a_lock_for_ever),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broker_with_a_fault_is_found_out(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=settings(BUDGET, max_examples=300, phases=[Phase.generate]))
