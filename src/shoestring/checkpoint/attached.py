"""Attach multi-level checkpoints to a job, or to a program with a training loop of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.differences.averages import KeptAverages, refuse_scaled
from shoestring.checkpoint.differences.differences import STEPS, Differences
from shoestring.checkpoint.recovery.resume import forget_all, resume
from shoestring.checkpoint.tiers.slots import Slot, slots_folder
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.attachments import Attachments, Kept
from shoestring.core.compose import check_features
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.feature import DATA, Phase
from shoestring.core.kept import Progress, RandomState, Stateful
from shoestring.core.world import World
from shoestring.sharded import local_part

log = logging.getLogger("shoestring")

OURS = ("progress", "random", "checkpoint")
"""Names of the states that are saved in addition to the program's own states; the program must not use these names."""


def install(attachments: Attachments, settings: Tiered) -> None:
    """Attach multi-level checkpoints to a job: restore a checkpoint at the start, write checkpoints after steps, and
    complete them on exit."""

    def stable() -> set[int]:
        states = (entry.state for entry in attachments.kept.values())
        return addresses([attachments.module, attachments.optimizer, *states])

    folder = attachments.world.agree(lambda: slots_folder(settings, attachments.world))
    checkpointer = Checkpointer(attachments.kept, attachments.progress, attachments.world, settings, folder, stable)
    attachments.exits.callback(close, checkpointer)
    attachments.keep("checkpoint", checkpointer.schedule)
    if settings.differences:
        checkpointer.differences = _differences(attachments, checkpointer)
        checkpointer.schedule.replays = checkpointer.differences is not None

    total = attachments.progress.total  # 0 if the run file does not set a number of steps

    def restored(where: str) -> int | None:
        step = resume(checkpointer, where)
        done = 0 < (total or checkpointer.progress.total) <= checkpointer.progress.position
        # A run that resumes from memory with no steps left was killed before its last checkpoint was on disk.
        if where == "auto" and step is not None and done and not checkpointer.on_disk:
            checkpointer.finish()
        return step

    def capture() -> None:
        if attachments.done:
            attachments.world.agree(attachments.verify)
        loss = attachments.numbers.get("loss")
        if checkpointer.differences is not None:
            checkpointer.schedule.replays = checkpointer.differences.works
        checkpointer.capture(attachments.done, loss if isinstance(loss, Tensor) else None)
        attachments.trace.facts |= checkpointer.facts()

    attachments.at(Phase.WAIT, checkpointer.wait)
    attachments.read_beside(checkpointer.finish_copies)
    attachments.at(Phase.CAPTURE, capture)
    attachments.restore_with(restored)


def _differences(attachments: Attachments, checkpointer: Checkpointer) -> Differences | None:
    """Create the `Differences` of a job, which records steps so that they can be replayed; returns None for a single
    rank, which exchanges no gradients.

    Raises:
        ConfigError: steps of this job cannot be replayed; raised on all ranks.
    """
    settings = checkpointer.settings
    if attachments.trainers:
        message = f"`{settings.name}.differences` replays the steps of replicas, but ranks train different parameters"
        raise ConfigError(message, hint=f"set {settings.name}.differences = 0")
    if attachments.scaler.is_enabled():
        refuse_scaled(f"{settings.name}.differences")
    states = (entry.state for entry in attachments.kept.values())
    averages = next((state for state in states if isinstance(state, KeptAverages)), None)
    if averages is None:
        if attachments.world.ranks_over(DATA) > 1:
            raise ConfigError(
                f"`{settings.name}.differences` needs a gradient exchange of [comm]", hint="add [comm.dense]"
            )
        return None
    slot = Slot(checkpointer.folder / f"{STEPS}-{attachments.world.local_rank}", checkpointer.files)
    claim, group, steps = checkpointer.claim, checkpointer.group, settings.differences
    partners = None
    if checkpointer.schedule.has_peers and settings.differences_on != "memory":
        partners = Slot(checkpointer.folder / f"{STEPS}-partner-{attachments.world.local_rank}", checkpointer.files)
    on_disk = settings.differences_on == "disk"
    differences = Differences(attachments, averages, slot, claim, group, steps, on_disk=on_disk, partners=partners)
    attachments.at(Phase.WAIT, differences.begin_step)
    return differences


def restore(attachments: Attachments, settings: Tiered, where: str) -> int | None:
    """Resume a job without `Tiered`, possibly from checkpoints that an earlier start wrote with `Tiered`.

    Args:
        settings: settings with the folders to search for checkpoints; no checkpoint is written.
        where: "auto" for the newest checkpoint, or a path.
    """
    slots = attachments.world.agree(lambda: slots_folder(settings, attachments.world, make=False))
    checkpointer = Checkpointer(attachments.kept, attachments.progress, attachments.world, settings, slots, set)
    try:
        return resume(checkpointer, where)
    finally:
        checkpointer.close()


