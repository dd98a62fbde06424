"""A tenant of a host's memory: `HostMemory` that asks the host as well, and says what has to be given back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from shoestring.core.leases import HostMemory, Priority
from shoestring.memory.broker.arbitration import Lease, Tenant, Tenants, called_back, must_end
from shoestring.memory.broker.ledger import Ledger, Seen, close_ledger, open_ledger, resident
from shoestring.memory.broker.records import TenantRecord
from shoestring.planning.system import Bound, memory_bounds

log = logging.getLogger("shoestring")

LASTS = 30.0  # seconds for which what was refused is called back for, without being asked for again
_TICK = 0.05  # seconds between two looks at the bell
_SURVEY = 1.0  # seconds between two looks at everything
_WINDOW = 60.0  # seconds for which a peak is remembered, at least
PATIENCE = 2.0  # seconds for the ledger's lock
_POLL = 0.005  # seconds between two looks at whether enough was given back
_PRESSED = 10.0  # percent of time in which something waited for memory
_NOTABLE = 1 << 20  # bytes by which what a record says may be out of date


@dataclass(frozen=True)
class Terms:
    """Where a tenant meets the others, and how it shares with them; see `memory.Broker` for the fields."""

    folder: Path
    shared: bool = False
    tenant: str = ""
    share: float = 1.0
    reserve: float = 0.1
    wait: float = 5.0


@dataclass(frozen=True)
class Sights:
    """What a tenant sees of its host; tests put another host in its place."""

    bounds: Callable[[], Iterable[Bound]] = memory_bounds
    resident: Callable[[Seen], int | None] = attrgetter("resident")
    clock: Callable[[], float] = time.monotonic


def survey(seen: Iterable[Seen], bounds: Iterable[Bound], terms: Terms, sights: Sights, *, pressure: bool) -> Tenants:
    """All tenants and what is left for them, as this process sees it.

    A bound has left what is free now, less the reserve and what tenants have claimed and not touched yet. So a lie
    about what is in use gains nothing, and one about claims counts up to an equal part for each user.

    Args:
        pressure: count nothing as free where processes wait for memory that has become scarce.
    """
    found = [(each, each.user, each.record) for each in seen if each.record is not None]
    room, totals = dict[str, int](), dict[str, int]()
    for bound in bounds:
        with suppress(OSError, ValueError, KeyError):
            free, reserve = bound.free(), int(terms.reserve * bound.total)
            if pressure and free < 2 * reserve and bound.pressure() > _PRESSED:
                free = 0
            room[bound.key], totals[bound.key] = free - reserve, bound.total
    users = {user for _, user, _ in found}
    now, user, tenants = sights.clock(), os.geteuid(), []
    for each, owner, record in found:
        in_memory = sights.resident(each)
        untouched = record.unused - (record.resident if in_memory is None else in_memory)
        for bound in record.bounds & room.keys():
            room[bound] -= max(0, untouched if owner == user else min(untouched, totals[bound] // len(users)))
        wants = {name: want for name, want in record.wants.items() if now - LASTS < want.at <= now}
        tenants.append(Tenant(each.key, owner, record.share, record.bounds, record.leases, wants))
    return Tenants(tenants, room, totals)


@dataclass(eq=False)
class BrokeredMemory(HostMemory):
    """Leases that all processes of a host agree on, while `join`ed; before and after, it is a plain `HostMemory`.

    What is REQUIRED is granted always, after others have been asked to give back what is less urgent and have been
    waited for. Everything else is granted if it fits, and a refusal asks the others as well, so that a later try may
    succeed. The owner of a lease finds its name in `called_back`, or hears of it from `when_called`.
    """

    terms: Terms = field(default_factory=lambda: Terms(Path("/dev/shm")))
    sights: Sights = field(default_factory=Sights)
    _ledger: Ledger | None = None
    _key: str = ""
    _record: TenantRecord = field(default_factory=lambda: TenantRecord(""))
    _bounds: list[Bound] = field(default_factory=list)
    _callbacks: dict[str, Callable[[], None]] = field(default_factory=dict)
    _peaks: list[tuple[float, int]] = field(default_factory=list)
    _there: tuple[int, int] = (0, 0)
    _asked: set[tuple[str, str]] = field(default_factory=set)
    _in_vain: set[tuple[str, str]] = field(default_factory=set)
    _unwritten: bool = False
    _rung: int = -1
    _surveyed: float = -1e9
    _warned: bool = False
    _stopped: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None

    # -- joining -----------------------------------------------------------------------------------------------------

    def join(self, *, watch: bool = True) -> None:
        """Become a tenant of this host.

        Args:
            watch: look in a thread for what is called back; without it, `look` does that.

        Raises:
            ShoestringError: the folder cannot be used.
        """
        ledger = open_ledger(self.terms.folder, shared=self.terms.shared)
        try:
            self._see_bounds()
            leases = {name: Lease(*lease, self.sights.clock()) for name, lease in self.leases.items()}
            bounds = frozenset(bound.key for bound in self._bounds)
            group = next((str(bound.folder) for bound in self._bounds if bound.key != "host"), "")
            self._record = TenantRecord(self.terms.tenant, self.terms.share, group, bounds, leases=leases)
            with ledger.locked(PATIENCE):
                self._key = ledger.join(self._record)
        except BaseException:
            close_ledger(ledger)
            raise
        self._ledger = ledger
        self.look()
        if watch:
            self._stopped.clear()
            self._watcher = threading.Thread(target=self._watch, name="host memory", daemon=True)
            self._watcher.start()

    def leave(self) -> None:
        """Give everything back and be no tenant any more."""
        if self._ledger is None:
            return
        self._stopped.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        ledger, self._ledger, self._watcher = self._ledger, None, None
        with suppress(OSError, KeyError), ledger.locked(PATIENCE):
            ledger.leave(self._key)
        close_ledger(ledger)
        self.called_back.clear()

    # -- what core's leases do ---------------------------------------------------------------------------------------

    def settle(self, free: float, ranks: int = 1, there: float = 0) -> None:
        """Fix no budget: what there is depends on what others take. What is `there` is not counted twice."""
        if self._ledger is None:
            super().settle(free, ranks, there)
        else:
            self._there, self._unwritten = (int(there / ranks), resident()), True
            self.look()

    def take(self, name: str, nbytes: int, priority: Priority = Priority.REQUIRED) -> bool:
        """As `HostMemory.take`; what is REQUIRED may wait for `terms.wait` seconds until others have given back."""
        if self._in_child() or self._ledger is None:
            return super().take(name, nbytes, priority)
        former = self._record.leases.get(name)
        if not self._ask(self._ledger, name, nbytes, priority):
            return False
        if super().take(name, nbytes, priority):
            return True
        self._say(name, former)
        return False

    def turn(self, priority: Priority, patience: float = 0.1) -> AbstractContextManager[object]:
        """See `HostMemory`; the processes of a host wait for each other."""
        turns = None if self._ledger is None or self._in_child() else self._ledger.turns
        return nullcontext() if turns is None else turns.turn(priority, patience)

    def give(self, name: str) -> None:
        super().give(name)
        self.called_back.discard(name)
        if not self._in_child() and name in {**self._record.leases, **self._record.wants}:
            self._say(name, None)

    def described(self, but: str = "") -> str:
        _, _, taken = super().described(but).partition(" MB ")
        if self._ledger is None or not self._bounds:
            return super().described(but)
        with suppress(OSError), self._ledger.locked(PATIENCE):
            left = min(self._survey(self._ledger, self._record).room.values(), default=0)
            return f"{max(left, 0) / 1e6:.0f} MB that other processes have left {taken}"
        return super().described(but)

    # -- calls -------------------------------------------------------------------------------------------------------

    def when_called(self, name: str, callback: Callable[[], None]) -> None:
        """Let a thread call `callback` when the lease is called back; it frees the memory and ends with `give`."""
        self._callbacks[name] = callback

    def look(self) -> None:
        """Say what this process has in memory, and see what is called back; cheap if nothing has happened."""
        ledger = self._ledger
        if ledger is None or self._in_child():
            return
        now = self.sights.clock()
        record = self._measured(now)
        rung, due = ledger.rung(), now - self._surveyed >= _SURVEY
        changed = self._unwritten or abs(record.unused - self._record.unused) > _NOTABLE
        if rung == self._rung and not due and not changed:
            return
        self._rung, self._surveyed = rung, now
        if due:
            self._see_bounds()
        with ledger.locked(PATIENCE):
            record = self._measured(now)
            if any(want.at <= now - LASTS for want in record.wants.values()):
                wants = {name: want for name, want in record.wants.items() if want.at > now - LASTS}
                record = replace(record, wants=wants)
            self._write(ledger, record)
            called = called_back(self._survey(ledger, record, pressure=True))
        names = {name for key, name in called if key == self._key}
        self.called_back = names
        for name in sorted(names & self._callbacks.keys()):
            self._callbacks[name]()

    def _watch(self) -> None:
        while not self._stopped.wait(_TICK):
            try:
                self.look()
            except OSError as error:
                self._warn(error)
            except Exception:
                log.exception("memory.broker: a lease that was called back could not be given")

    # -- what is said of this tenant ---------------------------------------------------------------------------------

    def _ask(self, ledger: Ledger, name: str, nbytes: int, priority: Priority) -> bool:
        """Write a lease into this tenant's record if the host has it, or must have it."""
        held = self._record.leases.get(name, Lease(0, priority, 0.0))
        more, began = nbytes - held.nbytes, self.sights.clock()
        if more == 0 and held.priority is priority and name in self._record.leases:
            return priority is Priority.REQUIRED or name not in self.called_back
        lease, firm = Lease(nbytes, priority, held.at or began), priority is Priority.REQUIRED
        record = self._measured(began)
        more -= max(0, record.resident - record.unused)  # what is in memory already
        if more <= 0:
            self.called_back.discard(name)
            self._say(name, lease)
            return True
        while True:
            try:
                with ledger.locked(PATIENCE):
                    former = self._record.wants.get(name)
                    since = former.at if former and former.at > began - LASTS else began
                    wants = {**self._record.wants, name: Lease(more, priority, since)}
                    asking = replace(self._record, wants=wants)
                    host = self._survey(ledger, asking)
                    found = must_end(host, self._key, name)
                    ending = {(holding.tenant.key, holding.name) for holding in found or ()}
                    granted = found == [] or (firm and not self._worth_waiting(ending, began))
                    if granted:
                        self._write(ledger, _with(self._record, name, lease))
                    elif ending and asking != self._record:
                        self._write(ledger, asking)
                    if ending - self._asked:  # what was called back already will come
                        ledger.ring()
                    self._asked = ending
            except OSError as error:
                self._warn(error)
                if firm:
                    self._say(name, lease)
                return firm
            if granted or not firm:
                return granted
            time.sleep(_POLL)

    def _worth_waiting(self, ending: set[tuple[str, str]], began: float) -> bool:
        """Whether others will end leases, or a thread of this process: what its other threads hold comes later."""
        if self.sights.clock() - began >= self.terms.wait:
            self._in_vain = ending
        return any(key != self._key or name in self._callbacks for key, name in ending - self._in_vain)

    def _measured(self, now: float) -> TenantRecord:
        """This tenant's record with what its process has in memory now, and has had at its recent peak."""
        own = Seen(self._key, self._record, os.geteuid(), os.getpid(), resident())
        in_memory = self.sights.resident(own) or 0
        beside = max(0, in_memory - sum(lease.nbytes for lease in self._record.leases.values()))
        if not self._peaks or now - self._peaks[-1][0] > _WINDOW:
            self._peaks = [*self._peaks[-1:], (now, beside)]
        began, peak = self._peaks[-1]
        self._peaks[-1] = began, max(peak, beside)
        there, before = self._there
        elsewhere = max(0, there - max(0, in_memory - before))
        working = max(peak for _, peak in self._peaks)
        return replace(self._record, working=working, resident=in_memory, elsewhere=elsewhere)

    def _survey(self, ledger: Ledger, record: TenantRecord, *, pressure: bool = False) -> Tenants:
        seen = [replace(each, record=record) if each.key == self._key else each for each in ledger.scan()]
        return survey(seen, self._bounds, self.terms, self.sights, pressure=pressure)

    def _say(self, name: str, lease: Lease | None) -> None:
        """Write one lease of this tenant, or that it has ended; where that cannot be, the watching thread does it."""
        if self._ledger is not None:
            try:
                with self._ledger.locked(PATIENCE):
                    self._write(self._ledger, _with(self._record, name, lease))
            except OSError as error:
                self._warn(error)
                self._record, self._unwritten = _with(self._record, name, lease), True

    def _write(self, ledger: Ledger, record: TenantRecord) -> None:
        self._record, self._unwritten = record, True
        try:
            ledger.write(self._key, record)
        except FileNotFoundError:  # somebody has cleared the folder
            ledger.leave(self._key)
            self._key = ledger.join(record)
        self._unwritten = False

    def _see_bounds(self) -> None:
        """Look for limits that bind: a cgroup's above the size of the host is none."""
        found = list(self.sights.bounds())
        host = next((bound.total for bound in found if bound.key == "host"), 1 << 62)
        self._bounds = [bound for bound in found if bound.key == "host" or bound.total < host]

    def _in_child(self) -> bool:
        """Whether this is a forked child, which is no tenant: its leases are its own affair."""
        if self._ledger is not None and not self._ledger.stands:
            self._ledger, self._watcher = None, None
        return self._ledger is None

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("memory.broker: other processes do not see what this one takes: %s", error)


def _with(record: TenantRecord, name: str, lease: Lease | None) -> TenantRecord:
    """A record with `lease` in the place of what it says of one, its wish included."""
    leases = {other: kept for other, kept in record.leases.items() if other != name}
    wants = {other: want for other, want in record.wants.items() if other != name}
    return replace(record, leases=leases | ({} if lease is None else {name: lease}), wants=wants)
