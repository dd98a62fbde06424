"""Restoring a job from whatever level has its newest state."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.layout import PRIVATE
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.state import misfit, reason_of, tell_missing, unreadable
from shoestring.checkpoint.recovery.attempts import MOST, Attempts
from shoestring.checkpoint.recovery.reader import DISK, MEMORY, Offer, Wanted
from shoestring.checkpoint.recovery.search import Choice, Recovery, seals_under
from shoestring.checkpoint.tiers.claim import newest
from shoestring.checkpoint.tiers.disk import MANIFEST, MARK
from shoestring.checkpoint.tiers.keeper import REBUILT
from shoestring.checkpoint.tiers.plain import Restorer
from shoestring.checkpoint.tiers.slots import SEAL, Slot
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.errors import CheckpointError
from shoestring.planning.system import forget_peak

log = logging.getLogger("shoestring")


def resume(checkpointer: Checkpointer, where: str) -> int | None:
    """Resume from the newest state there is, a checkpoint or one file ("auto"), or from what is named; a collective.

    Args:
        where: "auto", a run folder, its folder of checkpoints, the folder of one checkpoint, or one file.

    Returns:
        The step; None where "auto" finds nothing.

    Raises:
        CheckpointError: on all ranks: nothing of what is there can be used, or it does not fit this run.
    """
    auto = where == "auto"
    memory = checkpointer.folder.parent if auto else None
    disk, only = (
        (Path(checkpointer.settings.folder), None) if auto else checkpointer.world.agree(lambda: _named(Path(where)))
    )
    checkpointer.take()
    recovery = Recovery(checkpointer.kept, checkpointer.world, checkpointer.group)
    world = checkpointer.world
    writes = world.rank // world.local_size if world.local_rank == 0 else None
    attempts = Attempts(checkpointer.group, checkpointer.files, disk if auto else None, writes)
    offers = recovery.offers(memory, disk)
    attempts.look()
    others = {offer.checkpoint for offer in offers}
    loader = Restorer(checkpointer.kept, world, Path(checkpointer.settings.folder))
    in_one_file = loader.newest() if auto and not recovery.unseen else 0
    if only:
        offers = [offer for offer in offers if Path(offer.path).parent == only]
    else:
        known = (
            checkpointer.claim.known if auto else newest(checkpointer.group, disk if world.local_rank == 0 else None)
        )
        offers = _continued(known, offers, disk, in_one_file)
    replayed: list[CheckpointId] = []
    while (choice := next(recovery.choices(offers), None)) is not None and choice.checkpoint.step >= in_one_file:
        if attempts.exhausted(choice.checkpoint):
            recovery.give_up(choice, f"the last {MOST} attempts to load it ended the process")
            continue
        with attempts.counted(choice.checkpoint):
            wanted = recovery.attempt(
                choice, lambda lost: Slot(checkpointer.folder / f"{REBUILT}{lost}", checkpointer.files)
            )
            if wanted is not None:
                source = f"step {choice.checkpoint.step} of `{disk}`"
                load(checkpointer, wanted, source)
                if auto and not _ended(choice.offers):
                    replayed = _replayed(checkpointer, choice.checkpoint, partial(load, checkpointer, wanted, source))
        if wanted is not None:
            on_disk = [offer for offer in choice.offers if offer.level == DISK]
            if auto and not _ended(on_disk):
                checkpointer.schedule.failed(choice.worst, _since(checkpointer, wanted))
            _continue_from(checkpointer, choice, others, replayed)
            checkpointer.on_disk = not replayed and _whole(choice.checkpoint, on_disk)
            if auto and _ended(choice.offers):  # it may have been killed on the way to the disk, or right after
                checkpointer.finished = checkpointer.on_disk
                if not checkpointer.on_disk:
                    checkpointer.finish()
            if not auto:
                world.agree(lambda: loader.go_back(choice.checkpoint.step) if world.first else None)
            return replayed[-1].step if replayed else choice.checkpoint.step
    if in_one_file:
        return _from_one_file(checkpointer, loader, where, others)
    if recovery.unseen:
        raise CheckpointError(f"nothing to resume from: {recovery.unseen}")
    if any(attempts.exhausted(offer.checkpoint) for offer in offers):
        hint = f"remove `{disk / MARK}*` to try again"
        raise CheckpointError(f"no checkpoint in `{disk}` can be read: {recovery.reason}", hint=hint)
    if offers and all(
        offer.level == MEMORY for offer in offers
    ):  # a first checkpoint that was cut short, or hosts are lost
        log.warning("nothing is on disk, and what is left in memory is incomplete: starting from step 0")
    elif offers:
        count, why = len({offer.checkpoint for offer in offers}), recovery.reason and f": {recovery.reason}"
        raise unreadable(disk, f"all {count} are damaged or incomplete{why}")
    step = _from_one_file(checkpointer, loader, where, others)
    if step is None and auto:
        world.agree(lambda: _check_empty(disk))
    return step


def _check_empty(disk: Path) -> None:
    """Nothing may be begun beside what looks like a checkpoint, and cannot be used."""
    if unusable := sorted(path.name for path in disk.glob("step-*") if (path / MANIFEST).exists()):
        raise CheckpointError(
            f"`{disk}` holds checkpoints, and none of them can be used: {', '.join(unusable[-3:])}",
            hint=f"`shoestring checkpoint verify {disk}` says why; or start in another folder (--run.folder NEW)",
        )


def _named(path: Path) -> tuple[Path, Path | None]:
    """The folder of checkpoints that a path means, and that of the one checkpoint if it means one."""
    try:
        if (path / MANIFEST).exists():
            return path.parent, path
        return (path / "checkpoints" if (path / "checkpoints").is_dir() else path), None
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in `{path}`: {error.strerror}") from error


def load(checkpointer: Checkpointer, wanted: Wanted, source: str) -> None:
    """Load state by state, so that no more than one is held besides; random numbers last, for the rest may draw some.

    Raises:
        CheckpointError: on all ranks: a state does not fit.
    """
    if checkpointer.world.first:
        tell_missing(source, checkpointer.kept, wanted.saved)
    for name in sorted(checkpointer.kept, key=lambda name: name == "random"):
        reason = ""
        try:
            if (state := wanted.state(name)) is not None:
                checkpointer.kept[name].state.load_state_dict(state)
        except Exception as error:  # whatever a state of the user's own raises
            reason = reason_of(error)
        if reason := next(filter(None, checkpointer.group.all_gather(reason)), ""):
            raise misfit(source, name, reason)


def _since(checkpointer: Checkpointer, wanted: Wanted) -> float:
    """Seconds since a checkpoint was saved, by the clock of the first rank, on all of them."""
    saved, now = wanted.about.get("at"), time.time()
    return checkpointer.group.all_gather(now - saved if isinstance(saved, float) and 0 < saved < now else 0.0)[0]


def _continued(known: History | None, offers: list[Offer], disk: Path, in_one_file: int) -> list[Offer]:
    """The offers that the newest start of the run continues, as its history says.

    Where there is none, memory may hold what another run has left that was in a folder of this name.

    Raises:
        CheckpointError: there are only others, which nothing may be begun beside unasked.
    """
    if known is None:
        usable = [offer for offer in offers if offer.level == DISK]
        if offers and not usable:
            log.warning("`%s` does not say of which run it is: what is left in memory is not resumed", disk)
        return usable
    usable = [offer for offer in offers if known.holds(offer.checkpoint)]
    others = [offer.checkpoint.step for offer in offers if offer.level == DISK]
    if others and not usable and not in_one_file:
        raise CheckpointError(
            f"`{disk}` holds no checkpoint of the newest start, though others up to step {max(others)}",
            hint="name the folder of one to resume it, or choose another folder",
        )
    return usable


def _whole(checkpoint: CheckpointId, offers: Iterable[Offer]) -> bool:
    """Whether every rank's part is among these."""
    return {f"{PRIVATE}-{rank}" for rank in range(checkpoint.ranks)} <= {offer.part for offer in offers}