def close(checkpointer: Checkpointer) -> None:
    """Stop writing checkpoints. If the run has finished, delete its checkpoints in memory, because the last checkpoint
    is on disk."""
    checkpointer.close()
    if checkpointer.finished and checkpointer.world.local_rank == 0:
        forget_all(checkpointer.folder.parent)


def addresses(owners: Iterable[object]) -> set[int]:
    """Return the storage addresses of all tensors that do not change until the next optimizer step.

    These tensors are parameters, optimizer state, and metrics of the newest step that are still on the device.
    """
    with torch.no_grad():  # with gradients, `to_local` would return a new tensor
        tensors = (tensor for owner in owners for tensor in _tensors(owner))
        local = (local_part(tensor) for tensor in tensors)
        return {tensor.untyped_storage().data_ptr() for tensor in local}


def _tensors(owner: object) -> Iterator[Tensor]:
    if isinstance(owner, nn.Module):
        yield from owner.parameters()
    elif isinstance(owner, Optimizer):
        for state in owner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
    elif isinstance(unread := getattr(owner, "unread", None), Tensor):  # in `Progress` and `NewestRows`
        yield unread


def _check_states(state: Mapping[str, Stateful], own: Mapping[str, Stateful]) -> None:
    """Raise ConfigError if an object has no state to save, or two objects would be saved under the same name."""
    for key, states in (("state", state), ("own", own)):
        if not isinstance(states, Mapping):
            raise ConfigError(f"`{key}` must be a mapping, got a {type(states).__name__}", hint='pass {"model": model}')
        for name, value in states.items():
            if not isinstance(value, Stateful):
                message = f"`{name}` in `{key}` is a {type(value).__name__}, without `state_dict` and `load_state_dict`"
                raise ConfigError(message, hint="pass the object itself, such as the model, not its state dict")
    for name in OURS:
        if name in state or name in own:
            raise ConfigError(
                f"`{name}` is reserved for a state that `checkpoint.attach` adds", hint="rename your state"
            )
    if both := state.keys() & own.keys():
        raise ConfigError(f"`{min(both)}` is in `state` and in `own`", hint="rename one of them")


class Attached:
    """Writes and restores checkpoints in a program with a training loop of its own; a context manager that stops its
    threads on exit.

    All ranks call `restore` before the loop, and `step` after every optimizer step.
    """

    def __init__(self, state: Mapping[str, Stateful], own: Mapping[str, Stateful], settings: Tiered) -> None:
        self.progress, self.closed, world = Progress(), False, World.current()
        check_features([settings])
        if not isinstance(settings, Tiered):
            raise ConfigError(f"`settings` must be a checkpoint.Tiered, got a {type(settings).__name__}")
        settings.validate(world.hosts)
        if settings.differences:
            message = (
                f"`{settings.name}.differences` replays steps of a job, but `checkpoint.attach` works without a job"
            )
            raise ConfigError(message, hint="use `ss.attach(model, optimizer, comm.…, checkpoint.Tiered(…))`")
        _check_states(state, own)
        self._hooks: list[Callable[[], None]] = []
        states = {name: Kept(value, "shard", None) for name, value in state.items()}
        states |= {name: Kept(value, "own", None) for name, value in own.items()}
        states["progress"] = Kept(self.progress, "same", None)
        states["random"] = Kept(RandomState(world.device), "own", None)
        owners = list(state.values())
        folder = world.agree(lambda: slots_folder(settings, world))
        self.checkpointer = Checkpointer(states, self.progress, world, settings, folder, lambda: addresses(owners))
        states["checkpoint"] = Kept(self.checkpointer.schedule, "same", None)
        for owner in owners:
            if isinstance(owner, Optimizer):
                self._hooks.append(owner.register_step_pre_hook(lambda *_: self.checkpointer.wait()).remove)

    def restore(self, where: str | Path = "auto") -> int:
        """Resume from the newest checkpoint or from the checkpoint at a path; returns the checkpoint's step, or 0 if
        there is no checkpoint."""
        return resume(self.checkpointer, str(where)) or 0

    def step(self, *, last: bool = False) -> None:
        """Count a step, and write a checkpoint if one is due. If `last`, write a checkpoint to disk and wait for it."""
        if self.closed:
            raise CheckpointError("the checkpoints are closed", hint="call `step` inside the `with` block")
        self.progress.step += 1
        self.checkpointer.capture(last)
        if not self._hooks:  # without an optimizer hook, nothing else would wait for the copy
            self.checkpointer.wait()

    def close(self) -> None:
        for remove in self._hooks:
            remove()
        self.closed = True
        close(self.checkpointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
