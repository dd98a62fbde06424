"""A tenant of a host's memory: a `HostMemory` whose leases are arbitrated among all processes of the host."""

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

from shoestring import figures
from shoestring.core.leases import HostMemory, Priority
from shoestring.memory.broker.arbitration import Lease, Tenant, Tenants, called_back, must_end
from shoestring.memory.broker.ledger import Ledger, Seen, close_ledger, open_ledger, resident
from shoestring.memory.broker.records import TenantRecord
from shoestring.planning.system import Bound, memory_bounds

log = logging.getLogger("shoestring")

LASTS = 30.0  # seconds for which a refused request stays in the record, so that other tenants give memory back for it
_TICK = 0.05  # seconds between two checks for calls of `ring`
_SURVEY = 1.0  # maximum seconds between two surveys of the host's memory, if no tenant calls `ring`
_WINDOW = 60.0  # minimum seconds for which a peak of resident memory counts
PATIENCE = 2.0  # seconds to wait for the ledger's lock
_POLL = 0.005  # seconds between two checks whether enough memory was given back
_PRESSED = 10.0  # percentage of time stalled on memory (PSI) above which no memory counts as free
_NOTABLE = 1 << 20  # maximum error, in bytes, of a written record before it is rewritten


@dataclass(frozen=True)
class Terms:
    """The folder of the records, and a tenant's settings; `memory.Broker` describes the fields."""

    folder: Path
    shared: bool = False
    tenant: str = ""
    share: float = 1.0
    reserve: float = 0.1
    wait: float = 5.0


@dataclass(frozen=True)
class Sights:
    """Functions through which a tenant observes the host; tests replace these functions to simulate a host."""

    bounds: Callable[[], Iterable[Bound]] = memory_bounds
    resident: Callable[[Seen], int | None] = attrgetter("resident")
    clock: Callable[[], float] = time.monotonic