def _replayed(checkpointer: Checkpointer, base: CheckpointId, reload: Callable[[], None]) -> list[CheckpointId]:
    """Replay the steps after a checkpoint that was loaded, where their differences are left; which they were."""
    differences, history = checkpointer.differences, checkpointer.claim.known
    if differences is None or history is None:
        return []
    return differences.replay(base, history, reload)


def _continue_from(
    checkpointer: Checkpointer, choice: Choice, others: Collection[CheckpointId], replayed: Sequence[CheckpointId]
) -> None:
    forget_peak()  # what was mapped to be read is none of training's
    reached = replayed[-1] if replayed else None
    checkpointer.begin(choice.checkpoint, {*others, *replayed}, reached)
    if checkpointer.world.local_rank == 0:
        _forget(checkpointer, choice.checkpoint)


def _ended(offers: Iterable[Offer]) -> bool:
    """Whether the run that wrote it ended by itself."""
    return any(dict(offer.notes).get("last") for offer in offers)


def _forget(checkpointer: Checkpointer, restored: CheckpointId) -> None:
    """Remove what is of other checkpoints in the slots of hosts that had another number."""
    with suppress(OSError):
        for path, record in seals_under(checkpointer.folder.parent):
            if path.parent != checkpointer.folder and record.checkpoint != restored:
                Slot(path.with_name(path.name.removesuffix(SEAL)), checkpointer.files).close()


def forget_all(memory: Path) -> None:
    """Remove all that a run has in this host's memory."""
    shutil.rmtree(memory, ignore_errors=True)


def _from_one_file(
    checkpointer: Checkpointer, loader: Restorer, where: str, others: Collection[CheckpointId]
) -> int | None:
    """Resume from a checkpoint as `Plain` writes them. Checkpoints beside it are of what came before, or was given
    up."""
    if not loader.restore(where):
        return None
    if others or checkpointer.claim.known is not None:
        checkpointer.begin(None, others)
    if where != "auto":
        checkpointer.world.agree(
            lambda: loader.go_back(checkpointer.progress.step) if checkpointer.world.first else None
        )
    return checkpointer.progress.step
