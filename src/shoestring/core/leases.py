"""A budget of host memory that all large buffers of a rank share, and the order in which they are freed."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum

from shoestring import figures


class Priority(IntEnum):
    """Priority of a lease. When memory runs short, leases with the highest number are freed first, `REQUIRED` never."""

    REQUIRED = 0
    """Needed for training: offloaded state, and the copy of a checkpoint that is being written to disk."""
    CACHE = 1
    """Caches, whose content can be read or computed again at the cost of time."""
    CHECKPOINT = 2
    """Checkpoints of this host's own ranks, in memory."""
    PEERS = 3
    """Checkpoints that this host holds for other hosts."""


@dataclass(eq=False)
class HostMemory:
    """Accounts for the large buffers in host memory of one rank, each under a named lease; thread-safe.

    An owner calls `take` before each use of its buffer. Leases of `Priority.REQUIRED` are always granted. Another lease
    is granted if it fits into the budget together with all leases of the same or a more urgent priority. If a larger
    lease is refused, the owner's earlier lease stays until the owner has freed the memory and called `give`.
    """

    budget: float = math.inf
    """Bytes that all leases of this rank may take together; infinite until `settle` is called."""
    leases: dict[str, tuple[int, Priority]] = field(default_factory=dict)
    """Name of a lease -> its size in bytes, and its priority."""
    called_back: set[str] = field(default_factory=set)
    """Names of leases whose memory is needed elsewhere; their owners free it and call `give` as soon as they can."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, free: float, ranks: int = 1, there: float = 0) -> None:
        """Set the budget, once in a run: this rank's share of 7/8 of the `free` bytes of a host with `ranks` ranks.

        `free` does not include the memory of leases that were taken before, so their bytes are added to the budget.

        Args:
            there: bytes that buffers already use, but whose leases are taken later; only subclasses use this.
        """
        with self._lock:
            if self.budget == math.inf:
                self.budget = 7 / 8 * free / ranks + sum(nbytes for nbytes, _ in self.leases.values())

    def take(self, name: str, nbytes: int, priority: Priority = Priority.REQUIRED) -> bool:
        """Set the lease `name` to `nbytes`; if this is refused, leave the earlier lease unchanged and return False."""
        with self._lock:
            firm = sum(taken for other, (taken, kind) in self.leases.items() if other != name and kind <= priority)
            if granted := priority is Priority.REQUIRED or firm + nbytes <= self.budget:
                self.leases[name] = nbytes, priority
            return granted

    def give(self, name: str) -> None:
        """End a lease, whose memory the caller has already freed."""
        with self._lock:
            self.leases.pop(name, None)

    def turn(self, priority: Priority, patience: float = 0.1) -> AbstractContextManager[object]:
        """Context around a large copy.

        Subclasses may wait here for more urgent copies, for at most `patience` seconds; this class never waits.
        """
        return nullcontext()

    def described(self, but: str = "") -> str:
        """Text for messages: the budget, and all leases except the lease named `but`."""
        return f"{figures.memory(self.budget)} {self.taken(but)}"

    def taken(self, but: str = "") -> str:
        """Text for messages, in brackets: all leases except the lease named `but`."""
        leases = (f"{name} {figures.memory(nbytes)}" for name, (nbytes, _) in self.leases.items() if name != but)
        return f"({', '.join(leases) or 'nothing'} taken)"

    __str__ = described
