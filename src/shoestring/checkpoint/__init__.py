"""Losing no work: saving a run's state and going on from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Phase, Saving, Seam

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.stateful import Stateful

    from shoestring.checkpoint.attached import Attached
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

__all__ = ["Plain", "Tiered", "attach"]


@dataclass(frozen=True, kw_only=True)
class Plain(Feature):
    """Atomic saves of everything to one file by the first rank: at the end, on a signal, and every so often."""

    every: int = 0
    """Steps between saves; 0 saves at the end and on a signal only."""
    keep: int = 2
    """How many of the newest saves to keep."""
    folder: str = "checkpoints"
    """Where to save; a relative path lies in the run folder."""

    seams: ClassVar = (Seam.STEP,)

    def placed(self, folder: Path) -> Self:
        return replace(self, folder=str(folder / self.folder))

    def check(self, job: Job) -> None:
        if self.every < 0:
            raise ConfigError(f"`{self.name}.every` must not be negative, got {self.every}")
        if self.keep < 1:
            raise ConfigError(f"`{self.name}.keep` must be at least 1, got {self.keep}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.checkpoint.attached import restore
        from shoestring.checkpoint.tiers.plain import Saver

        saver = Saver(job, self)
        job.at(Phase.CAPTURE, saver.capture)
        job.restore_with(lambda where: saver.restored(restore(job, Tiered(folder=self.folder), where)))

    def explain(self, job: Job) -> str:
        return f"every {self.every} steps, at the end and on a signal" if self.every else "at the end and on a signal"

    def saving(self, trace: Trace) -> Saving | None:
        steps = trace.steps
        if not 0 < self.every < steps:
            return None
        return Saving(
            unit="steps to repeat after a kill, at worst",
            used=self.every,
            without=steps,
            measured=False,
            cost=f"{trace.seconds('disk'):.2f} s stalled",
        )


@dataclass(frozen=True, kw_only=True)
class Tiered(Feature):
    """Saves at three levels, each as often as the failures that it is for: this host's memory, other hosts', disk."""

    memory_every: int | str = "auto"
    """Steps between copies to shared memory of this host, which survive the process; "auto" plans them."""
    peers_every: int | str = "auto"
    """Steps between copies in the memory of other hosts, which survive this one; 0 makes none."""
    disk_every: int | str = "auto"
    """Steps between saves to disk; 0 saves at the end and on a signal only."""
    peers: Literal["copy", "parity", "off"] = "copy"
    """What other hosts keep of what one alone has: a copy, or parity over sets of hosts, which takes less memory."""
    set_size: int = 4
    """Hosts whose state is coded together; any one of them may be lost."""
    slots: int = 3
    """Generations that this host's memory has room for."""
    overlap: bool = True
    """Copy weights and optimizer state beside the next step; false where anything but the optimizer changes them."""
    keep: int = 2
    """How many of the newest saves on disk to keep."""
    budget: float = 0.0
    """GB of this host's memory that slots may take, a level that needs more being off; 0 finds out what is free."""
    deadline: float = 0.0
    """Seconds from a signal to the end of this machine: a save to disk that takes longer goes to peers; 0: no end."""
    folder: str = "checkpoints"
    """Where to save; a relative path lies in the run folder."""
    memory: str = "/dev/shm"
    """A file system in memory."""

    seams: ClassVar = (Seam.STEP,)

    def placed(self, folder: Path) -> Self:
        return replace(self, folder=str(folder / self.folder))

    def check(self, job: Job) -> None:
        if any(isinstance(each, Plain) for each in job.features):
            raise ConfigError(f"`{self.name}` and `checkpoint.plain` both save", hint="remove one of the tables")
        self.validate(job.world.hosts)

    def validate(self, hosts: int) -> None:
        """Raise ConfigError where a setting is out of its range, or does not do for so many hosts."""
        for key in ("memory_every", "peers_every", "disk_every"):
            value = getattr(self, key)
            if value != "auto" and not (isinstance(value, int) and value >= 0):
                raise ConfigError(f'`{self.name}.{key}` must be "auto" or a number of steps, got {value!r}')
        for key, least in (("keep", 1), ("slots", 2), ("set_size", 2)):
            if getattr(self, key) < least:
                raise ConfigError(f"`{self.name}.{key}` must be at least {least}, got {getattr(self, key)}")

        for key in ("budget", "deadline"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"`{self.name}.{key}` must not be negative, got {getattr(self, key)}")

        if self.slots < 3 and hosts > 1 and self.peers != "off" and self.peers_every:
            raise ConfigError(
                f"`{self.name}.slots` must be at least 3 where other hosts keep copies, got {self.slots}",
                hint="one is what the others have, one the newest, one is filled; set slots = 3, or peers_every = 0",
            )

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.checkpoint.attached import install

        install(job, self)

    def explain(self, job: Job) -> str:
        from shoestring.checkpoint.tiers.save_schedule import Schedule

        return Schedule(self, job.world.hosts).survives()

    def saving(self, trace: Trace) -> Saving | None:
        steps = trace.steps
        lost = trace.facts.get("checkpoint_steps_at_risk", steps)
        if not 0 < lost < steps:
            return None
        stalled, copied = trace.facts.get("checkpoint_stall", 0.0), trace.facts.get("checkpoint_bytes", 0.0)
        survived, gone = int(trace.facts.get("checkpoint_failures", 0.0)), trace.facts.get("checkpoint_lost", 0.0)
        failures = f"failures survived: {survived}" + (f", which took {gone:.1f} s" if survived else "")
        return Saving(
            unit="steps to repeat after a kill, at worst",
            used=lost,
            without=steps,
            measured=True,
            cost=f"{stalled:.2f} s stalled, {copied / 1e6:.0f} MB copied; {failures}",
        )


def attach(
    state: Mapping[str, Stateful],
    *,
    own: Mapping[str, Stateful] | None = None,
    settings: Tiered | None = None,
) -> Attached:
    """Save and restore in a program that knows nothing of shoestring: call `.restore()` once and `.step()` after each
    optimizer step.

    Args:
        state: what all ranks hold alike or in shards: the model, the optimizer, a schedule.
        own: what each rank has for itself: a loader. Random states are saved without being named.

    Raises:
        ConfigError: a state has the name of one that is saved besides (progress, random, checkpoint) or of another one.
    """
    from shoestring.checkpoint.attached import Attached

    return Attached(state, own or {}, settings or Tiered())
