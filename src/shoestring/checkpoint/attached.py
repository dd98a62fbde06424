"""Attaching the checkpoint cache: to a job, and to a program that knows nothing of jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.differences.averages import KeptAverages
from shoestring.checkpoint.differences.differences import STEPS, Differences
from shoestring.checkpoint.recovery.resume import forget_all, resume
from shoestring.checkpoint.tiers.slots import Slot, slots_folder
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.compose import check_features
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.feature import DATA, Phase
from shoestring.core.job import Job, Kept
from shoestring.core.kept import Progress, RandomState
from shoestring.core.world import World

log = logging.getLogger("shoestring")

OURS = ("progress", "random", "checkpoint")
"""The names of the states that are saved besides those of a program with a loop of its own."""


def install(job: Job, settings: Tiered) -> None:
    """Save the job's kept state after its steps from now on."""

    def stable() -> set[int]:
        return addresses([job.module, job.built_optimizer, *(kept.state for kept in job.kept.values())])

    folder = job.world.agree(lambda: slots_folder(settings, job.world))
    checkpointer = Checkpointer(job.kept, job.progress, job.world, settings, folder, stable)
    job.exits.callback(close, checkpointer)
    job.keep("checkpoint", checkpointer.schedule)
    if settings.differences:
        checkpointer.differences = _differences(job, checkpointer)
        checkpointer.schedule.replays = checkpointer.differences is not None

    def capture() -> None:
        if job.done:
            job.world.agree(job.verify)
        loss = job.numbers.get("loss")
        if checkpointer.differences is not None:
            checkpointer.schedule.replays = checkpointer.differences.works
        checkpointer.capture(job.done, loss if isinstance(loss, Tensor) else None)
        job.trace.facts |= checkpointer.facts()

    job.at(Phase.WAIT, checkpointer.wait)
    job.at(Phase.CAPTURE, capture)
    job.restore_with(partial(_restore, checkpointer, job.progress.total))


def _differences(job: Job, checkpointer: Checkpointer) -> Differences | None:
    """What keeps the steps since the newest checkpoint; None on a single rank, which exchanges nothing.

    Raises:
        ConfigError: on all ranks: steps of this job cannot be replayed.
    """
    settings = checkpointer.settings
    if job.scaler.is_enabled():
        hint = 'train with precision.autocast.dtype = "bf16"'
        raise ConfigError(f"`{settings.name}.differences` cannot replay steps that a loss scale may skip", hint=hint)
    averages = next((each.state for each in job.kept.values() if isinstance(each.state, KeptAverages)), None)
    if averages is None:
        if job.world.ranks_over(DATA) > 1:
            raise ConfigError(
                f"`{settings.name}.differences` finds nothing that keeps averages", hint="add [comm.dense]"
            )
        return None
    slot = Slot(checkpointer.folder / f"{STEPS}-{job.world.local_rank}", checkpointer.files)
    claim, group, steps = checkpointer.claim, checkpointer.group, settings.differences
    partners = None
    if checkpointer.schedule.has_peers and settings.differences_on != "memory":
        partners = Slot(checkpointer.folder / f"{STEPS}-partner-{job.world.local_rank}", checkpointer.files)
    on_disk = settings.differences_on == "disk"
    differences = Differences(job, averages, slot, claim, group, steps, on_disk=on_disk, partners=partners)
    job.at(Phase.WAIT, differences.begin_step)
    return differences


def _restore(checkpointer: Checkpointer, total: int, where: str) -> int | None:
    """Resume; a run that has nothing left to do is on disk after that.

    Args:
        total: steps to do, if the run file says so.
    """
    step = resume(checkpointer, where)
    done = 0 < (total or checkpointer.progress.total) <= checkpointer.progress.position
    if where == "auto" and step is not None and done and not checkpointer.on_disk:
        checkpointer.finish()
    return step


def restore(job: Job, settings: Tiered, where: str) -> int | None:
    """`resume` for a job that does not save by the cache, but may continue from what the cache has left.

    Args:
        settings: of the cache; nothing is saved by them.
    """
    slots = job.world.agree(lambda: slots_folder(settings, job.world, make=False))
    checkpointer = Checkpointer(job.kept, job.progress, job.world, settings, slots, set)
    try:
        return resume(checkpointer, where)
    finally:
        checkpointer.close()


