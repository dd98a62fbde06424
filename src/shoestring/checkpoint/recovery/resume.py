"""Resumes a run: gathers the existing checkpoints, chooses a checkpoint by `decide`, verifies it, and loads it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.state import misfit, reason_of, tell_missing
from shoestring.checkpoint.recovery.attempts import Attempts
from shoestring.checkpoint.recovery.decide import ResumeFacts, ResumePlan, decide
from shoestring.checkpoint.recovery.offers import Wish, gather, seals_under
from shoestring.checkpoint.recovery.reader import Wanted
from shoestring.checkpoint.recovery.verify import verify
from shoestring.checkpoint.tiers.claim import newest
from shoestring.checkpoint.tiers.plain import Restorer, abandon_after
from shoestring.checkpoint.tiers.slots import SEAL, Slot
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.planning.system import forget_peak

log = logging.getLogger("shoestring")


def resume(checkpointer: Checkpointer, where: str) -> int | None:
    """Resume from the newest checkpoint of `Tiered` or `Plain` ("auto"), or from the checkpoint at a path; a
    collective.

    Args:
        where: "auto", or the path of a run folder, a folder of checkpoints, the folder of one checkpoint, or a file.

    Returns:
        The step after which training continues; None if "auto" finds no checkpoint.

    Raises:
        CheckpointError: no checkpoint can be used, or its states do not fit this run; raised on all ranks.
    """
    world, group, claim = checkpointer.world, checkpointer.group, checkpointer.claim
    wish = Wish(Path(checkpointer.settings.folder), checkpointer.folder.parent)
    if where != "auto":
        wish = world.agree(lambda: Wish.of_path(Path(where)))
    host, looks = world.host_of(world.rank), world.local_rank == 0
    checkpointer.take()  # claim first, so that no other launch of the run writes checkpoints meanwhile
    available = gather(world, group, wish)
    attempts = Attempts(group, checkpointer.files, wish.disk if wish.auto else None, host if looks else None)
    attempts.look()
    history = claim.known if wish.auto else newest(group, wish.disk if looks else None)[0]
    facts = ResumeFacts(world.hosts, world.local_size, claim.damaged, attempts.counts)
    others, warned = {offer.checkpoint for offer in available.offers}, set[str]()

    def make_plan() -> ResumePlan:
        plan = decide(available, history, wish, facts)
        for line in plan.warnings:
            if line not in warned:
                log.warning("%s", line)
        warned.update(plan.warnings)
        claim.known = plan.history if wish.auto else claim.known
        return plan

    plan = make_plan()
    while (checkpoint := plan.checkpoint) is not None:
        with attempts.counted(checkpoint):
            outcome = verify(plan, facts.damaged, checkpointer)
            replayed = _load(checkpointer, plan, outcome) if isinstance(outcome, Wanted) else []
        if isinstance(outcome, Wanted):
            return _continue(checkpointer, plan, outcome, others, replayed)
        facts = facts.after(checkpoint, outcome.damaged, outcome.misfit)
        plan = make_plan()
    if plan.refusal is not None:
        raise plan.refusal
    if plan.action == "start anew":
        return None
    # A checkpoint of `Plain` is a single file.
    loader = Restorer(checkpointer.kept, checkpointer.world, Path(checkpointer.settings.folder))
    if not loader.restore(where):
        return None
    if others or checkpointer.claim.known is not None:  # all checkpoints of `Tiered` are older or unusable
        checkpointer.begin(None, others)
    if where != "auto":
        _go_back(checkpointer, checkpointer.progress.step)
    return checkpointer.progress.step


def load(checkpointer: Checkpointer, wanted: Wanted, source: str) -> None:
    """Load one state after the other, so that at most one state is in memory twice.

    Random number generators come last, because loading the other states may draw random numbers.

    Args:
        source: name of the checkpoint in messages.

    Raises:
        CheckpointError: a state does not fit this run; raised on all ranks.
    """
    if checkpointer.world.first:
        tell_missing(source, checkpointer.kept, wanted.saved)
    for name in sorted(checkpointer.kept, key=lambda name: name == "random"):
        reason = ""
        try:
            if (state := wanted.state(name)) is not None:
                checkpointer.kept[name].state.load_state_dict(state)
        except Exception as error:  # a user's `load_state_dict` may raise any exception
            reason = reason_of(error)
        if reason := next(filter(None, checkpointer.group.all_gather(reason)), ""):
            raise misfit(source, name, reason)


def _load(checkpointer: Checkpointer, plan: ResumePlan, wanted: Wanted) -> list[CheckpointId]:
    """Load a checkpoint, and replay the later steps whose differences exist; returns the replayed steps."""
    reload = partial(load, checkpointer, wanted, f"step {plan.step} of `{plan.wish.disk}`")
    reload()
    if not plan.replays or plan.history is None or checkpointer.differences is None:
        return []
    return checkpointer.differences.replay(wanted.checkpoint, plan.history, reload)


def _continue(
    checkpointer: Checkpointer,
    plan: ResumePlan,
    loaded: Wanted,
    others: Collection[CheckpointId],
    replayed: list[CheckpointId],
) -> int:
    """Begin this start of the run after a checkpoint was loaded; returns the step after which training continues.

    Args:
        others: all checkpoints that exist.
        replayed: the steps that were replayed after the checkpoint.
    """
    if plan.follows_failure:
        saved_at, now = loaded.about.get("at"), time.time()
        seconds = now - saved_at if isinstance(saved_at, float) and 0 < saved_at < now else 0.0
        # Use the time measured by the first rank, so that all ranks plan the same intervals.
        checkpointer.schedule.failed(plan.level, checkpointer.group.all_gather(seconds)[0])
    forget_peak()  # the peak so far includes memory-mapped files, so it does not describe training
    reached = replayed[-1] if replayed else None
    checkpointer.begin(loaded.checkpoint, {*others, *replayed}, reached)
    if checkpointer.world.local_rank == 0:
        # Free the slots that this host filled when it had another index among the hosts.
        with suppress(OSError):
            for path, record in seals_under(checkpointer.folder.parent):
                if path.parent != checkpointer.folder and record.checkpoint != loaded.checkpoint:
                    Slot(path.with_name(path.name.removesuffix(SEAL)), checkpointer.files).close()
    checkpointer.on_disk = plan.on_disk and not replayed
    if plan.wish.auto and plan.ended:
        checkpointer.finished = checkpointer.on_disk
        if not checkpointer.on_disk:
            checkpointer.finish()
    if not plan.wish.auto:
        _go_back(checkpointer, plan.step)
    return reached.step if reached else plan.step


def _go_back(checkpointer: Checkpointer, step: int) -> None:
    """Record in the folder of checkpoints that `Plain`'s checkpoints of later steps than `step` are abandoned."""
    folder = Path(checkpointer.settings.folder)
    checkpointer.world.agree(lambda: abandon_after(folder, step) if checkpointer.world.first else None)


def forget_all(memory: Path) -> None:
    """Remove all of a run's checkpoints and differences from this host's memory."""
    shutil.rmtree(memory, ignore_errors=True)
