"""Restoring a job from whatever level has its newest state."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.layout import PRIVATE
from shoestring.checkpoint.format.manifest import Generation
from shoestring.checkpoint.recovery.attempts import MOST, Attempts
from shoestring.checkpoint.recovery.reader import DISK, MEMORY, Offer, Wanted
from shoestring.checkpoint.recovery.search import Choice, Recovery, seals_under
from shoestring.checkpoint.tiers.claim import newest
from shoestring.checkpoint.tiers.disk import MANIFEST, MARK
from shoestring.checkpoint.tiers.keeper import REBUILT
from shoestring.checkpoint.tiers.plain import Loader
from shoestring.checkpoint.tiers.slots import SEAL, Slot
from shoestring.checkpoint.tiers.tiered import Engine
from shoestring.core.errors import CheckpointError
from shoestring.planning.system import forget_peak

log = logging.getLogger("shoestring")


def resume(engine: Engine, where: str) -> int | None:
    """Go on from the newest state there is, a generation or one file ("auto"), or from what is named; a collective.

    Args:
        where: "auto", a run folder, its folder of saves, the folder of one generation, or one file.

    Returns:
        The step; None where "auto" finds nothing.

    Raises:
        CheckpointError: on all ranks: nothing of what is there can be used, or it does not fit this run.
    """
    auto = where == "auto"
    memory = engine.folder.parent if auto else None
    disk, only = (Path(engine.settings.folder), None) if auto else engine.world.agree(lambda: _named(Path(where)))
    engine.take()
    recovery = Recovery(engine.kept, engine.world, engine.circle)
    world = engine.world
    writes = world.rank // world.local_size if world.local_rank == 0 else None
    attempts = Attempts(engine.circle, engine.files, disk if auto else None, writes)
    offers = recovery.offers(memory, disk)
    attempts.look()
    others = {offer.generation for offer in offers}
    loader = Loader(engine.kept, world, Path(engine.settings.folder))
    in_one_file = loader.newest() if auto and not recovery.unseen else 0
    if only:
        offers = [offer for offer in offers if Path(offer.path).parent == only]
    else:
        known = engine.claim.known if auto else newest(engine.circle, disk if world.local_rank == 0 else None)
        offers = _continued(known, offers, disk, in_one_file)
    while (choice := next(recovery.choices(offers), None)) is not None and choice.generation.step >= in_one_file:
        if attempts.exhausted(choice.generation):
            recovery.give_up(choice, f"the last {MOST} attempts to load it ended the process")
            continue
        with attempts.counted(choice.generation):
            wanted = recovery.attempt(choice, lambda lost: Slot(engine.folder / f"{REBUILT}{lost}", engine.files))
            if wanted is not None:
                load(engine, wanted, f"step {choice.generation.step} of `{disk}`")
        if wanted is not None:
            on_disk = [offer for offer in choice.offers if offer.level == DISK]
            if auto and not _ended(on_disk):
                engine.schedule.failed(choice.worst, _since(engine, wanted))
            _go_on(engine, choice, others)
            engine.on_disk = _whole(choice.generation, on_disk)
            if auto and _ended(choice.offers):  # it may have been killed on the way to the disk, or right after
                engine.finished = engine.on_disk
                if not engine.on_disk:
                    engine.finish()
            if not auto:
                world.agree(lambda: loader.go_back(choice.generation.step) if world.first else None)
            return choice.generation.step
    if in_one_file:
        return _from_one_file(engine, loader, where, others)
    if recovery.unseen:
        raise CheckpointError(f"nothing to go on from: {recovery.unseen}")
    if any(attempts.exhausted(offer.generation) for offer in offers):
        hint = f"remove `{disk / MARK}*` to try again"
        raise CheckpointError(f"no save in `{disk}` can be read: {recovery.reason}", hint=hint)
    if offers and all(offer.level == MEMORY for offer in offers):  # a first save that was cut short, or hosts are lost
        log.warning("nothing is on disk, and what is left in memory is incomplete: starting anew")
    elif offers:
        count, why = len({offer.generation for offer in offers}), recovery.reason and f": {recovery.reason}"
        raise CheckpointError(f"no save in `{disk}` can be read: all {count} are damaged or incomplete{why}")
    step = _from_one_file(engine, loader, where, others)
    if step is None and auto:
        world.agree(lambda: _check_empty(disk))
    return step


def _check_empty(disk: Path) -> None:
    """Nothing may be begun beside what looks like a checkpoint, and cannot be used."""
    if unusable := sorted(path.name for path in disk.glob("step-*") if (path / MANIFEST).exists()):
        raise CheckpointError(
            f"`{disk}` holds checkpoints, and none of them can be used: {', '.join(unusable[-3:])}",
            hint="`shoestring checkpoint ls` says why; move them away to start anew",
        )


def _named(path: Path) -> tuple[Path, Path | None]:
    """The folder of generations that a path means, and that of the one generation if it means one."""
    try:
        if (path / MANIFEST).exists():
            return path.parent, path
        return (path / "checkpoints" if (path / "checkpoints").is_dir() else path), None
    except OSError as error:
        raise CheckpointError(f"cannot look for saves in `{path}`: {error.strerror}") from error


def load(engine: Engine, wanted: Wanted, source: str) -> None:
    """Load state by state, so that no more than one is held besides; random numbers last, for the rest may draw some.

    Raises:
        CheckpointError: on all ranks: a state does not fit.
    """
    for name in sorted(engine.kept, key=lambda name: name == "random"):
        reason = ""
        try:
            if (state := wanted.state(name)) is not None:
                engine.kept[name].state.load_state_dict(state)
        except Exception as error:  # whatever a state of the user's own raises
            reason = (str(error).splitlines() or [type(error).__name__])[-1].strip() or type(error).__name__
        if reason := next(filter(None, engine.circle.tell(reason)), ""):
            raise CheckpointError(f"{source} does not fit this run's {name}: {reason}")


def _since(engine: Engine, wanted: Wanted) -> float:
    """Seconds since a generation was saved, by the clock of the first rank, on all of them."""
    saved, now = wanted.about.get("at"), time.time()
    return engine.circle.tell(now - saved if isinstance(saved, float) and 0 < saved < now else 0.0)[0]


def _continued(known: History | None, offers: list[Offer], disk: Path, in_one_file: int) -> list[Offer]:
    """The offers that the newest start of the run continues, as its history says.

    Where there is none, memory may hold what another run has left that was in a folder of this name.

    Raises:
        CheckpointError: there are only others, which nothing may be begun beside unasked.
    """
    if known is None:
        found = [offer for offer in offers if offer.level == DISK]
        if offers and not found:
            log.warning("`%s` does not say of which run it is: what is left in memory is not resumed", disk)
        return found
    found = [offer for offer in offers if known.holds(offer.generation)]
    others = [offer.generation.step for offer in offers if offer.level == DISK]
    if others and not found and not in_one_file:
        raise CheckpointError(
            f"`{disk}` holds no checkpoint of the newest start, though others up to step {max(others)}",
            hint="name the folder of one to resume it, or choose another folder",
        )
    return found


def _whole(generation: Generation, offers: Iterable[Offer]) -> bool:
    """Whether every rank's part is among these."""
    return {f"{PRIVATE}-{rank}" for rank in range(generation.ranks)} <= {offer.part for offer in offers}


