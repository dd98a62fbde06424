"""Who gets host memory and who gives it back: a function of what all tenants say of themselves, and of nothing else.

Every tenant computes it from the same records, so no message is sent: a tenant that needs memory says so in its own
record, and the others read there what they have to give back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoestring.core.leases import Priority


class Lease(NamedTuple):
    """What a tenant holds, or wants in addition to what it holds."""

    nbytes: int
    priority: Priority
    at: float
    """When it was taken or asked for, in seconds of the host's monotonic clock."""


@dataclass(frozen=True)
class Tenant:
    """One process, as the others see it."""

    key: str
    user: int = 0
    share: float = 1.0
    """Weight of its share among tenants of one priority."""
    bounds: frozenset[str] = frozenset({"host"})
    """Keys of what bounds its memory: its host and its cgroups."""
    leases: Mapping[str, Lease] = field(default_factory=dict)
    wants: Mapping[str, Lease] = field(default_factory=dict)
    """What it waits for, beyond its leases, by name of the lease."""

    def holds(self, priority: Priority) -> int:
        """Bytes of its leases of one priority."""
        return sum(lease.nbytes for lease in self.leases.values() if lease.priority is priority)


class Holding(NamedTuple):
    """A lease, or the wish for one, with the tenant whose it is."""

    tenant: Tenant
    name: str
    lease: Lease


@dataclass(frozen=True)
class Tenants:
    """All tenants, and the bytes that each bound has left beyond its reserve and all leases; negative if overdrawn."""

    tenants: Sequence[Tenant]
    room: Mapping[str, int]
    totals: Mapping[str, int] = field(default_factory=dict)
    """Size of each bound, of which users have equal parts; without it every user may call everything back."""

    def inside(self, bound: str) -> list[Tenant]:
        return [tenant for tenant in self.tenants if bound in tenant.bounds]

    def leases(self) -> list[Holding]:
        return [Holding(tenant, *item) for tenant in self.tenants for item in tenant.leases.items()]

    def wants(self) -> list[Holding]:
        """In the order in which they are served."""
        wants = [Holding(tenant, *item) for tenant in self.tenants for item in tenant.wants.items()]
        return sorted(wants, key=lambda want: (want.lease.priority, want.lease.at, want.tenant.key, want.name))


def must_end(host: Tenants, key: str, name: str) -> list[Holding] | None:
    """The leases that must end before tenant `key` can have what it wants as `name`, after all that is served before.

    None where it cannot have it; and for what is REQUIRED, which it has in any case, all that can end.
    """
    room = dict(host.room)
    for want in host.wants():
        victims = _victims(host, room, want, ())
        if (want.tenant.key, want.name) == (key, name):
            return victims
        if victims is not None:
            for bound in want.tenant.bounds & room.keys():
                room[bound] -= want.lease.nbytes
    raise KeyError(name)


def called_back(host: Tenants) -> set[tuple[str, str]]:
    """The (tenant's key, lease's name) of leases that must be given back now, as few as will do.

    What is wanted is served in the order of its priority, then of its time. Leases of a less urgent priority give way
    first, the last priority first and the youngest lease first; then those of the same priority whose tenant has more
    than its share, for one that stays within its own. REQUIRED never gives way.
    """
    room, called = dict(host.room), list[Holding]()
    overdrawn = [
        Holding(Tenant("", user=-1, bounds=frozenset({bound})), "", Lease(0, Priority.REQUIRED, 0.0))
        for bound, left in room.items()
        if left < 0
    ]
    for want in [*overdrawn, *host.wants()]:
        victims = _victims(host, room, want, called)
        if victims is not None:
            called += victims
            for bound in want.tenant.bounds & room.keys():
                room[bound] -= want.lease.nbytes
            for bound in room:
                room[bound] += _nbytes_in(bound, victims)
    return {(holding.tenant.key, holding.name) for holding in called}


