"""The record that a tenant writes to its file. Files may belong to other users, so parsing checks all values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from shoestring.core.leases import Priority
from shoestring.memory.broker.arbitration import Lease

LONGEST = 1 << 16  # maximum bytes of a record
_NAME = 80  # maximum number of characters of a name
_LEAST_SHARE, _LARGEST_SHARE = 1e-3, 1e3
_MOST_BYTES = 1 << 56


@dataclass(frozen=True)
class TenantRecord:
    """The memory that a tenant uses, leases and requests."""

    tenant: str
    """Name of the tenant, shown to users."""
    share: float = 1.0
    """Weight of the tenant among tenants with leases of the same priority."""
    group: str = ""
    """Path of the tenant's cgroup, shown to users."""
    bounds: frozenset[str] = frozenset({"host"})
    """Keys of the limits on the tenant's memory."""
    working: int = 0
    """Recent peak of the process's resident bytes, excluding leases."""
    resident: int = 0
    """Resident bytes of the process when the record was written; for readers that cannot measure them."""
    elsewhere: int = 0
    """Bytes of leases that are in memory but not resident in the process: files that the process has not mapped yet."""
    leases: Mapping[str, Lease] = field(default_factory=dict)
    """Leases that the tenant holds, by name."""
    wants: Mapping[str, Lease] = field(default_factory=dict)
    """Pending requests of the tenant, by name of the lease."""

    @cached_property
    def expected(self) -> int:
        """Resident bytes that the process is expected to reach: its recent peak plus its leases, without
        `elsewhere`."""
        return self.working + sum(lease.nbytes for lease in self.leases.values()) - self.elsewhere

    def encoded(self) -> bytes:
        """Encode the record as JSON."""
        content = {column.name: getattr(self, column.name) for column in fields(self)} | {"bounds": sorted(self.bounds)}
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, data: bytes) -> TenantRecord:
        """Parse the content of a file.

        Raises:
            ValueError: the content is not a tenant's record.
        """
        try:
            content = json.loads(data)
            return cls(
                tenant=_name(content["tenant"]),
                share=min(max(_number(content["share"]), _LEAST_SHARE), _LARGEST_SHARE),
                group=_name(content["group"]),
                bounds=frozenset(_name(key) for key in content["bounds"][:16]),
                working=_nbytes(content["working"]),
                resident=_nbytes(content["resident"]),
                elsewhere=_nbytes(content["elsewhere"]),
                leases={_name(name): _lease(lease) for name, lease in content["leases"].items()},
                wants={_name(name): _lease(want) for name, want in content["wants"].items()},
            )
        except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"not a tenant's record: {error}") from error


def _name(value: Any) -> str:
    """Cut a name to `_NAME` characters and replace control characters, which could move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:_NAME])


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a field is not a valid number")
    return float(value)


def _nbytes(value: Any) -> int:
    return min(max(int(_number(value)), 0), _MOST_BYTES)


def _lease(value: Any) -> Lease:
    nbytes, priority, at = value
    return Lease(_nbytes(nbytes), Priority(priority), _number(at))