def survey(seen: Iterable[Seen], bounds: Iterable[Bound], terms: Terms, sights: Sights, *, pressure: bool) -> Tenants:
    """Determine all tenants and the memory left to lease, as this process sees them.

    The memory left is the free memory minus the reserve and minus memory that tenants have claimed but not touched yet.
    A false record of memory in use therefore gains a tenant nothing. Claims of another user's tenant, which may be
    false, count only up to an equal part of the memory per user.

    Args:
        pressure: whether to count no memory as free while memory is scarce and processes are stalled on memory.
    """
    known = [(tenant, tenant.user, tenant.record) for tenant in seen if tenant.record is not None]
    room, totals = dict[str, int](), dict[str, int]()
    for bound in bounds:
        with suppress(OSError, ValueError, KeyError):
            free, reserve = bound.free(), int(terms.reserve * bound.total)
            if pressure and free < 2 * reserve and bound.pressure() > _PRESSED:
                free = 0
            room[bound.key], totals[bound.key] = free - reserve, bound.total
    users = {user for _, user, _ in known}
    now, user, tenants = sights.clock(), os.geteuid(), []
    for tenant, owner, record in known:
        in_memory = sights.resident(tenant)
        untouched = record.expected - (record.resident if in_memory is None else in_memory)
        for bound in record.bounds & room.keys():
            room[bound] -= max(0, untouched if owner == user else min(untouched, totals[bound] // len(users)))
        wants = {name: want for name, want in record.wants.items() if now - LASTS < want.at <= now}
        tenants.append(Tenant(tenant.key, owner, record.share, record.bounds, record.leases, wants))
    return Tenants(tenants, room, totals)


@dataclass(eq=False)
class BrokeredMemory(HostMemory):
    """Leases that are arbitrated among all processes of a host, from `join` to `leave`; otherwise a plain `HostMemory`.

    A REQUIRED lease is always granted, after other tenants have had time to give back less urgent leases. Any other
    lease is granted only if it fits. A refused request also calls leases back, so that a later attempt may succeed.
    When a lease is called back, its name appears in `called_back`, and the callback registered with `when_called` runs.
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
            watch: whether to start a thread that calls `look` regularly; if false, the caller must call `look`.

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
        """Give all leases back, and stop being a tenant."""
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

    # -- overrides of HostMemory -------------------------------------------------------------------------------------

    def settle(self, free: float, ranks: int = 1, there: float = 0) -> None:
        """See `HostMemory`. A tenant has no budget, which would depend on other processes; `there` is not counted
        twice."""
        if self._ledger is None:
            super().settle(free, ranks, there)
        else:
            self._there, self._unwritten = (int(there / ranks), resident()), True
            self.look()

    def take(self, name: str, nbytes: int, priority: Priority = Priority.REQUIRED) -> bool:
        """See `HostMemory`; a REQUIRED lease waits up to `terms.wait` seconds for other tenants to give memory back."""
        if self._in_child() or self._ledger is None:
            return super().take(name, nbytes, priority)
        former = self._record.leases.get(name)
        if not self._request(self._ledger, name, nbytes, priority):
            return False
        if super().take(name, nbytes, priority):
            return True
        self._record_lease(name, former)
        return False

    def turn(self, priority: Priority, patience: float = 0.1) -> AbstractContextManager[object]:
        """See `HostMemory`; copies are ordered among all processes of the host."""
        turns = None if self._ledger is None or self._in_child() else self._ledger.turns
        return nullcontext() if turns is None else turns.turn(priority, patience)

    def give(self, name: str) -> None:
        super().give(name)
        self.called_back.discard(name)
        if not self._in_child() and name in {**self._record.leases, **self._record.wants}:
            self._record_lease(name, None)

    def described(self, but: str = "") -> str:
        if self._ledger is None or not self._bounds:
            return super().described(but)
        with suppress(OSError), self._ledger.locked(PATIENCE):
            left = min(self._survey(self._ledger, self._record).room.values(), default=0)
            return f"{figures.memory(max(left, 0))} that other processes have left {self.taken(but)}"
        return super().described(but)

    # -- calling back ------------------------------------------------------------------------------------------------

    def when_called(self, name: str, callback: Callable[[], None]) -> None:
        """Register a callback that a thread runs if lease `name` is called back; it must free the memory and `give`."""
        self._callbacks[name] = callback

    def look(self) -> None:
        """Update this tenant's record, and find its leases that are called back; cheap if nothing has changed."""
        ledger = self._ledger
        if ledger is None or self._in_child():
            return
        now = self.sights.clock()
        record = self._measured(now)
        rung, due = ledger.rung(), now - self._surveyed >= _SURVEY
        changed = self._unwritten or abs(record.expected - self._record.expected) > _NOTABLE
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
                log.exception("memory.broker: a lease that was called back could not be given back")

    # -- this tenant's record ----------------------------------------------------------------------------------------

    def _request(self, ledger: Ledger, name: str, nbytes: int, priority: Priority) -> bool:
        """Write a lease into this tenant's record if the lease fits or is REQUIRED; return whether it is granted."""
        held = self._record.leases.get(name, Lease(0, priority, 0.0))
        more, began = nbytes - held.nbytes, self.sights.clock()
        if more == 0 and held.priority is priority and name in self._record.leases:
            return priority is Priority.REQUIRED or name not in self.called_back
        lease, firm = Lease(nbytes, priority, held.at or began), priority is Priority.REQUIRED
        record = self._measured(began)
        more -= max(0, record.resident - record.expected)  # resident bytes beyond the record's claim need no room
        if more <= 0:
            self.called_back.discard(name)
            self._record_lease(name, lease)
            return True
        while True:
            try:
                with ledger.locked(PATIENCE):
                    former = self._record.wants.get(name)
                    since = former.at if former and former.at > began - LASTS else began
                    wants = {**self._record.wants, name: Lease(more, priority, since)}
                    asking = replace(self._record, wants=wants)
                    host = self._survey(ledger, asking)
                    victims = must_end(host, self._key, name)
                    ending = {(holding.tenant.key, holding.name) for holding in victims or ()}
                    granted = victims == []
                    if firm and not granted:
                        if self.sights.clock() - began >= self.terms.wait:
                            self._in_vain = ending
                        # Wait for other tenants, and for this tenant's leases that have a callback, because the
                        # watching thread gives them back. Do not wait for leases without a callback, because their
                        # threads may be waiting for this call.
                        granted = not any(
                            key != self._key or other in self._callbacks for key, other in ending - self._in_vain
                        )
                    if granted:
                        self._write(ledger, _with(self._record, name, lease))
                    elif ending and asking != self._record:
                        self._write(ledger, asking)
                    if ending - self._asked:  # other tenants already know about earlier calls
                        ledger.ring()
                    self._asked = ending
            except OSError as error:
                self._warn(error)
                if firm:
                    self._record_lease(name, lease)
                return firm
            if granted or not firm:
                return granted
            time.sleep(_POLL)

    def _measured(self, now: float) -> TenantRecord:
        """This tenant's record, updated with the current resident bytes of its process and their recent peak."""
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
        seen = [replace(tenant, record=record) if tenant.key == self._key else tenant for tenant in ledger.scan()]
        return survey(seen, self._bounds, self.terms, self.sights, pressure=pressure)

    def _record_lease(self, name: str, lease: Lease | None) -> None:
        """Write a lease to this tenant's record, or remove it (None); if writing fails, `look` tries again later."""
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
        except FileNotFoundError:  # another program has removed the file
            ledger.leave(self._key)
            self._key = ledger.join(record)
        self._unwritten = False

    def _see_bounds(self) -> None:
        """Find the limits on memory, without cgroup limits that exceed the size of the host's memory."""
        bounds = list(self.sights.bounds())
        host = next((bound.total for bound in bounds if bound.key == "host"), 1 << 62)
        self._bounds = [bound for bound in bounds if bound.key == "host" or bound.total < host]

    def _in_child(self) -> bool:
        """Whether this process is not a tenant, because it has not joined or is a forked child."""
        if self._ledger is not None and not self._ledger.stands:
            self._ledger, self._watcher = None, None
        return self._ledger is None

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("memory.broker: other processes do not see the memory that this process takes: %s", error)


def _with(record: TenantRecord, name: str, lease: Lease | None) -> TenantRecord:
    """A copy of a record with one lease replaced, or removed (None), and without a request for this lease."""
    leases = {other: held for other, held in record.leases.items() if other != name}
    wants = {other: want for other, want in record.wants.items() if other != name}
    return replace(record, leases=leases | ({} if lease is None else {name: lease}), wants=wants)
