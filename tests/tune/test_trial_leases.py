"""The store under any order of requests: an oracle in plain dictionaries says what each must answer."""

import math

import pytest
import sqlalchemy as sql
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from shoestring.core.errors import ConfigError
from shoestring.tune.store import ENDED, Store, connect

LEASE, BUDGET = 10.0, 4


class Leases(RuleBasedStateMachine):
    """Workers that lease, stall, wake up late and repeat requests, and a clock that is moved by hand."""

    held = Bundle("held")
    seen = Bundle("seen")  # paused trials, as some worker saw them at some time

    def __init__(self):
        super().__init__()
        self.now = 100.0
        engine = connect("sqlite://")
        self.store = Store(engine, "s", clock=lambda: sql.literal(self.now))
        self.store.create({})
        self.added = 0
        self.states, self.epochs, self.expiry, self.rungs = {}, {}, {}, {}
        self.results, self.reports = {}, {}

    def holds(self, lease):
        return self.states[lease.trial] == "held" and self.epochs[lease.trial] == lease.epoch

    @rule(known=st.booleans())
    def add(self, known):
        trial = self.added if known and self.added else self.added + 1
        fresh = trial not in self.states and len(self.states) < BUDGET
        assert self.store.add(trial, trial - 1, {"x": trial}, BUDGET) == fresh
        if fresh:
            self.added = trial
            self.states[trial], self.epochs[trial], self.expiry[trial], self.rungs[trial] = "ready", 0, 0.0, 0

    @rule(target=held, owner=st.sampled_from("ab"))
    def take(self, owner):
        free = [
            trial
            for trial, state in self.states.items()
            if state == "ready" or (state == "held" and self.expiry[trial] < self.now)
        ]
        lease = self.store.take(owner, LEASE)
        if not free:
            assert lease is None
            return multiple()
        assert lease.trial == min(free)
        return self.begin(lease)

    def begin(self, lease):
        trial = lease.trial
        assert lease.epoch == self.epochs[trial] + 1
        self.states[trial], self.epochs[trial], self.expiry[trial] = "held", lease.epoch, self.now + LEASE
        return lease

    @rule(target=held, stalled=held)
    def stall(self, stalled):
        """The holder falls silent past its lease; whoever asks first has the trial, and the stalled one wakes up."""
        if not self.holds(stalled):
            return multiple()
        self.now += LEASE + 1
        taken = []
        while (lease := self.store.take("d", LEASE)) is not None:
            taken.append(self.begin(lease))
        assert stalled.trial in {lease.trial for lease in taken}
        assert not self.store.renew(stalled, LEASE, step=9, reports={9: 9.0})
        assert not self.store.give_back(stalled)
        assert not self.store.finish(stalled, "done", -1.0)
        return multiple(*taken)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(lease=held, step=st.integers(1, 3), value=st.sampled_from([1.0, math.inf, math.nan]))
    def renew(self, lease, step, value):
        holds = self.holds(lease)
        assert self.store.renew(lease, LEASE, step=step, reports={step: value}) == holds
        if holds:
            self.expiry[lease.trial] = self.now + LEASE
            self.reports.setdefault((lease.trial, step), value)

    @rule(lease=held, state=st.sampled_from(["ready", "paused"]))
    def give_back(self, lease, state):
        holds = self.holds(lease)
        assert self.store.give_back(lease, state=state) == holds
        if holds:
            self.states[lease.trial] = state

    @rule(lease=held, state=st.sampled_from(ENDED))
    def finish(self, lease, state):
        holds, mine = self.holds(lease), self.results.get(lease.trial, (None,))[0] == lease.epoch
        value = float(lease.epoch) + len(self.results) / 100
        assert self.store.finish(lease, state, value) == (holds or mine)
        if holds:
            self.states[lease.trial] = state
            self.results[lease.trial] = (lease.epoch, value)

    @rule(target=held, number=st.integers(0, BUDGET - 1), stale=st.booleans())
    def promote(self, number, stale):
        trials = self.store.trials()
        if number >= len(trials) or trials[number].state != "paused":
            return multiple()
        seen = trials[number]
        lease = self.begin(self.store.promote(seen, "c", LEASE))
        self.rungs[lease.trial] += 1
        if stale:  # a second worker that saw the same
            assert self.store.promote(seen, "d", LEASE) is None
        return lease

    @rule(target=seen, number=st.integers(0, BUDGET - 1))
    def look(self, number):
        trials = self.store.trials()
        return trials[number] if number < len(trials) and trials[number].state == "paused" else multiple()

    @rule(target=held, seen=seen)
    def promote_late(self, seen):
        """A worker promotes what it saw long ago; in the meantime the trial may have run and paused again."""
        as_seen = self.states[seen.trial] == "paused" and self.epochs[seen.trial] == seen.epoch
        lease = self.store.promote(seen, "e", LEASE)
        assert (lease is not None) == as_seen
        if lease is None:
            return multiple()
        self.rungs[lease.trial] += 1
        return self.begin(lease)

    @rule(number=st.integers(0, BUDGET - 1))
    def prune(self, number):
        trials = self.store.trials()
        if number < len(trials):
            paused = trials[number].state == "paused"
            assert self.store.prune(trials[number]) == paused
            if paused:
                self.states[trials[number].trial] = "pruned"

    @invariant()
    def agrees(self):
        trials = self.store.trials()
        shown = {trial.trial: (trial.state, trial.epoch, trial.rung) for trial in trials}
        assert shown == {each: (self.states[each], self.epochs[each], self.rungs[each]) for each in self.states}
        for trial in trials:
            assert trial.value == self.results.get(trial.trial, (0, None))[1]
            expected = {step: value for (of, step), value in self.reports.items() if of == trial.trial}
            assert repr(self.store.reports(trial.trial)) == repr(dict(sorted(expected.items())))


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=25, stateful_step_count=25)


