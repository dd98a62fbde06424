"""Host memory: one budget for all that take much of it, and which of them give it back first."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class HostMemory:
    """What one rank may take of its host's memory beside what its process has anyway; for use from any thread.

    A lease is taken again before each use. Those of order 0 are what a run cannot do without, and always granted;
    others only where there is room beside all of the same and of lower orders. Else the lease has ended, and its
    memory must be given back: where it gets short, the highest orders go first.
    """

    budget: float = math.inf
    """Bytes; whoever comes first sets it: to a number that the user gave, or the rank's share of what is free."""
    leases: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes and order, by name."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str, nbytes: int, order: int = 0) -> bool:
        """Lease so many bytes in place of what `name` had; whether they were granted."""
        with self._lock:
            self.leases.pop(name, None)
            firm = sum(taken for taken, of in self.leases.values() if of <= order)
            if granted := order == 0 or firm + nbytes <= self.budget:
                self.leases[name] = nbytes, order
            return granted

    def give(self, name: str) -> None:
        """End a lease."""
        with self._lock:
            self.leases.pop(name, None)

    def __str__(self) -> str:
        taken = ", ".join(f"{name} {nbytes / 1e6:.0f} MB" for name, (nbytes, _) in self.leases.items())
        return f"{self.budget / 1e6:.0f} MB ({taken or 'nothing'} taken)"
