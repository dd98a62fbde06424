"""Checkpoints of a run: written while it trains, and resumed from after a failure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Feature, Phase, Reduction, Seam

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
    """Checkpoints in one file each, written by the first rank while training waits; no file is ever half written."""

    every: int = 0
    """Steps between checkpoints. A larger value waits for the disk less often, and repeats more steps after a kill.
    With 0 they are written at the end and on a signal only."""
    keep: int = 2
    """Number of the newest checkpoints to keep. More of them take more disk, and allow going back further."""
    folder: str = "checkpoints"
    """Folder of the checkpoints; a relative path lies in the run folder."""

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

    def reduction(self, trace: Trace) -> Reduction | None:
        steps = trace.steps
        if not 0 < self.every < steps:
            return None
        return Reduction(
            unit="steps to repeat after a kill, at worst",
            used=self.every,
            without=steps,
            measured=False,
            cost=f"{trace.seconds('disk'):.2f} s stalled",
        )


@dataclass(frozen=True, kw_only=True)
class Tiered(Feature):
    """Checkpoints at three levels, each as often as the failures it guards against warrant: in this host's memory, in
    the memory of other hosts, and on disk."""

    memory_every: int | str = "auto"
    """Steps between checkpoints in this host's shared memory, which survive a killed process. A larger value copies
    less, and repeats more steps after a kill. "auto" measures both and plans the interval; 0 turns the level off."""
    peers_every: int | str = "auto"
    """Steps between copies in the memory of other hosts, which survive the loss of this host. A larger value sends
    less, and repeats more steps after the loss. "auto" measures both and plans the interval; 0 turns the level off."""
    disk_every: int | str = "auto"
    """Steps between checkpoints on disk, which survive the loss of all hosts. A larger value writes less, and repeats
    more steps after the loss. "auto" measures both and plans the interval; 0 writes at the end and on a signal only."""
    peers: Literal["copy", "parity", "off"] = "copy"
    """Redundancy of the state that one host alone holds: a copy on a partner host, or parity over a set of hosts, which
    takes less memory and longer to restore."""
    set_size: int = 4
    """Number of hosts that share one parity; any one host of such a set may be lost. A larger set takes less memory
    (the state of a host divided by the size minus 1), and more traffic to restore."""
    slots: int = 3
    """Number of checkpoints that this host's memory has room for. With one more, a checkpoint need not wait until the
    one before has its checksums or its copies; each takes the size of the host's state."""
    differences: int = 0
    """Number of the newest steps of which this host's memory keeps what a codec exchanged. After a killed process they
    are replayed on the newest checkpoint, so that at most the newest step is trained again. More of them take more
    memory (the averaged gradients in the codec's compact form, each), and let checkpoints be further apart: half as
    many steps at most. With 0 none is kept."""
    differences_on: Literal["memory", "peers", "disk"] = "memory"
    """Place of the differences, each after the places before it: in this host's memory, which survives a killed
    process; what is a rank's own also in the memory of another host, which survives the loss of one, and peers then
    have a checkpoint at least every half as many steps; or on disk, half as many steps in a file, which survives the
    loss of all hosts. A checkpoint on disk is then made at least every four times as many steps, and makes the files
    before it unneeded."""
    overlap: bool = True
    """Copy weights and optimizer state during the next forward and backward pass. Set false if anything but the
    optimizer changes them; training then waits for the copy."""
    keep: int = 2
    """Number of the newest checkpoints on disk to keep. More of them take more disk, and allow going back further."""
    budget: float = 0.0
    """Memory of this host that checkpoints may take, in GB. A level that needs more is turned off, and the run says so.
    With 0 it is what is free at the peak of a step."""
    deadline: float = 0.0
    """Seconds from a signal to the end of this machine. If writing to disk takes longer, the last checkpoint goes to
    the memory of other hosts instead. With 0 the machine is not taken away."""
    folder: str = "checkpoints"
    """Folder of the checkpoints on disk; a relative path lies in the run folder."""
    memory: str = "/dev/shm"
    """Folder of a file system in memory, for the checkpoints of this level."""

    seams: ClassVar = (Seam.STEP,)

    def placed(self, folder: Path) -> Self:
        return replace(self, folder=str(folder / self.folder))

    def check(self, job: Job) -> None:
        if any(isinstance(each, Plain) for each in job.features):
            raise ConfigError(f"`{self.name}` and `checkpoint.plain` both save", hint="remove one of the tables")
        self.validate(job.world.hosts)
        if self.differences:
            from shoestring.checkpoint.differences.averages import check

            check(job, f"{self.name}.differences")

    def validate(self, hosts: int) -> None:
        """Raise ConfigError where a setting is out of its range, or does not do for so many hosts."""
        for key in ("memory_every", "peers_every", "disk_every"):
            value = getattr(self, key)
            if value != "auto" and not (isinstance(value, int) and value >= 0):
                raise ConfigError(f'`{self.name}.{key}` must be "auto" or a number of steps, got {value!r}')
        for key, least in (("keep", 1), ("slots", 2), ("set_size", 2)):
            if not isinstance(value := getattr(self, key), int) or value < least:
                raise ConfigError(f"`{self.name}.{key}` must be a whole number, at least {least}, got {value!r}")
        for key in ("budget", "deadline"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"`{self.name}.{key}` must not be negative, got {getattr(self, key)}")

        most = self.differences // 2
        if self.differences_on != "memory" and not self.differences:
            said = f'`{self.name}.differences_on` is "{self.differences_on}", and no differences are kept'
            raise ConfigError(said, hint="set differences = 16")
        if self.differences < 0 or self.differences == 1:
            said = f"`{self.name}.differences` must be 0, or at least 2 steps, got {self.differences}"
            raise ConfigError(said)
        if most and self.memory_every != "auto" and not 1 <= int(self.memory_every) <= most:
            raise ConfigError(
                f"`{self.name}.memory_every` is {self.memory_every}, but {self.differences} differences are kept",
                hint=f'set memory_every = "auto", or at most half as many steps: 1 to {most}',
            )
        if most and self.differences_on == "peers" and (self.peers == "off" or self.peers_every == 0):
            said = f'`{self.name}.differences_on` is "peers", and no checkpoints that they follow are kept there'
            raise ConfigError(said, hint='set peers_every = "auto" and peers = "copy"')
        if most and self.differences_on == "peers" and self.peers_every != "auto" and int(self.peers_every) > most:
            raise ConfigError(
                f"`{self.name}.peers_every` is {self.peers_every}, but {self.differences} differences are kept",
                hint=f'set peers_every = "auto", or at most half as many steps: 1 to {most}',
            )
        if most and self.differences_on == "disk" and self.disk_every == 0:
            said = f'`{self.name}.differences_on` is "disk", and no checkpoints that they follow are written there'
            raise ConfigError(said, hint='set disk_every = "auto"')
        if self.slots < 3 and hosts > 1 and self.peers != "off" and self.peers_every:
            raise ConfigError(
                f"`{self.name}.slots` must be at least 3 if other hosts keep copies, got {self.slots}",
                hint="one is what the others have, one the newest, one is filled; set slots = 3, or peers_every = 0",
            )

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.checkpoint.attached import install

        install(job, self)

    def explain(self, job: Job) -> str:
        from shoestring.checkpoint.tiers.save_schedule import CheckpointSchedule

        alone = job.world.ranks_over(DATA) == 1
        known = job.kept["checkpoint"].state if "checkpoint" in job.kept else None  # by now, what works and how often
        schedule = known if isinstance(known, CheckpointSchedule) else CheckpointSchedule(self, job.world.hosts)
        if schedule is not known:
            schedule.replays = self.differences > 0 and not alone
        schedule.total = job.progress.total
        return schedule.survives() + ("; differences off: one rank" if self.differences and alone else "")

    def reduction(self, trace: Trace) -> Reduction | None:
        steps = trace.steps
        lost = trace.facts.get("checkpoint_steps_at_risk", steps)
        if not 0 < lost < steps:
            return None
        kept, spent = trace.facts.get("checkpoint_differences", 0.0), trace.facts.get("checkpoint_differing", 0.0)
        differing = f"; {kept / 1e6:.0f} MB of differences in {spent:.2f} s" if kept else ""
        stalled, copied = trace.facts.get("checkpoint_stall", 0.0), trace.facts.get("checkpoint_bytes", 0.0)
        survived, gone = int(trace.facts.get("checkpoint_failures", 0.0)), trace.facts.get("checkpoint_lost", 0.0)
        failures = f"failures survived: {survived}" + (f", which took {gone:.1f} s" if survived else "")
        return Reduction(
            unit="steps to repeat after a kill, at worst",
            used=0 if kept else lost,
            without=steps,
            measured=True,
            cost=f"{stalled:.2f} s stalled, {copied / 1e6:.0f} MB copied{differing}; {failures}",
        )


def attach(
    state: Mapping[str, Stateful],
    *,
    own: Mapping[str, Stateful] | None = None,
    settings: Tiered | None = None,
) -> Attached:
    """Write and restore checkpoints in a program with a training loop of its own: call `.restore()` once, and `.step()`
    after each optimizer step.

    Args:
        state: what all ranks hold alike or in shards, such as the model, the optimizer and a schedule.
        own: what each rank has for itself, such as a data loader. Random states are saved without being named.

    Raises:
        ConfigError: a state has the name of one that is saved besides (progress, random, checkpoint) or of another one.
    """
    from shoestring.checkpoint.attached import Attached

    return Attached(state, own or {}, settings or Tiered())
