"""Settings of checkpoints; this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Feature, Phase, Reduction, Seam

if TYPE_CHECKING:
    from pathlib import Path

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Plain(Feature):
    """Checkpoints as single files, which the first rank writes while training waits; files are written atomically."""

    every: int = 0
    """Steps between checkpoints. With a larger value, training waits for the disk less often, and more steps are
    repeated after a kill. With 0, checkpoints are written only at the end and on a signal."""
    keep: int = 2
    """Number of the newest checkpoints to keep. A larger number takes more disk space, and allows the run to resume
    from older steps."""
    folder: str = "checkpoints"
    """Folder of the checkpoints; a relative path lies in the run folder."""

    seams: ClassVar = (Seam.STEP,)
    reads_first_rank: ClassVar = True

    def placed(self, folder: Path) -> Self:
        return replace(self, folder=str(folder / self.folder))

    def check(self, attachments: Attachments) -> None:
        if self.every < 0:
            raise ConfigError(f"`{self.name}.every` must not be negative, got {self.every}")
        if self.keep < 1:
            raise ConfigError(f"`{self.name}.keep` must be at least 1, got {self.keep}")

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.checkpoint.attached import restore
        from shoestring.checkpoint.tiers.plain import Saver

        if attachments.trainers:
            message = "`checkpoint.plain` saves what the first rank trains, but ranks train different parameters"
            raise ConfigError(message, hint="use checkpoint.tiered")
        saver = Saver(attachments, self)
        attachments.at(Phase.CAPTURE, saver.capture)
        attachments.restore_with(lambda where: saver.restored(restore(attachments, Tiered(folder=self.folder), where)))

    def explain(self, attachments: Attachments) -> str:
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
            cost=f"{figures.seconds(trace.seconds('disk'))} stalled",
        )


@dataclass(frozen=True, kw_only=True)
class Tiered(Feature):
    """Checkpoints at three levels, each as often as the failures that it guards against require: in this host's memory,
    in other hosts' memory, and on disk."""

    memory_every: int | str = "auto"
    """Steps between checkpoints in this host's shared memory, which survive a killed process. With a larger value, less
    data is copied, and more steps are repeated after a kill. "auto" plans the interval from the measured duration of a
    copy and rate of failures; 0 turns the level off."""
    peers_every: int | str = "auto"
    """Steps between copies in the memory of other hosts, which survive the loss of this host. With a larger value, less
    data is sent, and more steps are repeated after the loss. "auto" plans the interval from the measured duration of a
    copy and rate of failures; 0 turns the level off."""
    disk_every: int | str = "auto"
    """Steps between checkpoints on disk, which survive the loss of all hosts. With a larger value, less data is
    written, and more steps are repeated after the loss. "auto" plans the interval from the measured duration of a write
    and rate of failures; 0 writes only at the end and on a signal."""
    redundancy: Literal["copy", "parity", "off"] = "copy"
    """Redundancy of the state that only one host holds: "copy" keeps a copy on a partner host, "parity" keeps parity
    over a set of hosts, which takes less memory but more time to restore, and "off" keeps no redundancy."""
    set_size: int = 4
    """Number of hosts in a set that shares one parity; any single host of the set may be lost. A larger set takes less
    memory (a host's state divided by `set_size` - 1), and more traffic to restore."""
    slots: int = 3
    """Number of checkpoints for which this host's memory reserves room; each takes the size of the host's state. With a
    larger number, a checkpoint waits less often for the checksums or copies of the previous one."""
    differences: int = 0
    """Number of the newest steps whose averaged gradients are kept in this host's memory, in the codec's compact form.
    After a process is killed, the gradients are replayed on the newest checkpoint, so that at most the newest step is
    trained again. A larger value takes more memory, and allows more steps between checkpoints: up to half of the value.
    With 0, no gradients are kept."""
    differences_on: Literal["memory", "peers", "disk"] = "memory"
    """Place where differences are kept. "memory" is this host's memory, which survives a killed process. "peers" also
    keeps the states that only one rank has in another host's memory, which survives the loss of one host; other hosts
    then get a checkpoint at least every `differences / 2` steps. "disk" uses both places, and also writes files of
    `differences / 2` steps, which survive the loss of all hosts; a checkpoint is then written to disk at least every `4
    * differences` steps, and older files are deleted."""
    overlap: bool = True
    """Copy weights and optimizer state during the next forward and backward pass. Set to false if anything but the
    optimizer changes weights or optimizer state; training then waits for the copy."""
    keep: int = 2
    """Number of the newest checkpoints on disk to keep. A larger number takes more disk space, and allows the run to
    resume from older steps."""
    max_memory_gb: float = 0.0
    """Maximum memory of this host that checkpoints may take, in GB. A level that needs more is turned off, with a
    warning. With 0, the limit is the memory that is free at the peak of a step."""
    deadline: float = 0.0
    """Seconds from a signal until this machine is shut down. If writing to disk takes longer, the last checkpoint goes
    to the memory of other hosts instead. 0 means that no shutdown is expected."""
    folder: str = "checkpoints"
    """Folder of the checkpoints on disk; a relative path lies in the run folder."""
    memory_folder: str = "/dev/shm"
    """Folder in a file system in memory (tmpfs) for the checkpoints of the memory level."""

    seams: ClassVar = (Seam.STEP,)

    def placed(self, folder: Path) -> Self:
        return replace(self, folder=str(folder / self.folder))

    def check(self, attachments: Attachments) -> None:
        if any(isinstance(feature, Plain) for feature in attachments.features):
            raise ConfigError(
                f"`{self.name}` and `checkpoint.plain` both write checkpoints", hint="remove one of the tables"
            )
        self.validate(attachments.world.hosts)
        from shoestring.checkpoint.tiers.slots import slots_folder

        if attachments.world.hosts == 1:  # several hosts validate the settings together when the feature is attached
            slots_folder(self, attachments.world, make=False)
        if self.differences:
            from shoestring.checkpoint.differences.averages import check

            check(attachments, f"{self.name}.differences")

    def validate(self, hosts: int) -> None:
        """Raise ConfigError if a setting is out of range, or does not suit this number of hosts."""
        for key in ("memory_every", "peers_every", "disk_every"):
            value = getattr(self, key)
            if value != "auto" and not (isinstance(value, int) and value >= 0):
                raise ConfigError(f'`{self.name}.{key}` must be "auto" or a number of steps, got {value!r}')
        for key, least in (("keep", 1), ("slots", 2), ("set_size", 2)):
            if not isinstance(value := getattr(self, key), int) or value < least:
                raise ConfigError(f"`{self.name}.{key}` must be a whole number, at least {least}, got {value!r}")
        for key in ("max_memory_gb", "deadline"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"`{self.name}.{key}` must not be negative, got {getattr(self, key)}")
        self._validate_differences()
        if self.slots < 3 and hosts > 1 and self.redundancy != "off" and self.peers_every:
            raise ConfigError(
                f"`{self.name}.slots` must be at least 3 if other hosts keep copies, got {self.slots}",
                hint="peers' copies, the newest checkpoint and the next one need a slot each; set slots = 3, or "
                "peers_every = 0",
            )

    def _validate_differences(self) -> None:
        """Raise ConfigError if checkpoints at a level are too far apart for the number of differences."""
        most = self.differences // 2  # half, because it takes some steps to complete a checkpoint on all ranks
        if self.differences_on != "memory" and not self.differences:
            message = f'`{self.name}.differences_on` is "{self.differences_on}", but no differences are kept'
            raise ConfigError(message, hint="set differences = 16")
        if self.differences < 0 or self.differences == 1:
            raise ConfigError(f"`{self.name}.differences` must be 0, or at least 2 steps, got {self.differences}")
        if most and self.memory_every != "auto" and not 1 <= int(self.memory_every) <= most:
            raise ConfigError(
                f"`{self.name}.memory_every` is {self.memory_every}, but {self.differences} differences are kept",
                hint=f'set memory_every = "auto", or at most half as many steps: 1 to {most}',
            )
        if most and self.differences_on == "peers" and (self.redundancy == "off" or self.peers_every == 0):
            message = f'`{self.name}.differences_on` is "peers", but peers get no checkpoints to replay them on'
            raise ConfigError(message, hint='set peers_every = "auto" and redundancy = "copy"')
        if most and self.differences_on == "peers" and self.peers_every != "auto" and int(self.peers_every) > most:
            raise ConfigError(
                f"`{self.name}.peers_every` is {self.peers_every}, but {self.differences} differences are kept",
                hint=f'set peers_every = "auto", or at most half as many steps: 1 to {most}',
            )
        if most and self.differences_on == "disk" and self.disk_every == 0:
            message = f'`{self.name}.differences_on` is "disk", but no checkpoints to replay them on are written there'
            raise ConfigError(message, hint='set disk_every = "auto"')

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.checkpoint.attached import install

        install(attachments, self)

    def explain(self, attachments: Attachments) -> str:
        from shoestring.checkpoint.tiers.save_schedule import CheckpointSchedule

        alone = attachments.world.ranks_over(DATA) == 1
        # Once the feature is attached, the job's schedule has the current intervals, and knows which levels work.
        known = attachments.kept["checkpoint"].state if "checkpoint" in attachments.kept else None
        schedule = known if isinstance(known, CheckpointSchedule) else CheckpointSchedule(self, attachments.world.hosts)
        if schedule is not known:
            schedule.replays = self.differences > 0 and not alone
        schedule.total = attachments.progress.total
        return schedule.survives() + ("; differences off: one rank" if self.differences and alone else "")

    def reduction(self, trace: Trace) -> Reduction | None:
        steps = trace.steps
        lost = trace.facts.get("checkpoint_steps_at_risk", steps)
        if not 0 < lost < steps:
            return None
        recorded, spent = trace.facts.get("checkpoint_differences", 0.0), trace.facts.get("checkpoint_differing", 0.0)
        differing = f"; {figures.size(recorded)} of differences in {figures.seconds(spent)}" if recorded else ""
        stalled, copied = trace.facts.get("checkpoint_stall", 0.0), trace.facts.get("checkpoint_bytes", 0.0)
        survived, gone = int(trace.facts.get("checkpoint_failures", 0.0)), trace.facts.get("checkpoint_lost", 0.0)
        failures = f"failures survived: {survived}" + (f", which took {figures.seconds(gone)}" if survived else "")
        return Reduction(
            unit="steps to repeat after a kill, at worst",
            used=0 if recorded else lost,
            without=steps,
            measured=True,
            cost=f"{figures.seconds(stalled)} stalled, {figures.memory(copied)} copied{differing}; {failures}",
        )
