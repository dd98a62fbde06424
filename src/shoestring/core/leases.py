"""Host memory: one budget for all large users of it, and the order in which they give it back."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum


class Priority(IntEnum):
    """Who gives memory back when it runs short: the last of these first, the first never."""

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
    """Leases of host memory that one rank may take in addition to what its process uses; thread-safe.

    A lease is taken again before each use. Leases of `Priority.REQUIRED` are always granted; others if they fit into
    the budget together with all leases of the same and of more urgent priorities. After a refusal the former lease
    stands, because its memory is still in use, until the owner has freed it and calls `give`.
    """

    budget: float = math.inf
    """Bytes; see `settle`."""
    leases: dict[str, tuple[int, Priority]] = field(default_factory=dict)
    """Bytes and priority, by name."""
    called_back: set[str] = field(default_factory=set)
    """Names of leases that others need: their owners free the memory and `give` them as soon as they can."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, free: float, ranks: int = 1, there: float = 0) -> None:
        """Set the budget, once in a run: this rank's share of 7/8 of the `free` bytes of a host with `ranks` ranks.

        What has been leased before is in use and therefore not free: it is added.

        Args:
            there: bytes of `free` that are in use already, for leases that are still to come.
        """
        with self._lock:
            if self.budget == math.inf:
                self.budget = 7 / 8 * free / ranks + sum(nbytes for nbytes, _ in self.leases.values())

    def take(self, name: str, nbytes: int, priority: Priority = Priority.REQUIRED) -> bool:
        """Lease `nbytes` in place of the lease that `name` has; True if granted. A refusal changes nothing."""
        with self._lock:
            firm = sum(taken for other, (taken, kind) in self.leases.items() if other != name and kind <= priority)
            if granted := priority is Priority.REQUIRED or firm + nbytes <= self.budget:
                self.leases[name] = nbytes, priority
            return granted

    def give(self, name: str) -> None:
        """End a lease; its memory must have been freed."""
        with self._lock:
            self.leases.pop(name, None)

    def turn(self, priority: Priority, patience: float = 0.1) -> AbstractContextManager[object]:
        """Inside of it much is copied: it waits for whoever copies what is more urgent, at most `patience` seconds."""
        return nullcontext()

    def described(self, but: str = "") -> str:
        """The budget and its leases, except the lease `but`."""
        leases = (f"{name} {nbytes / 1e6:.0f} MB" for name, (nbytes, _) in self.leases.items() if name != but)
        return f"{self.budget / 1e6:.0f} MB ({', '.join(leases) or 'nothing'} taken)"

    __str__ = described
