"""A host of a size of our own for tests of the broker: real files and locks, pretended memory, several tenants in one
process."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from shoestring.memory.broker.tenant import BrokeredMemory, Sights, Terms


@dataclass
class Pretended:
    """A host with `total` bytes, of which others than tenants use `outside`; also a bound, as tenants see it."""

    folder: Path
    total: int = 1000
    outside: int = 0
    waits: float = 0.0  # percent of time
    now: float = 1000.0
    touched: dict = field(default_factory=dict)  # tenant's key -> bytes in memory
    key: str = "host"

    def free(self):
        return self.total - self.outside - sum(self.touched.values())

    def pressure(self):
        return self.waits

    def tenant(self, name="", *, bounds=None, watch=False, **terms):
        terms = {"reserve": 0.0, "wait": 0.0} | terms
        sights = Sights(lambda: bounds or [self], lambda seen: self.touched.get(seen.key, 0), lambda: self.now)
        memory = BrokeredMemory(terms=Terms(self.folder, tenant=name, **terms), sights=sights)
        memory.join(watch=watch)
        return memory

    def kill(self, memory):
        """End a tenant as a kill does: its lock and its memory go, its file stays."""
        descriptor, _ = memory._ledger._own.pop(memory._key)
        os.close(descriptor)
        self.touched.pop(memory._key, None)
        memory._ledger.users -= 1
        memory._ledger = None
