"""What a tenant says of itself in its file: read from other users, too, and therefore bounded and never trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from shoestring.core.leases import Priority
from shoestring.memory.broker.arbitration import Lease

LONGEST = 1 << 16  # bytes of a record
_NAME = 80  # characters of a name that are read
_LEAST_SHARE, _LARGEST_SHARE = 1e-3, 1e3
_MOST_BYTES = 1 << 56


@dataclass(frozen=True)
class TenantRecord:
    """What a tenant says."""

    tenant: str
    """Its name, for people."""
    share: float = 1.0
    group: str = ""
    """Path of its cgroup, for people."""
    bounds: frozenset[str] = frozenset({"host"})
    """Keys of what bounds its memory."""
    working: int = 0
    """Bytes that the process has had resident at its recent peak, beside its leases."""
    resident: int = 0
    """Bytes that it had resident when it wrote this; whoever sees its process looks there."""
    elsewhere: int = 0
    """Bytes of its leases that are in memory, but of no process: files that its process has not mapped yet."""
    leases: Mapping[str, Lease] = field(default_factory=dict)
    wants: Mapping[str, Lease] = field(default_factory=dict)

    @cached_property
    def unused(self) -> int:
        """Bytes that its process will use of what is free now, and those that it has resident."""
        return self.working + sum(lease.nbytes for lease in self.leases.values()) - self.elsewhere

    def encoded(self) -> bytes:
        said = {each.name: getattr(self, each.name) for each in fields(self)} | {"bounds": sorted(self.bounds)}
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, data: bytes) -> TenantRecord:
        """What a file holds.

        Raises:
            ValueError: no tenant has written it.
        """
        try:
            found = json.loads(data)
            return cls(
                tenant=_name(found["tenant"]),
                share=min(max(_number(found["share"]), _LEAST_SHARE), _LARGEST_SHARE),
                group=_name(found["group"]),
                bounds=frozenset(_name(each) for each in found["bounds"][:16]),
                working=_nbytes(found["working"]),
                resident=_nbytes(found["resident"]),
                elsewhere=_nbytes(found["elsewhere"]),
                leases={_name(name): _lease(each) for name, each in found["leases"].items()},
                wants={_name(name): _lease(each) for name, each in found["wants"].items()},
            )
        except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"no tenant's record: {error}") from error


def _name(value: Any) -> str:
    """A name without what would move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:_NAME])


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number is none")
    return float(value)


def _nbytes(value: Any) -> int:
    return min(max(int(_number(value)), 0), _MOST_BYTES)


def _lease(value: Any) -> Lease:
    nbytes, priority, at = value
    return Lease(_nbytes(nbytes), Priority(priority), _number(at))
