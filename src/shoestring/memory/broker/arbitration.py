"""Decides which tenants of a host get memory and which leases are called back, by a pure function of all records.

Every tenant computes the same decision from the same records, so no messages are needed. A tenant that needs memory
writes a request into its own record, and the other tenants compute from this request which leases they must give back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoestring.core.leases import Priority


class Lease(NamedTuple):
    """An amount of memory that a tenant holds, or that it requests in addition to its leases."""

    nbytes: int
    priority: Priority
    at: float
    """Time at which the lease was taken or requested, in seconds of the host's monotonic clock."""


@dataclass(frozen=True)
class Tenant:
    """A process that leases host memory, as the other processes see it."""

    key: str
    user: int = 0
    share: float = 1.0
    """Weight of the tenant among tenants with leases of the same priority."""
    bounds: frozenset[str] = frozenset({"host"})
    """Keys of the limits on the tenant's memory: "host", and the keys of its cgroups."""
    leases: Mapping[str, Lease] = field(default_factory=dict)
    """Leases that the tenant holds, by name."""
    wants: Mapping[str, Lease] = field(default_factory=dict)
    """Pending requests of the tenant for memory in addition to its leases, by name of the lease."""

    def holds(self, priority: Priority) -> int:
        """Bytes of the tenant's leases of one priority."""
        return sum(lease.nbytes for lease in self.leases.values() if lease.priority is priority)


class Holding(NamedTuple):
    """A lease or a request for a lease, together with its tenant."""

    tenant: Tenant
    name: str
    lease: Lease


@dataclass(frozen=True)
class Tenants:
    """All tenants of a host, and the memory that is left to lease."""

    tenants: Sequence[Tenant]
    room: Mapping[str, int]
    """Bytes left to lease within each bound, after subtracting the reserve and all leases; negative if the bound is
    overdrawn."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Total bytes of each bound, of which every user is entitled to an equal part; if a bound is missing, leases of any
    user may be called back."""

    def inside(self, bound: str) -> list[Tenant]:
        return [tenant for tenant in self.tenants if bound in tenant.bounds]

    def leases(self) -> list[Holding]:
        return [Holding(tenant, *item) for tenant in self.tenants for item in tenant.leases.items()]

    def wants(self) -> list[Holding]:
        """All requests of all tenants, in the order in which they are served."""
        wants = [Holding(tenant, *item) for tenant in self.tenants for item in tenant.wants.items()]
        return sorted(wants, key=lambda want: (want.lease.priority, want.lease.at, want.tenant.key, want.name))


def must_end(host: Tenants, key: str, name: str) -> list[Holding] | None:
    """Find the leases that must end so that request `name` of tenant `key` fits after all earlier requests are served.

    Returns:
        The leases; None if the request cannot be granted; all leases that can end if a REQUIRED request does not fit.
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
    """Find the leases that must be given back now, as few as possible: (key of the tenant, name of the lease).

    Requests are served in order of priority, then of time. Leases that are less urgent than the request are called back
    first; among them, the least urgent priority and the youngest lease come first. Next come leases of the request's
    own priority from tenants that exceed their shares, if the requesting tenant stays within its share. REQUIRED leases
    are never called back.
    """
    room, called = dict(host.room), list[Holding]()
    # Overdrawn bounds come first: a REQUIRED request for 0 bytes without a tenant stands for each overdrawn bound.
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
    """Total bytes of the holdings whose tenants are inside a bound."""
    return sum(holding.lease.nbytes for holding in holdings if bound in holding.tenant.bounds)


def _victims(
    host: Tenants, room: Mapping[str, int], want: Holding, called: Collection[Holding]
) -> list[Holding] | None:
    """Find the leases that must end, in addition to the leases in `called`, so that `want` fits; None if it cannot fit.

    A REQUIRED request is always granted: if it cannot fit, all leases that can end are returned.
    """
    missing = {bound: want.lease.nbytes - room[bound] for bound in want.tenant.bounds & room.keys()}
    missing = {bound: nbytes for bound, nbytes in missing.items() if nbytes > 0}
    chosen = list[Holding]()
    for lease in _candidates(host, room, want) if missing else ():
        left = [bound for bound, nbytes in missing.items() if nbytes > _nbytes_in(bound, chosen)]
        if not left:
            break
        if lease not in called and lease.tenant.bounds & set(left) and _may_call(host, want, lease, left, chosen):
            chosen.append(lease)
    enough = all(_nbytes_in(bound, chosen) >= nbytes for bound, nbytes in missing.items())
    if not enough:
        return chosen if want.lease.priority is Priority.REQUIRED else None
    for lease in reversed(chosen):  # a large lease chosen later may make smaller leases unnecessary
        rest = [holding for holding in chosen if holding is not lease]
        if all(_nbytes_in(bound, rest) >= nbytes for bound, nbytes in missing.items()):
            chosen = rest
    return chosen


def _candidates(host: Tenants, room: Mapping[str, int], want: Holding) -> list[Holding]:
    """The leases that may be called back for `want`, in the order in which to call them back."""
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
    """Whether a tenant with `more` additional bytes stays within its share of the memory for a priority, in all bounds.

    The shares of all tenants that hold or request memory of this priority are in proportion to their weights.
    """
    for bound in tenant.bounds & room.keys():
        inside = host.inside(bound)
        taken = sum(it.nbytes for member in inside for it in member.leases.values() if it.priority >= priority)
        weights = sum(
            member.share
            for member in inside
            if member.key == tenant.key
            or any(it.priority is priority for it in (*member.leases.values(), *member.wants.values()))
        )
        if tenant.holds(priority) + more > (room[bound] + taken) * tenant.share / weights:
            return False
    return True


def _may_call(
    host: Tenants, want: Holding, lease: Holding, bounds: Collection[str], chosen: Collection[Holding]
) -> bool:
    """Whether a lease may be called back: always from the requesting user, otherwise if its user exceeds an equal
    part."""
    user = lease.tenant.user
    if want.tenant.user in (user, -1):
        return True
    for bound in bounds:
        inside = host.inside(bound)
        users = {member.user for member in inside} | {want.tenant.user}
        held = sum(it.nbytes for member in inside if member.user == user for it in member.leases.values())
        held -= _nbytes_in(bound, [holding for holding in chosen if holding.tenant.user == user])
        if bound in host.totals and held <= host.totals[bound] / len(users):
            return False
    return True