def close(checkpointer: Checkpointer) -> None:
    """Stop; of a run that ended by itself nothing stays in memory."""
    checkpointer.close()
    if checkpointer.finished and checkpointer.world.local_rank == 0:
        forget_all(checkpointer.folder.parent)


def addresses(owners: Iterable[object]) -> set[int]:
    """Where the tensors lie that stay as they are until the next optimizer step: parameters, optimizer state, and
    numbers of the newest step that nobody has read."""
    with torch.no_grad():  # where a DTensor gives its local tensor as it is
        return {_local(tensor).untyped_storage().data_ptr() for owner in owners for tensor in _tensors(owner)}


def _tensors(owner: object) -> Iterator[Tensor]:
    if isinstance(owner, nn.Module):
        yield from owner.parameters()
    elif isinstance(owner, Optimizer):
        for state in owner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
    elif isinstance(unread := getattr(owner, "unread", None), Tensor):  # of `Progress`, and of rows of metrics
        yield unread


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_given(state: Mapping[str, Stateful], own: Mapping[str, Stateful]) -> None:
    """Raise ConfigError where something is no state, or two of them would be saved under one name."""
    for key, given in (("state", state), ("own", own)):
        if not isinstance(given, Mapping):
            raise ConfigError(f"`{key}` must be a mapping, got a {type(given).__name__}", hint='as {"model": model}')
        for name, each in given.items():
            if not isinstance(each, Stateful):
                said = f"`{name}` in `{key}` is a {type(each).__name__}, without `state_dict` and `load_state_dict`"
                raise ConfigError(said, hint="give the object itself, such as the model, not what it holds")
    for name in OURS:
        if name in state or name in own:
            raise ConfigError(
                f"`{name}` is the name of a state that `checkpoint.attach` saves itself", hint="give yours another name"
            )
    if both := state.keys() & own.keys():
        raise ConfigError(f"`{min(both)}` is in `state` and in `own`", hint="give one of them another name")


class Attached:
    """The checkpoint cache of a program with a loop of its own. A context manager: it stops its threads at the end.

    Call `restore` before the loop, and `step` after every optimizer step, on all ranks.
    """

    def __init__(self, state: Mapping[str, Stateful], own: Mapping[str, Stateful], settings: Tiered) -> None:
        self.progress, self.closed, world = Progress(), False, World.current()
        check_features([settings])
        if not isinstance(settings, Tiered):
            raise ConfigError(f"`settings` must be a checkpoint.Tiered, got a {type(settings).__name__}")
        settings.validate(world.hosts)
        if settings.differences:
            said = f"`{settings.name}.differences` replays steps of a job, which `checkpoint.attach` knows nothing of"
            raise ConfigError(said, hint="attach it with `ss.attach(model, optimizer, comm.…, checkpoint.Tiered(…))`")
        _check_given(state, own)
        self._hooks: list[Callable[[], None]] = []
        kept = {name: Kept(each, "shard", None) for name, each in state.items()}
        kept |= {name: Kept(each, "own", None) for name, each in own.items()}
        kept |= {"progress": Kept(self.progress, "same", None), "random": Kept(RandomState(world.device), "own", None)}
        owners = list(state.values())
        folder = world.agree(lambda: slots_folder(settings, world))
        self.checkpointer = Checkpointer(kept, self.progress, world, settings, folder, lambda: addresses(owners))
        kept["checkpoint"] = Kept(self.checkpointer.schedule, "same", None)
        for owner in owners:
            if isinstance(owner, Optimizer):
                self._hooks.append(owner.register_step_pre_hook(lambda *_: self.checkpointer.wait()).remove)

    def restore(self, where: str | Path = "auto") -> int:
        """Resume from the newest state there is, or from what is named; the steps done, 0 where there is none."""
        return resume(self.checkpointer, str(where)) or 0

    def step(self, *, last: bool = False) -> None:
        """Count a step, and save where that is due; everything and at once if it is the `last`."""
        if self.closed:
            raise CheckpointError("the checkpoints are closed", hint="call `step` inside of the `with` block")
        self.progress.step += 1
        self.checkpointer.capture(last)
        if not self._hooks:  # nobody says when the optimizer will change what is being copied
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
