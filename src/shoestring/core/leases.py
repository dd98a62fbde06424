"""Host memory: one budget for all that take much of it, and which of them give it back first."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from enum import IntEnum

_MOST = 7 / 8  # of what is free while training takes the most


class Order(IntEnum):
    """Who gives memory back when it gets short: the last of these first, the first never."""

    REQUIRED = 0
    """What training cannot do without: offloaded state, the one copy that is written to disk from."""
    CACHE = 1
    """What can be read or computed again, at the price of speed."""
    CHECKPOINT = 2
    """This host's own checkpoints in memory."""
    PEERS = 3
    """Checkpoints that this host holds for others."""


@dataclass(eq=False)
class HostMemory:
    """What one rank may take of its host's memory beside what its process has anyway; for use from any thread.

    A lease is taken again before each use. Those of `Order.REQUIRED` are always granted; others where there is room
    beside all of the same and of earlier orders. Who is refused keeps what it had until it has freed that memory and
    gives it: it is in use until then.
    """

    budget: float = math.inf
    """Bytes; see `settle`."""
    leases: dict[str, tuple[int, Order]] = field(default_factory=dict)
    """Bytes and order, by name."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, free: float, ranks: int = 1) -> None:
        """Set the budget, once in a run: this rank's share of most of what is free on a host of so many `ranks`.

        What has been leased by now is in use, and so not free: it comes on top.
        """
        with self._lock:
            if self.budget == math.inf:
                self.budget = _MOST * free / ranks + sum(nbytes for nbytes, _ in self.leases.values())

    def take(self, name: str, nbytes: int, order: Order = Order.REQUIRED) -> bool:
        """Lease so many bytes in place of what `name` has; whether they were granted. A refusal changes nothing."""
        with self._lock:
            firm = sum(taken for of, (taken, kind) in self.leases.items() if of != name and kind <= order)
            if granted := order is Order.REQUIRED or firm + nbytes <= self.budget:
                self.leases[name] = nbytes, order
            return granted

    def give(self, name: str) -> None:
        """End a lease; its memory must have been freed."""
        with self._lock:
            self.leases.pop(name, None)

    def __str__(self) -> str:
        return self.described()

    def described(self, but: str = "") -> str:
        """The budget and who has what of it, except the lease `but`."""
        leases = ((name, nbytes) for name, (nbytes, _) in self.leases.items() if name != but)
        taken = ", ".join(f"{name} {nbytes / 1e6:.0f} MB" for name, nbytes in leases)
        return f"{self.budget / 1e6:.0f} MB ({taken or 'nothing'} taken)"