def test_a_trial_paused_again_is_not_promoted_by_who_saw_it_before(tmp_path):
    """Its state is as it was seen, its epoch is not."""
    store = store_at(tmp_path / "a.db")
    store.create({})
    store.add(1, 0, {"x": 1}, BUDGET)
    store.give_back(store.take("a", LEASE), state="paused")
    (seen,) = store.trials()
    store.give_back(store.promote(seen, "b", LEASE), state="paused")
    assert store.promote(seen, "c", LEASE) is None
    (trial,) = store.trials()
    assert (trial.epoch, trial.rung) == (2, 1)


def test_a_trial_taken_between_reading_and_writing_is_not_taken_twice(tmp_path):
    """On a connection that locks nothing, another worker takes the expired trial right after this one has seen it."""
    other = store_at(tmp_path / "a.db")
    other.create({})
    other.add(1, 0, {"x": 1}, BUDGET)
    other.take("a", -1.0)
    engine = sql.create_engine(f"sqlite:///{tmp_path / 'a.db'}", isolation_level="AUTOCOMMIT")
    taken = []

    def between(connection, cursor, statement, *_):
        if statement.startswith("SELECT") and not taken:
            taken.append(other.take("b", -1.0))  # it expires at once: state and expiry are as before

    sql.event.listen(engine, "after_cursor_execute", between)
    assert Store(engine, "s").take("c", LEASE) is None
    (trial,) = other.trials()
    assert taken[0].epoch == trial.epoch == 2 and trial.owner == "b"


def store_at(path, name="s"):
    return Store(connect(f"sqlite:///{path}"), name)


def test_a_trial_given_up_before_it_was_added_stays_so(tmp_path):
    store = store_at(tmp_path / "a.db")
    store.create({})
    store.abandon(1, 0)
    assert not store.add(1, 0, {"x": 1}, budget=1)
    assert store.add(2, 1, {"x": 1}, budget=1), "what was given up takes nothing of the budget"
    store.abandon(2, 1)
    assert [trial.state for trial in store.trials()] == ["ready"]


def test_another_study_or_version_is_refused(tmp_path):
    store = store_at(tmp_path / "a.db")
    store.create({"a": 1})
    store.create({"a": 1})
    with pytest.raises(ConfigError, match="already has a study `s`"):
        store.create({"a": 2})
    with pytest.raises(ConfigError, match="holds no study `t`"):
        store_at(tmp_path / "a.db", "t").document()
    with store.engine.begin() as connection:
        connection.execute(sql.text("UPDATE shoestring_studies SET version = 99"))
    with pytest.raises(ConfigError, match="has version 99"):
        store.document()


def test_a_store_that_cannot_be_used_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot use the store `sqlite.*unable to open"):
        store_at(tmp_path / "missing" / "a.db").create({})
    with pytest.raises(ConfigError, match=r"`tune\.store`: cannot use"):
        connect("no url")
    (tmp_path / "text.db").write_text("this is no database" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        store_at(tmp_path / "text.db").create({})