def _go_on(engine: Engine, choice: Choice, others: Collection[Generation]) -> None:
    forget_peak()  # what was mapped to be read is none of training's
    engine.begin(choice.generation, others)
    if engine.world.local_rank == 0:
        _forget(engine, choice.generation)


def _ended(offers: Iterable[Offer]) -> bool:
    """Whether the run that wrote it ended by itself."""
    return any(dict(offer.notes).get("last") for offer in offers)


def _forget(engine: Engine, restored: Generation) -> None:
    """Remove what is of other generations in the slots of hosts that had another number."""
    with suppress(OSError):
        for path, record in seals_under(engine.folder.parent):
            if path.parent != engine.folder and record.generation != restored:
                Slot(path.with_name(path.name.removesuffix(SEAL)), engine.files).close()


def forget_all(memory: Path) -> None:
    """Remove all that a run has in this host's memory."""
    shutil.rmtree(memory, ignore_errors=True)


def _from_one_file(engine: Engine, loader: Loader, where: str, others: Collection[Generation]) -> int | None:
    """Go on from a save as `Plain` writes them. Generations beside it are of what came before, or was given up."""
    if not loader.restore(where):
        return None
    if others or engine.claim.known is not None:
        engine.begin(None, others)
    if where != "auto":
        engine.world.agree(lambda: loader.go_back(engine.progress.step) if engine.world.first else None)
    return engine.progress.step
