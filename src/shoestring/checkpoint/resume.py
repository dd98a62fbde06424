"""Restoring a job from whatever level has its newest state."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from shoestring.checkpoint.disk import MANIFEST
from shoestring.checkpoint.generation import Generation
from shoestring.checkpoint.plain import Loader
from shoestring.checkpoint.reader import MEMORY, Offer, Wanted
from shoestring.checkpoint.recovery import Choice, Recovery, seals_under
from shoestring.checkpoint.slots import SEAL, Slot
from shoestring.checkpoint.tiered import Engine
from shoestring.core.errors import CheckpointError

log = logging.getLogger("shoestring")


def resume(engine: Engine, where: str) -> int | None:
    """Go on from the newest generation there is ("auto"), or from the folder named; a collective.

    Args:
        where: "auto", a run folder, its folder of saves, or the folder of one generation.

    Returns:
        The step; None where "auto" finds nothing.

    Raises:
        CheckpointError: on all ranks: nothing can be read, or it does not fit this run.
    """
    auto = where == "auto"
    memory = engine.folder.parent if auto else None
    disk = Path(engine.settings.folder) if auto else _folder(Path(where))
    recovery = Recovery(engine.kept, engine.world, engine.circle)
    offers = recovery.offers(memory, disk)
    if not auto and (Path(where) / MANIFEST).exists():
        offers = [offer for offer in offers if Path(offer.path).parent == Path(where)]
    starts = [offer.generation.start for offer in offers]
    while (choice := next(recovery.choices(offers), None)) is not None:
        wanted = recovery.attempt(choice, lambda lost: Slot(engine.folder / f"rebuilt-{lost}", engine.files))
        if wanted is not None:
            load(engine, wanted, f"step {choice.generation.step} of `{disk}`")
            _go_on(engine, choice, max(starts) + 1, auto)
            return choice.generation.step
    if offers and all(offer.level == MEMORY for offer in offers):  # a first save that was cut short, or hosts are lost
        log.warning("nothing is on disk, and what is left in memory is incomplete: starting anew")
    elif offers:
        count, why = len({offer.generation for offer in offers}), recovery.reason and f": {recovery.reason}"
        raise CheckpointError(f"no save in `{disk}` can be read: all {count} are damaged or incomplete{why}")
    return _old(engine, where)


def _folder(path: Path) -> Path:
    """The folder of generations that a path means."""
    if (path / MANIFEST).exists():
        return path.parent
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def load(engine: Engine, wanted: Wanted, source: str) -> None:
    """Load state by state, so that no more than one is held besides; random numbers last, for the rest may draw some.

    Raises:
        CheckpointError: on all ranks: a state does not fit.
    """
    for name in sorted(engine.kept, key=lambda name: name == "random"):
        state, reason = wanted.state(name), ""
        try:
            if state is not None:
                engine.kept[name].state.load_state_dict(state)
        except (RuntimeError, KeyError, ValueError, AssertionError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[-1].strip() or type(error).__name__
        if reason := next(filter(None, engine.circle.tell(reason)), ""):
            raise CheckpointError(f"{source} does not fit this run's {name}: {reason}")


def _go_on(engine: Engine, choice: Choice, start: int, auto: bool) -> None:
    if auto and not _ended(choice.offers):
        engine.schedule.failed(choice.worst)
    engine.begin(start, choice.generation)
    if engine.world.local_rank == 0:
        _forget(engine, choice.generation)


def _ended(offers: tuple[Offer, ...]) -> bool:
    """Whether the run that wrote it ended by itself."""
    return any(dict(offer.notes).get("last") for offer in offers)


def _forget(engine: Engine, restored: Generation) -> None:
    """Remove what is of other generations in the slots of hosts that had another number."""
    for path, record in seals_under(engine.folder.parent):
        if path.parent != engine.folder and record.generation != restored:
            stem = path.name.removesuffix(SEAL)
            engine.files.unlink(path)
            for each in path.parent.glob(f"{stem}.*"):
                each.unlink(missing_ok=True)


def forget_all(memory: Path) -> None:
    """Remove all that a run has in this host's memory."""
    shutil.rmtree(memory, ignore_errors=True)


def _old(engine: Engine, where: str) -> int | None:
    """A save in one file, as `Plain` writes them; there is nothing else left to look for."""
    found = Loader(engine.kept, engine.world, Path(engine.settings.folder)).restore(where)
    return engine.progress.step if found else None