def _nbytes_in(bound: str, holdings: Collection[Holding]) -> int:
    return sum(holding.lease.nbytes for holding in holdings if bound in holding.tenant.bounds)


def _short(room: Mapping[str, int], want: Holding) -> dict[str, int]:
    """Bytes that are missing in each bound where some are."""
    missing = {bound: want.lease.nbytes - room[bound] for bound in want.tenant.bounds & room.keys()}
    return {bound: nbytes for bound, nbytes in missing.items() if nbytes > 0}


def _victims(
    host: Tenants, room: Mapping[str, int], want: Holding, called: Collection[Holding]
) -> list[Holding] | None:
    """The leases beside those called already that must end so that `want` fits; None where that cannot be reached.

    What is REQUIRED is granted in any case: for it, as much as there is.
    """
    short = _short(room, want)
    chosen = list[Holding]()
    for lease in _candidates(host, room, want) if short else ():
        left = [bound for bound, nbytes in short.items() if nbytes > _nbytes_in(bound, chosen)]
        if not left:
            break
        if lease not in called and lease.tenant.bounds & set(left) and _may_call(host, want, lease, left, chosen):
            chosen.append(lease)
    enough = all(_nbytes_in(bound, chosen) >= nbytes for bound, nbytes in short.items())
    if not enough:
        return chosen if want.lease.priority is Priority.REQUIRED else None
    for lease in reversed(chosen):  # a later, larger one may have made others unnecessary
        rest = [other for other in chosen if other is not lease]
        if all(_nbytes_in(bound, rest) >= nbytes for bound, nbytes in short.items()):
            chosen = rest
    return chosen


def _candidates(host: Tenants, room: Mapping[str, int], want: Holding) -> list[Holding]:
    """What may be called back for `want`, in the order in which it is."""
    priority = want.lease.priority
    less_urgent = [holding for holding in host.leases() if holding.lease.priority > priority]
    less_urgent.sort(key=lambda it: (-it.lease.priority, -it.lease.at, it.tenant.key, it.name))
    if priority is Priority.REQUIRED or not _within_share(host, room, want.tenant, priority, want.lease.nbytes):
        return less_urgent
    equal = [
        holding
        for holding in host.leases()
        if holding.lease.priority is priority
        and holding.tenant.key != want.tenant.key
        and not _within_share(host, room, holding.tenant, priority, 0)
    ]
    equal.sort(key=lambda it: (-it.tenant.holds(priority) / it.tenant.share, it.lease.nbytes, it.tenant.key, it.name))
    return less_urgent + equal


def _within_share(host: Tenants, room: Mapping[str, int], tenant: Tenant, priority: Priority, more: int) -> bool:
    """Whether a tenant with `more` bytes has at most its share of what a priority can have, in each of its bounds.

    All that hold or want something of that priority have shares, by their weights.
    """
    for bound in tenant.bounds & room.keys():
        inside = host.inside(bound)
        taken = sum(it.nbytes for each in inside for it in each.leases.values() if it.priority >= priority)
        weights = sum(
            each.share
            for each in inside
            if each.key == tenant.key
            or any(it.priority is priority for it in (*each.leases.values(), *each.wants.values()))
        )
        if tenant.holds(priority) + more > (room[bound] + taken) * tenant.share / weights:
            return False
    return True


def _may_call(
    host: Tenants, want: Holding, lease: Holding, bounds: Collection[str], chosen: Collection[Holding]
) -> bool:
    """Whether a lease may be called back: another user's, only what exceeds that user's equal part of the host."""
    user = lease.tenant.user
    if want.tenant.user in (user, -1):
        return True
    for bound in bounds:
        inside = host.inside(bound)
        users = {each.user for each in inside} | {want.tenant.user}
        held = sum(it.nbytes for each in inside if each.user == user for it in each.leases.values())
        held -= _nbytes_in(bound, [holding for holding in chosen if holding.tenant.user == user])
        if bound in host.totals and held <= host.totals[bound] / len(users):
            return False
    return True
