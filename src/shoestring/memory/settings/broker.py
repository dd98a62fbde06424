"""Settings of the broker, through which the processes of a host share the host's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.world import World

_LONGEST_WAIT = 30.0


@dataclass(frozen=True, kw_only=True)
class Broker(Feature):
    """A broker of host memory: processes lease the memory that they need, and less urgent leases are called back."""

    folder: str = "/dev/shm"
    """Folder in memory in which the processes of a host keep their records. Processes find each other only through the
    same folder, so containers on one host must mount a common folder."""
    all_users: bool = False
    """Share the host with the processes of other users; otherwise only this user's processes see each other."""
    tenant: str = ""
    """Name of this process in the table of memory leases (`shoestring memory host`); defaults to its command line."""
    weight: float = 1.0
    """Weight of this job among jobs on the same host: if leases of the same priority do not all fit, each job gets a
    share in proportion to its weight. The ranks of a job on one host divide the job's share."""
    reserve: float = 0.1
    """Fraction of the memory of the host, and of each cgroup, that leases leave free. A larger reserve guards better
    against programs that take memory without a lease; a smaller reserve leaves more memory to lease."""
    wait: float = 5.0
    """Maximum time in seconds for which a request for required memory waits until other processes give memory back.
    After this time, the request is granted in any case."""

    seams: ClassVar = (Seam.MODEL,)

    def arrange(self, world: World) -> World:
        from shoestring.memory.broker.tenant import BrokeredMemory, Terms

        name = self.tenant or _command()
        terms = Terms(
            self.place,
            shared=self.all_users,
            tenant=f"{name} rank {world.rank}" if world.size > 1 else name,
            share=self.weight / world.local_size,
            reserve=self.reserve,
            wait=self.wait,
        )
        if isinstance(world.memory, BrokeredMemory) and world.memory.terms == terms:
            return world
        memory = BrokeredMemory(world.memory.budget, dict(world.memory.leases), terms=terms)
        return replace(world, memory=memory)

    @property
    def place(self) -> Path:
        """The folder of the records, inside `folder`."""
        if self.all_users:
            return Path(self.folder, "shoestring-broker")
        return Path(self.folder, f"shoestring-{os.geteuid()}", "broker")

    def check(self, attachments: Attachments) -> None:
        if not 0 < self.weight <= 1000:
            raise ConfigError(f"`{self.name}.weight` must be above 0 and at most 1000, got {self.weight}")
        if not 0 <= self.reserve < 1:
            raise ConfigError(f"`{self.name}.reserve` must be at least 0 and below 1, got {self.reserve}")
        if not 0 <= self.wait <= _LONGEST_WAIT:
            raise ConfigError(f"`{self.name}.wait` must be from 0 to {_LONGEST_WAIT:g} seconds, got {self.wait}")
        if not Path(self.folder).is_dir():
            hint = "name a folder in memory that the processes of this host share"
            raise ConfigError(f"`{self.name}.folder`: there is no folder `{self.folder}`", hint=hint)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.memory.broker.tenant import BrokeredMemory

        memory = attachments.world.memory
        assert isinstance(memory, BrokeredMemory)  # see `arrange`
        memory.join()
        attachments.exits.callback(memory.leave)


def _command() -> str:
    import sys

    return Path(sys.argv[0]).name or "python"
