"""Explains what `run.resume = "auto"` would do, by calling `decide` with the files on this host in a single process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.checkpoint.differences.batches import batch_files
from shoestring.checkpoint.differences.differences import STEPS
from shoestring.checkpoint.differences.ring import steps_kept
from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.layout import Box
from shoestring.checkpoint.recovery.attempts import judge, read_marks
from shoestring.checkpoint.recovery.decide import NotTaken, ResumeFacts, ResumePlan, decide
from shoestring.checkpoint.recovery.offers import DISK, MEMORY, Available, Wish, gather
from shoestring.checkpoint.recovery.reader import Damage, Reader
from shoestring.checkpoint.tiers.claim import is_locked
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.core.errors import CheckpointError
from shoestring.core.world import World

_RING = re.compile(rf"{STEPS}-(\d+)\.ring")


@dataclass(frozen=True)
class Explanation:
    """The plan by which a run would resume, and other facts about the run that are visible on this host."""

    plan: ResumePlan
    available: Available
    replayed: int
    """The last step that would be replayed after the checkpoint; the checkpoint's own step if no step would be
    replayed."""
    in_use: bool
    """Whether a running process holds the lock on the run's checkpoints."""

    def facts(self) -> dict[str, Any]:
        """Return the explanation as an object for JSON."""
        plan = self.plan
        return {
            "action": plan.action,
            "step": plan.step,
            "level": plan.level if plan.offers else "",
            "replayed": self.replayed,
            "why": plan.why,
            "hint": plan.refusal.hint if plan.refusal else "",
            "not_taken": [
                {
                    "step": left.checkpoint.step,
                    "start": left.checkpoint.start,
                    "where": _where(left),
                    "why": left.reason,
                }
                for left in plan.not_taken
            ],
            "unusable": list(self.available.unusable),
            "in_use": self.in_use,
        }

    def lines(self) -> Iterator[str]:
        """Yield the explanation as lines of text."""
        plan, disk = self.plan, self.plan.wish.disk
        would = f'resume = "auto" in `{disk}` would'
        if plan.action == "load":
            yield f"{would} resume from step {plan.step}: {plan.why}. All files that it would read are undamaged."
        elif plan.action == "load one file":
            yield f"{would} resume from step {plan.step}: {plan.why}."
        elif plan.action == "start anew":
            yield f"{would} start from step 0: {plan.why}."
        else:
            yield f"{would} be refused: {plan.why}."
            yield from [f"To do: {plan.refusal.hint}."] if plan.refusal and plan.refusal.hint else []
        if self.replayed > plan.step:
            steps = f"Steps {plan.step + 1} to {self.replayed}" if self.replayed > plan.step + 1 else "The next step"
            yield (
                f"{steps} would be replayed after it, from differences on this host, if all ranks have theirs and the "
                "run exchanges gradients as before."
            )
        if self.in_use:
            yield "The run is in progress: until it has ended, a new start is refused. Newer checkpoints may come."
        not_taken = []
        for left in plan.not_taken:
            checkpoint, reason = left.checkpoint, left.reason
            if checkpoint.step > plan.step and reason.startswith("incomplete") and checkpoint.ranks > checkpoint.local:
                reason += "; it is used if other hosts have them"
            not_taken.append(f"step {checkpoint.step}, {_where(left)}: {reason}")
        not_taken += [f"`{name}`, on disk: damaged: its manifest cannot be read" for name in self.available.unusable]
        if plan.action != "load one file":
            for files in self.available.one_files:
                state = f"of step {files.undamaged}" if files.undamaged else "none"
                not_taken.append(f"single files: {files.count}; the newest that is undamaged: {state}")
        if not_taken:
            yield "Not used:"
            yield from (f"  {line}" for line in not_taken)
        hosts = {offer.checkpoint.ranks // offer.checkpoint.local for offer in self.available.offers}
        if max(hosts, default=1) > 1:
            yield "Checkpoints in other hosts' memory or on their own disks cannot be seen from here."


def explain(disk: Path, memory: Path) -> Explanation:
    """Decide like a start of a run, and verify the checkpoint that would be loaded, without writing any file.

    Args:
        disk: folder of the run's checkpoints.
        memory: folder of the run's slots in this host's memory.
    """
    wish, history, history_damaged = Wish(disk, memory), None, False
    available = gather(World(), RankGroup(0, 1, None), wish)
    try:
        history = History.read(disk)
    except CheckpointError:
        history_damaged = True
    attempts, _ = judge([read_marks(disk)])
    facts = ResumeFacts(history_damaged=history_damaged, attempts=attempts)
    plan = decide(available, history, wish, facts)
    while (checkpoint := plan.checkpoint) is not None:
        damaged, misfit = _verify(plan)
        if not damaged and not misfit:
            break
        facts = facts.after(checkpoint, damaged, misfit)
        plan = decide(available, history, wish, facts)
    return Explanation(plan, available, _replayed(plan), is_locked(disk))


def _verify(plan: ResumePlan) -> tuple[Damage, str]:
    """Read all tensors of a checkpoint; returns the damaged files, and the reason if the tensors do not fit
    together."""
    reader = Reader(World(), RankGroup(0, 1, None), list(plan.offers))
    if damaged := reader.open():
        return damaged, ""
    if plan.rebuilds:  # rebuilding would write a file, so only read the parts needed to rebuild
        for index, part in reader.parts.items():
            try:
                part.verify()
            except CheckpointError as error:
                damaged[reader.offers[index].key] = error.parts()[1]
        return damaged, ""
    try:
        reader.sort()
        boxes = {name: Box((0,) * len(shape), shape) for name, (_, shape) in reader.kinds.items()}
        return reader.verify({"all": [read for name, box in boxes.items() for read in reader.locate(name, box)]}), ""
    except CheckpointError as error:
        return {}, error.parts()[1]


def _replayed(plan: ResumePlan) -> int:
    """Return the last step that could be replayed: every rank with differences on this host has the differences of all
    steps from the checkpoint up to this step."""
    history, checkpoint = plan.history, plan.checkpoint
    if not plan.replays or history is None or checkpoint is None or plan.wish.memory is None:
        return plan.step
    steps: dict[int, set[int]] = {}
    for path in plan.wish.memory.glob(f"host-*/{STEPS}-*"):
        if match := _RING.fullmatch(path.name):
            rank = int(path.parent.name.removeprefix("host-")) * checkpoint.local + int(match[1])
            steps.setdefault(rank, set()).update(steps_kept(path, history))
    for batch in batch_files(plan.wish.disk):
        if batch.holds(history):
            steps.setdefault(batch.rank, set()).update(range(batch.first, batch.last + 1))
    last = plan.step
    while steps and all(last + 1 in recorded for recorded in steps.values()):
        last += 1
    return last


def _where(left: NotTaken) -> str:
    levels: Mapping[str, str] = {MEMORY: "in memory", DISK: "on disk"}
    return " and ".join(words for level, words in levels.items() if any(offer.level == level for offer in left.offers))
